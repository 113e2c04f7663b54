#include "run.h"

#include <algorithm>
#include <cstring>

#include "threads.h"

namespace magicpig {

void read_tokens(const Geometry& geometry, const std::vector<Run>& runs, size_t first, size_t count, char* keys,
                 char* values) {
  const size_t row_bytes = geometry.row_bytes(), half = row_bytes / 2,
               vector_bytes = geometry.head_dim * element_bytes(geometry.type);
  parallel_for(geometry.num_kv_heads, [&](size_t head) {
    size_t skip = first, left = count, at = head * count * vector_bytes;
    for (const Run& run : runs) {
      const size_t from = std::min<size_t>(skip, run.num_tokens), n = std::min<size_t>(left, run.num_tokens - from);
      const char* row = run.rows(static_cast<uint32_t>(head)) + from * row_bytes;
      for (size_t i = 0; i < n; ++i, row += row_bytes, at += vector_bytes) {
        std::memcpy(keys + at, row, vector_bytes);
        std::memcpy(values + at, row + half, vector_bytes);
      }
      skip -= from;
      left -= n;
    }
  });
}

}  // namespace magicpig
