// What all segments of a layer have in common.
#pragma once

#include <memory>

#include "kernels.h"
#include "lsh.h"

namespace magicpig {

struct Geometry {
  uint32_t num_heads, num_kv_heads, head_dim;
  RowType type;
  std::shared_ptr<const Lsh> lsh;  // null: rows are always read whole
  uint32_t exact_below;            // segments shorter than this have no index and are read whole

  uint32_t group() const { return num_heads / num_kv_heads; }
  uint32_t dim() const { return padded_dim(head_dim); }
  size_t row_bytes() const { return size_t{2} * dim() * element_bytes(type); }
};

}  // namespace magicpig
