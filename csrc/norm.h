// Root-mean-square normalisation of rows.
#pragma once

#include <cstddef>

#include "kernels.h"

namespace magicpig {

// x and out: [rows, dim], which may be the same memory; weight: [dim].
void rms_norm(const bf16* x, size_t rows, size_t dim, const bf16* weight, NormScale scale, float eps, bf16* out);

}  // namespace magicpig
