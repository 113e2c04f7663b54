// A segment whose tokens come in parts, such as those of a prompt that is being read.
#pragma once

#include <memory>

#include "segment.h"
#include "tables.h"

namespace magicpig {

// What can be done before all tokens are there: rows are copied, and memory is taken for hash tables. Keys are centred
// at the mean of all, so the index itself comes last. One thread at a time; of no more use after an exception.
class GrowingSegment {
 public:
  GrowingSegment(const Geometry& geometry, uint32_t num_tokens);

  void add(const TensorView& keys, const TensorView& values, size_t count);  // the next tokens
  std::shared_ptr<const Segment> finish(const Hashed* hashed);               // once, when all are there; see Tables

  const Geometry& geometry() const { return geometry_; }
  uint32_t num_tokens() const { return num_tokens_; }

 private:
  const Geometry geometry_;
  const uint32_t num_tokens_;
  uint32_t num_added_ = 0;
  std::shared_ptr<Segment> segment_;
  std::unique_ptr<Tables> tables_;  // null: it will have none
};

}  // namespace magicpig
