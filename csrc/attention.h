// Attention of a batch of sequences over their far contexts, in one call.
#pragma once

#include <cstdint>
#include <vector>

#include "drawn_rows.h"
#include "run.h"

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
  int64_t* visited;    // [batch, num_heads]: entries of hash buckets that were walked through; may be null
  float* predicted;    // [batch, num_heads]: errors, where there is a target; see set_thresholds; may be null
};

// Seconds that all threads together spent on drawing rows, on attention over drawn rows, and over rows read whole.
struct Timing {
  double draw, drawn, exact;
};

// What another device has found for the queries; null: found here.
struct Found {
  const uint16_t* signs = nullptr;  // of their projections; see PreparedQueries
  const DrawnRows* rows = nullptr;  // instead of drawing by codes
};

// batch: of each sequence, the runs it attends to.
// queries: [batch, num_heads, head_dim] dense, of the given type. `exact`: read every row, whatever index there is.
// std::invalid_argument when queries hold NaN, infinity or too large a norm.
Timing attend(const Geometry& geometry, const std::vector<std::vector<Run>>& batch, const char* queries, RowType type,
              Scoring scoring, bool exact, const AttendResult& result, const Found& found = {});

// The rows that attend would read for each head of one sequence, in ascending order, and their log inclusion
// probabilities.
struct Sample {
  std::vector<int32_t> rows;
  std::vector<float> log_probability;
};
std::vector<Sample> sample(const Geometry& geometry, const std::vector<Run>& runs, const char* queries, RowType type,
                           float scale);

}  // namespace magicpig
