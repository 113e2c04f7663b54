// Locality-sensitive hashing shared by all layers of one configuration: the projection, codes of queries, log u.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace magicpig {

inline uint32_t padded_dim(uint32_t head_dim) { return (head_dim + kChunk - 1) / kChunk * kChunk; }
inline size_t element_bytes(RowType type) { return type == kF32 ? 4 : 2; }

struct Lsh {
  // projection: [head_dim, num_tables * bits_per_table] float32, values that bf16 holds exactly.
  Lsh(uint32_t bits_per_table, uint32_t num_tables, uint32_t min_collisions, uint32_t head_dim,
      const float* projection);

  const uint32_t bits_per_table, num_tables, min_collisions, head_dim;
  const uint32_t dim;         // head_dim, padded
  const uint32_t num_groups;  // of 16 columns
  std::vector<bf16> panels;   // the projection as Kernels::hash wants it
  std::vector<float> log_u;   // [kLogUIntervals + 2] over angle / pi

  bool operator==(const Lsh& other) const;
  uint32_t num_buckets() const { return 1u << bits_per_table; }

  // The bucket of a vector in `table`, from the sign bits Kernels::hash gave for `row`.
  uint16_t code(const uint16_t* bits, size_t bits_stride, size_t row, uint32_t table) const {
    const uint32_t bit = table * bits_per_table, group = bit / kChunk;
    uint32_t word = bits[group * bits_stride + row];
    if (bit % kChunk + bits_per_table > kChunk)
      word |= static_cast<uint32_t>(bits[(group + 1) * bits_stride + row]) << 16;
    return static_cast<uint16_t>(word >> bit % kChunk & (num_buckets() - 1));
  }

  // The same, of all vectors whose bits these are, [num_groups, count].
  void codes(const uint16_t* bits, size_t count, uint32_t table, uint16_t* out) const {
    const uint32_t bit = table * bits_per_table, shift = bit % kChunk, mask = num_buckets() - 1;
    const uint16_t* words = bits + bit / kChunk * count;
    const uint16_t* next = shift + bits_per_table > kChunk ? words + count : words;  // where it has the last bits
    for (size_t i = 0; i < count; ++i)
      out[i] = static_cast<uint16_t>((words[i] | static_cast<uint32_t>(next[i]) << 16) >> shift & mask);
  }

  // Signs of the projections of `count` vectors [count, dim], as Kernels::hash gives them: [num_groups, count].
  std::vector<uint16_t> sign_bits(const Kernels& kernels, const float* x, size_t count) const;
};

// log of the probability that a key at angle t * pi from the query shares at least min_collisions of num_tables
// buckets.
double log_inclusion_probability(double t, uint32_t bits_per_table, uint32_t num_tables, uint32_t min_collisions);

}  // namespace magicpig
