#include "lsh.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "threads.h"

namespace magicpig {

namespace {

uint32_t in_range(uint32_t value, uint32_t low, uint32_t high, const char* name) {
  if (value < low || value > high) {
    throw std::invalid_argument(std::string(name) + " must be from " + std::to_string(low) + " to " +
                                std::to_string(high) + ", not " + std::to_string(value));
  }
  return value;
}

bf16 exact_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (bits & 0xffff) throw std::invalid_argument("projection has values that bfloat16 does not hold exactly");
  return {static_cast<uint16_t>(bits >> 16)};
}

}  // namespace

double log_inclusion_probability(double t, uint32_t bits_per_table, uint32_t num_tables, uint32_t min_collisions) {
  const double log_b = bits_per_table * std::log1p(-t);  // log P(same bucket of one table)
  if (log_b == 0) return 0;
  const double log_miss = std::log(-std::expm1(log_b));
  // The binomial tail, or 1 less the rest of the distribution: whichever sums the smaller terms.
  auto log_term = [&](uint32_t j) {
    return std::lgamma(num_tables + 1.0) - std::lgamma(j + 1.0) - std::lgamma(num_tables - j + 1.0) + j * log_b +
           (num_tables - j) * log_miss;
  };
  double below = 0, above = 0;
  for (uint32_t j = 0; j < min_collisions; ++j) below += std::exp(log_term(j));
  if (below < 0.5) return std::log1p(-below);
  double peak = -INFINITY;
  for (uint32_t j = min_collisions; j <= num_tables; ++j) peak = std::max(peak, log_term(j));
  for (uint32_t j = min_collisions; j <= num_tables; ++j) above += std::exp(log_term(j) - peak);
  return peak + std::log(above);
}

Lsh::Lsh(uint32_t bits_per_table_, uint32_t num_tables_, uint32_t min_collisions_, uint32_t head_dim_,
         const float* projection)
    : bits_per_table(in_range(bits_per_table_, 1, 16, "bits_per_table")),
      num_tables(in_range(num_tables_, 1, 4096, "num_tables")),
      min_collisions(in_range(min_collisions_, 1, std::min<uint32_t>(num_tables_, 255), "min_collisions")),
      head_dim(in_range(head_dim_, 1, kMaxDim, "head_dim")),
      dim(padded_dim(head_dim_)),
      num_groups((num_tables_ * bits_per_table_ + kChunk - 1) / kChunk) {
  const uint32_t columns = num_tables * bits_per_table;
  panels.resize(static_cast<size_t>(num_groups) * dim * kChunk);
  for (uint32_t column = 0; column < columns; ++column) {
    bf16* panel = panels.data() + static_cast<size_t>(column / kChunk) * dim * kChunk;
    for (uint32_t d = 0; d < head_dim; ++d) {
      panel[(d / 2 * kChunk + column % kChunk) * 2 + d % 2] =
          exact_bf16(projection[static_cast<size_t>(d) * columns + column]);
    }
  }
  log_u.resize(kLogUIntervals + 2);
  for (uint32_t i = 0; i < kLogUIntervals; ++i) {
    log_u[i] = static_cast<float>(
        log_inclusion_probability(i / double{kLogUIntervals}, bits_per_table, num_tables, min_collisions));
  }
  // At the far end u = 0 and such a key is never drawn; half an interval before it keeps the table finite.
  log_u[kLogUIntervals] = static_cast<float>(
      log_inclusion_probability(1 - 0.5 / kLogUIntervals, bits_per_table, num_tables, min_collisions));
  log_u[kLogUIntervals + 1] = log_u[kLogUIntervals];
}

bool Lsh::operator==(const Lsh& other) const {
  return bits_per_table == other.bits_per_table && num_tables == other.num_tables &&
         min_collisions == other.min_collisions && head_dim == other.head_dim &&
         std::memcmp(panels.data(), other.panels.data(), panels.size() * sizeof(bf16)) == 0;
}

std::vector<uint16_t> Lsh::sign_bits(const Kernels& kernels, const float* x, size_t count) const {
  // Few vectors and many columns: both are cut, so that all threads have something to do.
  constexpr size_t kRows = 24, kGroups = 8;
  const size_t row_parts = (count + kRows - 1) / kRows, group_parts = (num_groups + kGroups - 1) / kGroups;
  std::vector<uint16_t> bits(num_groups * count);
  parallel_for(row_parts * group_parts, [&](size_t task) {
    const size_t row = task / group_parts * kRows, group = task % group_parts * kGroups;
    const size_t rows = std::min(kRows, count - row), groups = std::min<size_t>(kGroups, num_groups - group);
    static thread_local std::vector<float> scratch;
    scratch.resize((kRows + 8) * dim);
    kernels.hash(x + row * dim, rows, dim, panels.data() + group * dim * kChunk, static_cast<uint32_t>(groups),
                 bits.data() + group * count + row, count, scratch.data());
  });
  return bits;
}

}  // namespace magicpig
