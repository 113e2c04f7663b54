// How many rows a pass over codes draws: thresholds, from a part of the keys.
#pragma once

#include <vector>

#include "queries.h"
#include "run.h"

namespace magicpig {

// Sets the thresholds of all queries of a batch, by codes that lie evenly over each sequence. They do not depend on the
// draws, so the draws' probabilities are what they are said to be.
void set_thresholds(const Kernels& kernels, const Geometry& geometry, const std::vector<std::vector<Run>>& batch,
                    PreparedQueries& queries);

}  // namespace magicpig
