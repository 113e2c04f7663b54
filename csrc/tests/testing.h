// What the native tests share.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "lsh.h"
#include "scan.h"

namespace magicpig {

inline float rounded_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Gaussian numbers that bf16 holds, so that every row type but f16 stores them unchanged; scaled so that f16 does too.
inline std::vector<float> gaussian(size_t count, uint32_t seed, float offset = 0) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> out(count);
  for (float& x : out) x = rounded_to_bf16(std::round((normal(engine) + offset) * 64) / 64);
  return out;
}

inline std::shared_ptr<const Lsh> make_lsh(uint32_t bits, uint32_t tables, uint32_t collisions, uint32_t head_dim) {
  const std::vector<float> projection = gaussian(size_t{head_dim} * bits * tables, 7);
  return std::make_shared<Lsh>(bits, tables, collisions, head_dim, projection.data());
}

inline std::shared_ptr<const Scan> make_scan(uint32_t bits, float budget, uint32_t min_rows, uint32_t head_dim,
                                             float target_error = 0) {
  const uint32_t dim = padded_dim(head_dim), rounds = (dim & (dim - 1)) == 0 ? 2 : 4;
  std::mt19937 engine(head_dim);
  std::vector<float> signs(rounds * dim);
  for (float& x : signs) x = engine() % 2 ? 1.0f : -1.0f;
  return std::make_shared<Scan>(bits, budget, min_rows, target_error, 5, head_dim, signs.data(), rounds);
}

template <class E>
bool throws(const std::function<void()>& f) {
  try {
    f();
  } catch (const E&) {
    return true;
  }
  return false;
}

}  // namespace magicpig
