// Attention of a batch of sequences over their far contexts, in one call.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "segment.h"

namespace magicpig {

// How products become scores.
struct Scoring {
  float scale;
  float softcap;  // 0: none
};

struct AttendResult {
  float* out;          // [batch, num_heads, head_dim]
  float* lse;          // [batch, num_heads], natural logarithm; -inf (and zeros in out) for an empty context
  int64_t* rows_read;  // [batch, num_heads]
};

// Seconds that all threads together spent on drawing rows and on attention over them.
struct Timing {
  double draw, attend;
};

// queries: [batch, num_heads, head_dim] dense, of the given type. `exact`: read every row, whatever index there is.
// std::invalid_argument when queries hold NaN, infinity or too large a norm.
Timing attend(const Geometry& geometry, const std::vector<std::shared_ptr<const SegmentList>>& batch,
              const char* queries, RowType type, Scoring scoring, bool exact, const AttendResult& result);

// The rows that attend would read for each head of one sequence, in ascending order, and their log inclusion
// probabilities.
struct Sample {
  std::vector<int32_t> rows;
  std::vector<float> log_probability;
};
std::vector<Sample> sample(const Geometry& geometry, const SegmentList& segments, const char* queries, RowType type);

}  // namespace magicpig
