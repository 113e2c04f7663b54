#include "queries.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "dot.h"
#include "threads.h"

namespace magicpig {

namespace {
constexpr size_t kRowsAtOnce = 32;
}

PreparedQueries::PreparedQueries(const Kernels& kernels, const Geometry& geometry, const char* queries, RowType type,
                                 size_t count, bool drawing, float scale, const uint16_t* signs)
    : dim_(geometry.dim()),
      lsh_(geometry.lsh),
      scan_config_(geometry.scan),
      values_(count * dim_),
      hi_(count * dim_),
      inv_norms_(count),
      sign_bits_(signs) {
  if (type != kBF16) lo_.resize(values_.size());
  std::atomic<bool> needs_lo{false};
  parallel_for((count + kRowsAtOnce - 1) / kRowsAtOnce, [&](size_t part) {
    const size_t first = part * kRowsAtOnce, rows = std::min(kRowsAtOnce, count - first);
    const char* source = queries + first * geometry.head_dim * element_bytes(type);
    if (prepare(kernels, geometry, source, type, first, rows)) needs_lo = true;
  });
  if (!needs_lo) lo_.clear();
  if (drawing && lsh_ && !signs) {
    own_sign_bits_ = lsh_->sign_bits(kernels, values_.data(), count);
    sign_bits_ = own_sign_bits_.data();
  }
  if (drawing && geometry.scan) scan_ = ScanQueries(*geometry.scan, count, geometry.group(), scale);
}

// Fills in rows first .. first + rows - 1; says whether the low part of any of them is not zero.
bool PreparedQueries::prepare(const Kernels& kernels, const Geometry& geometry, const char* source, RowType type,
                              size_t first, size_t rows) {
  float* values = values_.data() + first * dim_;
  const uint32_t head_dim = geometry.head_dim;
  const size_t bad = kernels.pack[type][kF32](source, head_dim, rows, head_dim, values, dim_, dim_);
  if (bad < rows) {
    throw std::invalid_argument("queries at sequence " + std::to_string((first + bad) / geometry.num_heads) +
                                ", head " + std::to_string((first + bad) % geometry.num_heads) +
                                " is NaN or infinite, or its norm exceeds 1e18");
  }
  for (size_t i = first; i < first + rows; ++i) {
    const double norm = std::sqrt(dot(this->values(i), this->values(i), dim_));
    inv_norms_[i] = norm >= kMinNorm ? static_cast<float>(1 / norm) : 0;
  }
  bf16* hi = hi_.data() + first * dim_;
  kernels.pack[kF32][kBF16](values, dim_, rows, dim_, hi, dim_, dim_);
  if (type == kBF16) return false;
  bool any = false;
  std::vector<float> rest(rows * dim_);
  for (size_t i = 0; i < rest.size(); ++i) {
    const uint32_t bits = uint32_t{hi[i].bits} << 16;
    float high;
    std::memcpy(&high, &bits, sizeof high);
    rest[i] = values[i] - high;
    any |= rest[i] != 0;
  }
  kernels.pack[kF32][kBF16](rest.data(), dim_, rows, dim_, lo_.data() + first * dim_, dim_, dim_);
  return any;
}

ScanQueries& PreparedQueries::prepare_scan(size_t query) {
  scan_.prepare(*scan_config_, values_.data(), query);
  return scan_;
}

void PreparedQueries::codes(size_t i, std::vector<uint16_t>& out) const {
  out.resize(lsh_->num_tables);
  // A query without direction hashes like zero: all bits one.
  if (inv_norms_[i] == 0) return std::fill(out.begin(), out.end(), static_cast<uint16_t>(lsh_->num_buckets() - 1));
  for (uint32_t t = 0; t < lsh_->num_tables; ++t) out[t] = lsh_->code(sign_bits_, inv_norms_.size(), i, t);
}

RowsArgs rows_args(const Geometry& geometry, const Run& run, uint32_t kv_head, const PreparedQueries& queries,
                   size_t query) {
  RowsArgs args = {};
  args.rows = run.rows(kv_head);
  args.dim = geometry.dim();
  args.num_heads = 1;
  args.queries = queries.view(query);
  return args;
}

void choose(const Drawn& drawn, RowsArgs& args) {
  args.ids = drawn.ids;
  args.count = drawn.count;
  args.inclusion = drawn.inclusion;
  args.log_probability = drawn.log_probability;
}

}  // namespace magicpig
