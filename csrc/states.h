// Partial results of attention, put together.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels.h"

namespace magicpig {

// Output [dim] and log-sum-exp over the states that `each` visits, of those that have seen rows; (0, -inf) of none.
template <class F>
float merge_states(const F& each, uint32_t dim, float* out) {
  float peak = -INFINITY;
  each([&](const PartialState& state) { peak = std::max(peak, state.max); });
  double total = 0;
  std::fill_n(out, dim, 0.0f);
  each([&](const PartialState& state) {
    const float weight = std::exp(state.max - peak);
    total += double{weight} * state.sum;
    for (uint32_t d = 0; d < dim; ++d) out[d] += weight * state.out[d];
  });
  const float inverse = total > 0 ? static_cast<float>(1 / total) : 0;
  for (uint32_t d = 0; d < dim; ++d) out[d] *= inverse;
  return total > 0 ? static_cast<float>(peak + std::log(total)) : -INFINITY;
}

}  // namespace magicpig
