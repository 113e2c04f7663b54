// A run of consecutive tokens of one layer, never changed once built: key and value rows, and an index over them.
#pragma once

#include <memory>
#include <vector>

#include "geometry.h"
#include "memory.h"
#include "run.h"

namespace magicpig {

// Someone else's [num_kv_heads, tokens, head_dim] array; the innermost dimension is dense, strides count elements.
struct TensorView {
  const char* data;
  RowType type;
  size_t head_stride, token_stride;
  const char* name;  // for messages
};

struct Hashed;
class Segment;
using SegmentList = std::vector<std::shared_ptr<const Segment>>;
size_t num_tokens(const SegmentList& segments);
std::vector<Run> runs_of(const SegmentList& segments);  // to be used while the segments live

// Where a new segment's tokens come from: segments laid end to end, then tensors.
struct Source {
  SegmentList segments;
  TensorView keys, values;
};

class Segment {
 public:
  static constexpr uint32_t kMaxTokens = 65536;  // row ids are 16 bits wide

  // Copies tokens first .. first + count - 1 of the source. std::invalid_argument for NaN, infinity or a norm beyond
  // what attention can take.
  Segment(const Geometry& geometry, const Source& source, size_t first, uint32_t count);

  // A segment that was saved: rows, and its index if it had one, as another's memories had them.
  // std::invalid_argument for a wrong size and for an index that reaches outside or names a row twice.
  Segment(const Geometry& geometry, uint32_t count, Buffer rows, Buffer index);

  // Rows that `fill` is to bring.
  Segment(const Geometry& geometry, uint32_t count);

  // All of these before anyone else sees the segment. Tokens of tensors, from `first` on, to rows from `at` on.
  void fill(const Geometry& geometry, const TensorView& keys, const TensorView& values, size_t first, uint32_t at,
            uint32_t count);
  void build_index(const Geometry& geometry, const Hashed* hashed = nullptr);  // see Tables
  void take_index(std::unique_ptr<const Index> index) { index_ = std::move(index); }

  uint32_t num_tokens() const { return num_tokens_; }
  Run run() const { return {rows_.data(), size_t{num_tokens_} * row_bytes_, num_tokens_, index_.get()}; }
  const Index* index() const { return index_.get(); }  // null: read the rows whole
  double row_seconds() const { return row_seconds_; }  // the time it took to copy the rows
  const Buffer& row_memory() const { return rows_; }
  size_t row_nbytes() const { return rows_.size(); }
  size_t index_nbytes() const { return index_ ? index_->nbytes() : 0; }

 private:
  void copy(const SegmentList& segments, size_t first, uint32_t count);
  void pack(const Geometry& geometry, const TensorView& tensor, uint32_t head, size_t first, uint32_t at,
            uint32_t count, size_t half);

  uint32_t num_tokens_, num_kv_heads_;
  size_t row_bytes_;
  Buffer rows_;  // [num_kv_heads, num_tokens, 2 * dim]
  std::unique_ptr<const Index> index_;
  double row_seconds_ = 0;
};

}  // namespace magicpig
