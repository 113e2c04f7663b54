#include "mlp.h"

#include "dispatch.h"

namespace magicpig {

void GatedMLP::forward(const bf16* x, size_t rows, bf16* y) const {
  const Kernels& kernel = kernels();
  for (size_t begin = 0; begin < rows; begin += kMaxInputRows) {
    const size_t count = std::min(kMaxInputRows, rows - begin);
    const Inputs inputs = prepare_inputs(kernel, x + begin * in(), count, in());
    const Inputs inner = allocate_inputs(kernel, 1, count, hidden());
    for_each_group(gate_up_, count, [&](size_t group, size_t first, size_t block_rows) {
      kernel.gated(gate_up_.args(group, inputs, first, block_rows), activation_, inner.at(first, group * kPanel),
                   inner.stride);
    });
    multiply(kernel, down_, inner, count, y + begin * out());
  }
}

}  // namespace magicpig
