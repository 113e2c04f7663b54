#include "inputs.h"

#include <algorithm>

#include "memory.h"
#include "threads.h"

namespace magicpig {

Inputs allocate_inputs(const Kernels& kernels, int slot, size_t rows, size_t in) {
  constexpr size_t kAtLeast = size_t{1} << 16, kKept = size_t{4} << 20;  // bytes
  thread_local Buffer buffers[2];
  // An odd number of cache lines: rows a large power of two apart would share few sets of the first-level cache.
  const size_t line = 64 / kernels.input_bytes, stride = ((in + line - 1) / line | 1) * line;
  const size_t bytes = std::max(kAtLeast, rows * stride * kernels.input_bytes);
  Buffer& buffer = buffers[slot];
  if (buffer.size() < bytes || (buffer.size() > kKept && bytes <= kKept)) {
    buffer = Buffer();
    buffer = Buffer(bytes);
  }
  return {buffer.data(), stride, kernels.input_bytes};
}

Inputs prepare_inputs(const Kernels& kernels, const bf16* x, size_t rows, size_t in) {
  constexpr size_t kRowsPerTask = 16;
  const Inputs inputs = allocate_inputs(kernels, 0, rows, in);
  parallel_for((rows + kRowsPerTask - 1) / kRowsPerTask, [&](size_t task) {
    const size_t first = task * kRowsPerTask;
    kernels.prepare_inputs(x + first * in, std::min(kRowsPerTask, rows - first), in, inputs.at(first, 0),
                           inputs.stride);
  });
  return inputs;
}

}  // namespace magicpig
