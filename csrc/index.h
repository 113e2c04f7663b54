// What chooses the rows of a segment that a query reads.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "memory.h"

namespace magicpig {

class PreparedQueries;

// Some consecutive query heads of one KV head, and the tokens among which they draw.
struct Ask {
  const PreparedQueries& queries;
  size_t query;  // the first, in the batch
  uint32_t num_heads;
  uint32_t kv_head;
  const char* rows;       // the KV head's, of the segment's first token
  uint32_t first, count;  // tokens
};

// Rows for one query head, in the drawing thread's memory until it draws again.
struct Drawn {
  const uint16_t* ids;
  size_t count;
  Inclusion inclusion;           // how their probabilities are found, or
  const float* log_probability;  // what they are; see RowsArgs
  size_t visited;                // entries of hash buckets that were walked through
};

// Over the keys of one segment; never changed once built.
class Index {
 public:
  virtual ~Index() = default;

  // What one call of draw takes: so many tokens at most, from a multiple of that on, and this many heads of a group.
  virtual uint32_t tokens_at_once() const = 0;
  virtual uint32_t heads_at_once(uint32_t group) const = 0;
  virtual void draw(const Ask& ask, Drawn* drawn) const = 0;  // drawn: one per head

  size_t nbytes() const { return memory_.size(); }
  const Buffer& memory() const { return memory_; }

  // How long the two steps of the build took, in seconds of wall-clock time: coding keys, and sorting the codes.
  double code_seconds() const { return code_seconds_; }
  double sort_seconds() const { return sort_seconds_; }

 protected:
  Buffer memory_;
  double code_seconds_ = 0, sort_seconds_ = 0;
};

// A key this near the mean, relative to the mean's norm, has no direction that float32 could tell from rounding.
constexpr float kAtMean = 1e-4f;

// The mean of the first `size` elements of `count` rows: dim of the keys, 2 * dim of keys and values.
void mean_of(const Kernels& kernels, RowType type, const char* rows, size_t count, uint32_t dim, uint32_t size,
             float* mean);

}  // namespace magicpig
