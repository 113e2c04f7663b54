#include "scan.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace magicpig {

namespace {

constexpr float kAlways = -kLargest;  // a threshold below all weights

uint32_t largest_power_of_two(uint32_t n) {
  uint32_t power = 1;
  while (2 * power <= n) power *= 2;
  return power;
}

}  // namespace

Scan::Scan(uint32_t bits, float budget, uint32_t min_rows, float target_error, uint32_t seed, uint32_t head_dim,
           const float* given, uint32_t num_rounds)
    : bits(bits),
      budget(budget),
      min_rows(min_rows),
      target_error(target_error),
      seed(seed),
      head_dim(head_dim),
      dim(padded_dim(head_dim)),
      span(largest_power_of_two(dim)),
      num_rounds(num_rounds),
      num_lines((dim * bits + 31) / 32),
      signs(given, given + size_t{num_rounds} * dim) {
  if (bits != 1 && bits != 2 && bits != 4) throw std::invalid_argument("bits_per_dim must be 1, 2 or 4");
  if (!(budget > 0 && budget <= 1)) throw std::invalid_argument("budget must be above 0 and at most 1");
  if (!(target_error >= 0 && target_error <= 1)) throw std::invalid_argument("target_error must be from 0 to 1");
  if (head_dim < 8 || head_dim > kMaxDim) throw std::invalid_argument("head_dim must be from 8 to 256");
  for (uint32_t round = 0; round < num_rounds; ++round) {
    float* part = signs.data() + round * dim + (round % 2 ? dim - span : 0);
    for (uint32_t d = 0; d < span; ++d) part[d] /= std::sqrt(static_cast<float>(span));
  }
}

void stir(const float* x, uint32_t count, uint32_t (&state)[2]) {
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t word;
    std::memcpy(&word, x + i, sizeof word);
    uint32_t& each = state[i % 2];
    each = (each ^ word) * 0x9e3779b1u;
    each ^= each >> 15;
  }
}

bool Scan::operator==(const Scan& other) const {
  return bits == other.bits && budget == other.budget && min_rows == other.min_rows &&
         target_error == other.target_error && seed == other.seed && head_dim == other.head_dim &&
         num_rounds == other.num_rounds && signs == other.signs;
}

// The best uniform levels for a Gaussian element (J. Max, "Quantizing for minimum distortion", 1960).
float Scan::step() const { return bits == 1 ? 1.0f : bits == 2 ? 0.9957f : 0.3352f; }

float Scan::temper() const { return bits == 1 ? 0.7f : bits == 2 ? 0.85f : 1.0f; }

float Scan::optimism() const { return bits == 1 ? 2.5f : bits == 2 ? 1.5f : 1.2f; }

void Scan::rotate(float* x) const {
  for (uint32_t round = 0; round < num_rounds; ++round) {
    for (uint32_t d = 0; d < dim; ++d) x[d] *= signs[round * dim + d];
    float* part = x + (round % 2 ? dim - span : 0);
    for (uint32_t half = 1; half < span; half *= 2)
      for (uint32_t first = 0; first < span; first += 2 * half)
        for (uint32_t d = first; d < first + half; ++d) {
          const float a = part[d], b = part[d + half];
          part[d] = a + b;
          part[d + half] = a - b;
        }
  }
}

ScanQueries::ScanQueries(const Scan& scan, size_t count, uint32_t group, float scale)
    : log_thresholds(count, kAlways),
      group_(group),
      code_dim_(scan.code_dim()),
      scale_(scale * scan.temper()),
      codes_(count * code_dim_),
      slopes_(count),
      offsets_(count),
      keys_(count / group * 2) {}

void ScanQueries::prepare(const Scan& scan, const float* values, size_t first) {
  uint32_t key[2] = {scan.seed, ~scan.seed};
  std::vector<float> x(scan.dim);
  for (size_t i = first; i < first + group_; ++i) {
    std::copy_n(values + i * scan.dim, scan.dim, x.data());
    stir(x.data(), scan.head_dim, key);
    scan.rotate(x.data());
    float largest = 0;
    for (float each : x) largest = std::max(largest, std::fabs(each));
    const float width = largest / 127, inverse = largest > 0 ? 127 / largest : 0;
    int32_t sum = 0;
    for (uint32_t d = 0; d < scan.dim; ++d) {
      const auto code = static_cast<int8_t>(std::lrint(std::min(std::max(x[d] * inverse, -127.0f), 127.0f)));
      codes_[i * code_dim_ + d] = code;
      sum += code;
    }
    const float unit = scale_ * width, top = static_cast<float>((1 << scan.bits) - 1);
    slopes_[i] = 2 * unit;
    offsets_[i] = -unit * top * static_cast<float>(sum);
  }
  std::copy_n(key, 2, keys_.data() + first / group_ * 2);
}

}  // namespace magicpig
