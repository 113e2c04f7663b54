// How many rows a pass over codes draws: thresholds, from a part of the keys.
#pragma once

#include <vector>

#include "queries.h"
#include "run.h"

namespace magicpig {

// Exact attention of one query head over what is not drawn from.
struct Near {
  float lse;         // -inf: there is nothing
  const float* out;  // [dim]
};

// Prepares the queries of one KV head of one sequence and sets their thresholds, by codes from all over the
// sequence. They do not depend on the draws, so the draws' probabilities are what they are said to be.
// query: the first of them, in the batch.
// near: one per query; where there is a target error, it is part of what errors are relative to.
// predicted: the relative error of each query's output that codes let expect; where there is no target, untouched. May
// be null.
void set_thresholds(const Kernels& kernels, const Geometry& geometry, const std::vector<Run>& runs, uint32_t kv_head,
                    size_t query, const Near* near, PreparedQueries& queries, float* predicted);

}  // namespace magicpig
