// Hash tables over the keys of one segment: the index that draws rows for a query.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "lsh.h"
#include "memory.h"

namespace magicpig {

class Tables {
 public:
  // rows: [num_kv_heads, num_tokens, 2 * dim].
  Tables(const Kernels& kernels, std::shared_ptr<const Lsh> lsh, RowType type, uint32_t num_kv_heads,
         uint32_t num_tokens, const char* rows);

  // The tables of a segment that was saved: `memory` as another's memory() had it. std::invalid_argument unless its
  // size is right and everything in it stays within the segment.
  Tables(std::shared_ptr<const Lsh> lsh, RowType type, uint32_t num_kv_heads, uint32_t num_tokens, Buffer memory);

  struct Bucket {
    const uint16_t *begin, *end;
  };
  // What a drawing thread needs, kept between calls.
  struct Scratch {
    std::vector<uint16_t> codes;  // the query's buckets, for draw() to read
    std::vector<uint8_t> narrow;  // collisions per row
    std::vector<uint16_t> wide;   // the same, for many tables
    std::vector<uint16_t> ids;
    std::vector<Bucket> buckets;
    size_t visited = 0;  // entries of the buckets that draw() walked through
  };

  // Rows of `kv_head` that share the query's bucket (scratch.codes) in at least min_collisions tables, into
  // scratch.ids; returns how many. `rows` is the head's first row: drawn rows are asked for from memory at once.
  size_t draw(uint32_t kv_head, const char* rows, Scratch& scratch) const;

  // The kernels' view of the rows' inclusion probabilities for a query (dim floats, its norm).
  Inclusion inclusion(uint32_t kv_head, const float* query, float inv_query_norm) const;

  // The bucket of every row in every table, read back from the tables: [num_tokens, num_tables]. For tests and study.
  std::vector<int32_t> codes(uint32_t kv_head) const;

  // How long the two steps of the build took, in seconds of wall-clock time.
  double hash_seconds() const { return hash_seconds_; }
  double sort_seconds() const { return sort_seconds_; }

  size_t nbytes() const { return memory_.size(); }
  const Buffer& memory() const { return memory_; }

 private:
  Tables(std::shared_ptr<const Lsh> lsh, RowType type, uint32_t num_kv_heads, uint32_t num_tokens);
  void find_keys_at_mean(uint32_t kv_head);
  bool valid(uint32_t kv_head, uint32_t table) const;
  uint16_t* ids(uint32_t kv_head) const { return reinterpret_cast<uint16_t*>(memory_.data() + kv_head * head_bytes_); }
  uint32_t* offsets(uint32_t kv_head) const {
    return reinterpret_cast<uint32_t*>(memory_.data() + kv_head * head_bytes_ + offsets_at_);
  }
  float* inv_norms(uint32_t kv_head) const {
    return reinterpret_cast<float*>(memory_.data() + kv_head * head_bytes_ + norms_at_);
  }
  float* mean(uint32_t kv_head) const {
    return reinterpret_cast<float*>(memory_.data() + kv_head * head_bytes_ + mean_at_);
  }

  template <class Counter>
  size_t count(uint32_t kv_head, const char* rows, std::vector<Counter>& counters, Scratch& scratch) const;
  void compute_mean(const Kernels& kernels, RowType type, const char* rows, float* mean) const;
  void sort_into_buckets(const uint16_t* bits, uint32_t kv_head, uint32_t table) const;

  std::shared_ptr<const Lsh> lsh_;
  uint32_t num_tokens_;
  size_t row_bytes_;
  // Per head: ids [num_tables, num_tokens], offsets [num_tables, num_buckets + 1], 1 / |k - mean| [num_tokens], mean
  // [dim].
  size_t offsets_at_, norms_at_, mean_at_, head_bytes_;
  Buffer memory_;
  std::vector<std::vector<uint16_t>> at_mean_;  // per head: rows of keys at the mean, hardly ever any
  double hash_seconds_ = 0, sort_seconds_ = 0;
};

}  // namespace magicpig
