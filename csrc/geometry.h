// What all segments of a layer have in common.
#pragma once

#include <memory>

#include "kernels.h"
#include "lsh.h"
#include "scan.h"

namespace magicpig {

struct Geometry {
  uint32_t num_heads, num_kv_heads, head_dim;
  RowType type;
  // How segments are indexed: by one of them, or, where both are null, not at all: rows are always read whole.
  std::shared_ptr<const Lsh> lsh;
  std::shared_ptr<const Scan> scan;
  uint32_t exact_below;  // segments shorter than this have no index and are read whole

  bool indexed() const { return lsh || scan; }
  uint32_t group() const { return num_heads / num_kv_heads; }
  uint32_t dim() const { return padded_dim(head_dim); }
  size_t row_bytes() const { return size_t{2} * dim() * element_bytes(type); }
};

}  // namespace magicpig
