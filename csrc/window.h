// The exact part of one sequence in one layer: tokens that are always read, and that can leave from any place.
#pragma once

#include "attention.h"
#include "memory.h"
#include "run.h"
#include "segment.h"

namespace magicpig {

// What attention over a sequence read, over all steps and query heads, and what there was to read.
struct Reads {
  uint64_t rows = 0, tokens = 0;          // of window and far context
  uint64_t far_rows = 0, far_tokens = 0;  // of the far context alone
  uint64_t visited = 0;                   // entries of hash buckets
  uint64_t steps = 0;
};

// Rows as in a segment, in memory that grows with demand. One thread at a time.
class Window {
 public:
  explicit Window(const Geometry& geometry) : geometry_(geometry) {}

  // Adds `count` tokens; says whether all of them are finite and in range. They are added in any case.
  bool append(const TensorView& keys, const TensorView& values, size_t count);
  // Removes tokens first .. first + count - 1; std::invalid_argument when they are not all there.
  void drop(size_t first, size_t count);
  std::unique_ptr<Window> fork() const;

  const Geometry& geometry() const { return geometry_; }
  size_t num_tokens() const { return num_tokens_; }
  size_t nbytes() const { return rows_.size(); }
  bool spoiled() const { return spoiled_; }  // it has held numbers that are not finite, or out of range
  Run newest(size_t count) const;            // the last `count` tokens, or all there are

  Reads reads;        // of the steps this window took part in
  Timing spent = {};  // by the steps of batches in which it was the first

 private:
  void reserve(size_t tokens);

  Geometry geometry_;
  Buffer rows_;  // [num_kv_heads, capacity, 2 * dim]
  size_t num_tokens_ = 0, capacity_ = 0;
  bool spoiled_ = false;
};

}  // namespace magicpig
