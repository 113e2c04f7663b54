// A dot product in double, for the few that are taken per query and not per row.
#pragma once

#include <cstdint>

namespace magicpig {

inline double dot(const float* a, const float* b, uint32_t count) {  // count: a multiple of 4
  double sums[4] = {};
  for (uint32_t i = 0; i < count; i += 4)
    for (uint32_t j = 0; j < 4; ++j) sums[j] += double{a[i + j]} * b[i + j];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

}  // namespace magicpig
