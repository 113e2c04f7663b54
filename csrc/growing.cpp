#include "growing.h"

#include <stdexcept>
#include <utility>

#include "dispatch.h"

namespace magicpig {

namespace {

void require(bool fine, const char* message) {
  if (!fine) throw std::invalid_argument(message);
}

}  // namespace

GrowingSegment::GrowingSegment(const Geometry& geometry, uint32_t num_tokens)
    : geometry_(geometry), num_tokens_(num_tokens) {
  require(num_tokens >= 1 && num_tokens <= Segment::kMaxTokens, "a segment has from 1 to 65,536 tokens");
  segment_ = std::make_shared<Segment>(geometry, num_tokens);
  if (geometry.lsh && num_tokens >= geometry.exact_below)
    tables_ = std::make_unique<Tables>(geometry.lsh, geometry.type, geometry.num_kv_heads, num_tokens);
}

void GrowingSegment::add(const TensorView& keys, const TensorView& values, size_t count) {
  require(segment_ && count <= num_tokens_ - num_added_, "there is no room for these tokens in the segment");
  const auto n = static_cast<uint32_t>(count);
  // Memory that was promised is there when it is written to: others may have taken it meanwhile.
  const size_t promised = segment_->row_nbytes() + (tables_ ? tables_->memory_needed() : 0);
  require_memory(promised / num_tokens_ * (num_tokens_ - num_added_));
  segment_->fill(geometry_, keys, values, 0, num_added_, n);
  if (tables_) tables_->take_memory(n);
  num_added_ += n;
}

std::shared_ptr<const Segment> GrowingSegment::finish(const Hashed* hashed) {
  require(segment_ && num_added_ == num_tokens_, "the segment lacks tokens, or is finished");
  if (tables_) {
    tables_->build(kernels(), segment_->row_memory().data(), hashed);
    segment_->take_index(std::move(tables_));
  } else {
    segment_->build_index(geometry_);
  }
  return std::move(segment_);
}

}  // namespace magicpig
