#include "queries.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "dot.h"

namespace magicpig {

PreparedQueries::PreparedQueries(const Kernels& kernels, const Geometry& geometry, const char* queries, RowType type,
                                 size_t count, bool hashed)
    : dim_(geometry.dim()), lsh_(geometry.lsh), values_(count * dim_), hi_(count * dim_), inv_norms_(count) {
  const uint32_t head_dim = geometry.head_dim;
  const size_t bad = kernels.pack[type][kF32](queries, head_dim, count, head_dim, values_.data(), dim_, dim_);
  if (bad < count) {
    throw std::invalid_argument("queries at sequence " + std::to_string(bad / geometry.num_heads) + ", head " +
                                std::to_string(bad % geometry.num_heads) +
                                " is NaN or infinite, or its norm exceeds 1e18");
  }
  kernels.pack[kF32][kBF16](values_.data(), dim_, count, dim_, hi_.data(), dim_, dim_);
  if (type != kBF16) {
    std::vector<float> rest(values_.size());
    bool any = false;
    for (size_t i = 0; i < rest.size(); ++i) {
      const uint32_t bits = uint32_t{hi_[i].bits} << 16;
      float high;
      std::memcpy(&high, &bits, sizeof high);
      rest[i] = values_[i] - high;
      any |= rest[i] != 0;
    }
    if (any) {
      lo_.resize(rest.size());
      kernels.pack[kF32][kBF16](rest.data(), dim_, count, dim_, lo_.data(), dim_, dim_);
    }
  }
  for (size_t i = 0; i < count; ++i) {
    const double norm = std::sqrt(dot(values(i), values(i), dim_));
    inv_norms_[i] = norm >= kMinNorm ? static_cast<float>(1 / norm) : 0;
  }
  if (hashed) sign_bits_ = lsh_->sign_bits(kernels, values_.data(), count);
}

void PreparedQueries::codes(size_t i, std::vector<uint16_t>& out) const {
  out.resize(lsh_->num_tables);
  // A query without direction hashes like zero: all bits one.
  if (inv_norms_[i] == 0) return std::fill(out.begin(), out.end(), static_cast<uint16_t>(lsh_->num_buckets() - 1));
  for (uint32_t t = 0; t < lsh_->num_tables; ++t) out[t] = lsh_->code(sign_bits_.data(), inv_norms_.size(), i, t);
}

}  // namespace magicpig
