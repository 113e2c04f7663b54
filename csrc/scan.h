// Drawing rows by a pass over coded keys, as all layers of one configuration do it: the rotation, queries in the keys'
// terms, and the thresholds that keep the number of rows within the budget.
#pragma once

#include <cstdint>
#include <vector>

#include "lsh.h"

namespace magicpig {

struct Scan {
  // signs: [num_rounds, padded_dim(head_dim)], 1 or -1.
  Scan(uint32_t bits, float budget, uint32_t min_rows, float target_error, uint32_t seed, uint32_t head_dim,
       const float* signs, uint32_t num_rounds);

  const uint32_t bits;  // per dimension
  const float budget;   // share of the keys
  const uint32_t min_rows;
  const float
      target_error;     // of the output, relative: as few rows as it takes, within the budget; 0: all of the budget
  const uint32_t seed;  // of the draws
  const uint32_t head_dim, dim, span, num_rounds, num_lines;
  std::vector<float> signs;  // scaled, as EncodeArgs wants them

  bool operator==(const Scan& other) const;
  uint32_t level() const { return bits == 1 ? 0 : bits == 2 ? 1 : 2; }  // which of the kernels
  uint32_t code_dim() const { return num_lines * 32 / bits; }
  size_t block_bytes() const { return size_t{num_lines} * 64 + 2 * kCodeBlock * sizeof(float); }
  float step() const;      // between the levels of an element of unit variance
  float temper() const;    // codes are noisy: proposals are flatter than they say
  float optimism() const;  // and errors are larger, by this factor on real keys
  void rotate(float* x) const;
};

// Makes two words depend on floats, as random numbers do on what they are for.
void stir(const float* x, uint32_t count, uint32_t (&state)[2]);

// Queries as a pass over codes wants them.
class ScanQueries {
 public:
  ScanQueries() = default;
  // Room for `count` queries. group: queries of one KV head.
  ScanQueries(const Scan& scan, size_t count, uint32_t group, float scale);

  // Fills in the queries of one KV head, the first of which is number `first`. values: [count, dim].
  void prepare(const Scan& scan, const float* values, size_t first);

  const int8_t* codes(size_t i) const { return codes_.data() + i * code_dim_; }
  const float* slopes(size_t i) const { return slopes_.data() + i; }
  const float* offsets(size_t i) const { return offsets_.data() + i; }
  float scale() const { return scale_; }  // of the scores, tempered
  const uint32_t* key(size_t i) const { return keys_.data() + i / group_ * 2; }

  std::vector<float> log_thresholds;  // of each query: rows whose weight exceeds it are always drawn

 private:
  uint32_t group_ = 1, code_dim_ = 0;
  float scale_ = 0;
  std::vector<int8_t> codes_;
  std::vector<float> slopes_, offsets_;
  std::vector<uint32_t> keys_;  // two for each group
};

}  // namespace magicpig
