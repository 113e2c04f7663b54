#include "prompt_pack.h"

#include <algorithm>
#include <cstring>

namespace magicpig {

void pack_keys(const bf16* keys, size_t stride, size_t count, uint32_t head_dim, bf16* packed) {
  for (size_t first = 0; first < count; first += kGroup, packed += kGroup * head_dim) {
    const size_t tokens = std::min<size_t>(kGroup, count - first);
    const bf16* group = keys + first * stride;
    if (tokens < kGroup) std::memset(packed, 0, kGroup * head_dim * sizeof(bf16));
    for (size_t pair = 0; pair < head_dim / 2; ++pair)
      for (size_t t = 0; t < tokens; ++t)
        std::memcpy(packed + (pair * kGroup + t) * 2, group + t * stride + 2 * pair, 2 * sizeof(bf16));
  }
}

void pack_values(const bf16* values, size_t stride, size_t count, uint32_t head_dim, bf16* packed,
                 size_t value_stride) {
  const bf16 zeros[kMaxDim] = {};
  const size_t padded = (count + kGroup - 1) / kGroup * kGroup;
  for (size_t t = 0; t < padded; t += 2) {
    const bf16* even = t < count ? values + t * stride : zeros;
    const bf16* odd = t + 1 < count ? values + (t + 1) * stride : zeros;
    for (uint32_t c = 0; c < head_dim; c += kGroup) {
      bf16* pairs = packed + c / kGroup * value_stride + t * kGroup;
      const uint32_t width = std::min(kGroup, head_dim - c);
      for (uint32_t i = 0; i < width; ++i) {
        pairs[2 * i] = even[c + i];
        pairs[2 * i + 1] = odd[c + i];
      }
      std::memset(pairs + 2 * width, 0, 2 * (kGroup - width) * sizeof(bf16));
    }
  }
}

}  // namespace magicpig
