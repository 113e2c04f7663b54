// Attention over rows that the caller chose, each with the probability by which it was drawn.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"

namespace magicpig {

// Of every query head of a batch: counts[i] rows from rows[i * stride] on, by their numbers in the sequence, and the
// logs of their probabilities.
struct Chosen {
  const int32_t* rows;
  const float* log_probability;
  const int32_t* counts;
  size_t stride;
};

// As attend, over the chosen rows: each counts one over its probability times.
// std::invalid_argument for a row that is not there and for a probability above 1 or NaN.
void attend_chosen(const Geometry& geometry, const std::vector<std::vector<Run>>& batch, const char* queries,
                   RowType type, Scoring scoring, const Chosen& chosen, float* out, float* lse);

}  // namespace magicpig
