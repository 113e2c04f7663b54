// Inputs of linear layers in the form the kernels read, in memory that a thread keeps between calls.
#pragma once

#include <cstddef>

#include "kernels.h"

namespace magicpig {

constexpr size_t kMaxInputRows = 4 * kLinearBlockRows;  // at once; more are taken in turns

struct Inputs {
  char* data;
  size_t stride;         // of rows, in elements
  size_t element_bytes;  // as the kernels want it

  char* at(size_t row, size_t column) const { return data + (row * stride + column) * element_bytes; }
};

// Memory for inputs, good until this thread's next call with this slot (0 or 1).
Inputs allocate_inputs(const Kernels& kernels, int slot, size_t rows, size_t in);

// x [rows, in], in slot 0.
Inputs prepare_inputs(const Kernels& kernels, const bf16* x, size_t rows, size_t in);

}  // namespace magicpig
