// Consecutive tokens of one sequence in one layer, as attention reads them: a segment's, or a window's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "geometry.h"
#include "index.h"

namespace magicpig {

struct Run {
  const char* first_rows;  // of KV head 0
  size_t head_bytes;       // from one KV head's rows to the next's
  uint32_t num_tokens;
  const Index* index;  // draws rows; null: all are read

  const char* rows(uint32_t kv_head) const { return first_rows + kv_head * head_bytes; }
};

// Copies tokens first .. first + count - 1 of the runs, laid end to end, to dense [num_kv_heads, count, head_dim]
// arrays of the stored type.
void read_tokens(const Geometry& geometry, const std::vector<Run>& runs, size_t first, size_t count, char* keys,
                 char* values);

}  // namespace magicpig
