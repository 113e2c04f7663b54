// Keys and values of a prompt as the kernels read them (kernels.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace magicpig {

// Elements of a packed value.
inline size_t packed_width(uint32_t head_dim) { return (head_dim + kGroup - 1) / kGroup * kGroup; }

// Both pack `count` tokens, `stride` elements apart, from a border of kGroup tokens on, and fill the last group of
// tokens with zeros. value_stride: from one group of elements to the next.
void pack_keys(const bf16* keys, size_t stride, size_t count, uint32_t head_dim, bf16* packed);
void pack_values(const bf16* values, size_t stride, size_t count, uint32_t head_dim, bf16* packed, size_t value_stride);

}  // namespace magicpig
