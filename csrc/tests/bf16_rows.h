// Rows of bf16, for the native tests of layers and prompts.
#pragma once

#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "kernels.h"

namespace magicpig {

inline bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline double value(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// In memory of its exact size, so that the sanitizer sees a read past the end.
inline std::vector<bf16> gaussian(size_t count, uint32_t seed, float scale = 1) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<bf16> out(count);
  for (bf16& x : out) x = to_bf16(scale * normal(engine));
  out.shrink_to_fit();
  return out;
}

}  // namespace magicpig
