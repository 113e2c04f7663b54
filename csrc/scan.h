// Drawing rows by a pass over coded keys, as all layers of one configuration do it: the rotation, queries in the keys'
// terms, and the thresholds that keep the number of rows within the budget.
#pragma once

#include <cstdint>
#include <vector>

#include "lsh.h"

namespace magicpig {

// Keys that are passed over together or not at all, where not all of them are; a multiple of kCodeBlock.
constexpr uint32_t kPatch = 64;
inline size_t num_patches(size_t tokens) { return (tokens + kPatch - 1) / kPatch; }

struct Scan {
  // signs: [num_rounds, padded_dim(head_dim)], 1 or -1.
  Scan(uint32_t bits, float budget, uint32_t min_rows, float target_error, float passed, uint32_t seed,
       uint32_t head_dim, const float* signs, uint32_t num_rounds);

  const uint32_t bits;  // per dimension
  const float budget;   // share of the keys
  const uint32_t min_rows;
  const float
      target_error;     // of the output, relative: as few rows as it takes, within the budget; 0: all of the budget
  const float passed;   // share of the codes that a pass is over, by the means of patches; 1: all
  const uint32_t seed;  // of the draws
  const uint32_t head_dim, dim, span, num_rounds, num_lines;
  std::vector<float> signs;  // scaled, as EncodeArgs wants them

  bool operator==(const Scan& other) const;
  uint32_t level() const { return bits == 1 ? 0 : bits == 2 ? 1 : 2; }  // which of the kernels
  uint32_t code_dim() const { return num_lines * 32 / bits; }
  size_t block_bytes() const { return size_t{num_lines} * 64 + 2 * kCodeBlock * sizeof(float); }
  // Means of patches, where there are any, are coded as keys are, with more bits.
  static constexpr uint32_t kMeanBits = 4;
  uint32_t mean_lines() const { return (dim * kMeanBits + 31) / 32; }
  size_t mean_block_bytes() const { return size_t{mean_lines()} * 64 + 2 * kCodeBlock * sizeof(float); }
  bool by_patches() const { return passed < 1; }
  float step() const { return step_of(bits); }  // between the levels of an element of unit variance
  static float step_of(uint32_t bits);
  float temper() const;    // codes are noisy: proposals are flatter than they say
  float optimism() const;  // and errors are larger, by this factor on real keys
  void rotate(float* x) const;
};

// Makes two words depend on floats, as random numbers do on what they are for.
void stir(const float* x, uint32_t count, uint32_t (&state)[2]);

// Those of one KV head's codes that are passed over: all, or some patches.
struct Passed {
  bool all = true;
  std::vector<uint32_t> patches;  // by their numbers in the sequence, in ascending order
  std::vector<float> log_probability;
};

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
  const float* mean_offsets(size_t i) const { return mean_offsets_.data() + i; }
  size_t stride() const { return code_dim_; }
  float scale() const { return scale_; }  // of the scores, tempered
  const uint32_t* key(size_t i) const { return keys_.data() + i / group_ * 2; }

  std::vector<float> log_thresholds;  // of each query: rows whose weight exceeds it are always drawn
  Passed& passed(size_t i) { return passed_[i / group_]; }
  const Passed& passed(size_t i) const { return passed_[i / group_]; }

 private:
  uint32_t group_ = 1, code_dim_ = 0;
  float scale_ = 0;
  std::vector<int8_t> codes_;
  std::vector<float> slopes_, offsets_, mean_offsets_;  // the last for means of patches
  std::vector<Passed> passed_;                          // of each group
  std::vector<uint32_t> keys_;                          // two for each group
};

}  // namespace magicpig
