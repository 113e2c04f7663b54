// The queries of a call as kernels and index want them.
#pragma once

#include <cstdint>
#include <vector>

#include "segment.h"

namespace magicpig {

class PreparedQueries {
 public:
  // queries: [count, head_dim] dense, of the given type. hashed: also find their buckets.
  // std::invalid_argument for NaN, infinity or too large a norm.
  PreparedQueries(const Kernels& kernels, const Geometry& geometry, const char* queries, RowType type, size_t count,
                  bool hashed);

  Queries view(size_t i) const {
    return {values(i), hi_.data() + i * dim_, lo_.empty() ? nullptr : lo_.data() + i * dim_};
  }
  const float* values(size_t i) const { return values_.data() + i * dim_; }
  const uint16_t* codes(size_t i) const { return codes_.data() + i * num_tables_; }
  float inv_norm(size_t i) const { return inv_norms_[i]; }

 private:
  uint32_t dim_, num_tables_;
  std::vector<float> values_;  // padded
  std::vector<bf16> hi_, lo_;  // the same, split in two; no low part when the high one says it all
  std::vector<float> inv_norms_;
  std::vector<uint16_t> codes_;
};

}  // namespace magicpig
