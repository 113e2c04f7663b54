// The queries of a call as kernels and index want them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "run.h"

namespace magicpig {

class PreparedQueries {
 public:
  // queries: [count, head_dim] dense, of the given type. drawing: also as the geometry's index wants them, which may
  // want to know the scale of the scores. signs: of their projections, as Lsh::sign_bits gives them; null: found here.
  // std::invalid_argument for NaN, infinity or too large a norm.
  PreparedQueries(const Kernels& kernels, const Geometry& geometry, const char* queries, RowType type, size_t count,
                  bool drawing, float scale, const uint16_t* signs = nullptr);

  Queries view(size_t i) const {
    return {values(i), hi_.data() + i * dim_, lo_.empty() ? nullptr : lo_.data() + i * dim_};
  }
  const float* values(size_t i) const { return values_.data() + i * dim_; }
  float inv_norm(size_t i) const { return inv_norms_[i]; }
  void codes(size_t i, std::vector<uint16_t>& out) const;  // the query's bucket in each table
  const ScanQueries& scan() const { return scan_; }
  // Of the heads of one KV head, the first of which is `query`: for passes over codes, before their thresholds are set.
  ScanQueries& prepare_scan(size_t query);

 private:
  bool prepare(const Kernels& kernels, const Geometry& geometry, const char* source, RowType type, size_t first,
               size_t rows);

  uint32_t dim_;
  std::shared_ptr<const Lsh> lsh_;
  std::shared_ptr<const Scan> scan_config_;
  std::vector<float> values_;  // padded
  std::vector<bf16> hi_, lo_;  // the same, split in two; no low part when the high one says it all
  std::vector<float> inv_norms_;
  std::vector<uint16_t> own_sign_bits_;
  const uint16_t* sign_bits_;
  ScanQueries scan_;
};

// One query over rows of a run, none of them chosen yet.
RowsArgs rows_args(const Geometry& geometry, const Run& run, uint32_t kv_head, const PreparedQueries& queries,
                   size_t query);
void choose(const Drawn& drawn, RowsArgs& args);

}  // namespace magicpig
