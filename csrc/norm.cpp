#include "norm.h"

#include <algorithm>

#include "dispatch.h"
#include "threads.h"

namespace magicpig {

void rms_norm(const bf16* x, size_t rows, size_t dim, const bf16* weight, NormScale scale, float eps, bf16* out) {
  constexpr size_t kElementsPerTask = size_t{1} << 15;
  const Kernels& kernel = kernels();
  const size_t step = std::max<size_t>(1, kElementsPerTask / std::max<size_t>(1, dim));
  parallel_for((rows + step - 1) / step, [&](size_t task) {
    const size_t first = task * step;
    kernel.rms_norm(x + first * dim, std::min(step, rows - first), dim, weight, scale, eps, out + first * dim);
  });
}

}  // namespace magicpig
