// Hash tables over the keys of one segment: the index that draws rows for a query.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "index.h"
#include "lsh.h"

namespace magicpig {

// What another device has found of a segment's keys: the means of the heads' keys, [num_kv_heads, head_dim]; of the
// keys less those, one over their norms, 0 where they have no direction, [num_kv_heads, num_tokens]; and either the
// signs of their projections, [num_kv_heads, num_groups, num_tokens], or the tables that they are sorted into: where
// buckets begin, [num_kv_heads, num_tables, num_buckets + 1], and rows, [num_kv_heads, num_tables, num_tokens].
struct Hashed {
  const float *means, *inv_norms;
  const uint16_t* signs;  // null: sorted
  const uint32_t* offsets = nullptr;
  const uint16_t* ids = nullptr;
};

class Tables : public Index {
 public:
  // To be built.
  Tables(std::shared_ptr<const Lsh> lsh, RowType type, uint32_t num_kv_heads, uint32_t num_tokens);

  // Has the system hand out memory before `build` writes to it, which it then does in half the time: what belongs to
  // `count` tokens more.
  void take_memory(uint32_t count);
  size_t memory_needed() const { return num_kv_heads_ * head_bytes_; }

  // Once. rows: [num_kv_heads, num_tokens, 2 * dim]. hashed: null: keys are hashed here.
  void build(const Kernels& kernels, const char* rows, const Hashed* hashed);

  // The tables of a segment that was saved: `memory` as another's memory() had it. std::invalid_argument unless its
  // size is right, everything in it stays within the segment, and each table names a row once.
  Tables(std::shared_ptr<const Lsh> lsh, RowType type, uint32_t num_kv_heads, uint32_t num_tokens, Buffer memory);

  // Rows that share the query's bucket in at least min_collisions tables, for one head over the whole segment.
  uint32_t tokens_at_once() const override { return num_tokens_; }
  uint32_t heads_at_once(uint32_t) const override { return 1; }
  void draw(const Ask& ask, Drawn* drawn) const override;

  // The bucket of every row in every table, read back from the tables: [num_tokens, num_tables]. For tests and study.
  std::vector<int32_t> codes(uint32_t kv_head) const;

 private:
  struct Bucket {
    const uint16_t *begin, *end;
  };
  // What a drawing thread needs, kept between calls.
  struct Scratch {
    std::vector<uint16_t> codes;  // the query's buckets
    std::vector<uint8_t> narrow;  // collisions per row
    std::vector<uint16_t> wide;   // the same, for many tables
    std::vector<uint16_t> ids;
    std::vector<Bucket> buckets;
    size_t visited = 0;
  };
  void zero_gaps() const;  // between what is in memory: it may go to files
  void take(const Hashed& hashed) const;
  bool take_table(const Hashed& hashed, uint32_t kv_head, uint32_t table) const;  // whether it is one
  void hash(const Kernels& kernels, const char* rows, uint32_t kv_head, uint16_t* bits) const;
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

  // The kernels' view of the rows' inclusion probabilities for a query (dim floats, its norm).
  Inclusion inclusion(uint32_t kv_head, const float* query, float inv_query_norm) const;
  // Drawn rows, into scratch.ids; `rows` is the head's first: they are asked for from memory at once.
  template <class Counter>
  size_t count(uint32_t kv_head, const char* rows, std::vector<Counter>& counters, Scratch& scratch) const;
  void sort_into_buckets(const uint16_t* bits, uint32_t kv_head, uint32_t table) const;

  std::shared_ptr<const Lsh> lsh_;
  RowType row_type_;
  uint32_t num_kv_heads_, num_tokens_, num_taken_ = 0;
  size_t row_bytes_;
  // Per head: ids [num_tables, num_tokens], offsets [num_tables, num_buckets + 1], 1 / |k - mean| [num_tokens], mean
  // [dim].
  size_t offsets_at_, norms_at_, mean_at_, head_bytes_;
  std::vector<std::vector<uint16_t>> at_mean_;  // per head: rows of keys at the mean, hardly ever any
};

}  // namespace magicpig
