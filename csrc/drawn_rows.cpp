#include "drawn_rows.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

namespace magicpig {

Drawn DrawnRows::of(size_t head, size_t piece, uint32_t first, uint32_t count) const {
  static thread_local std::vector<uint16_t> own_ids;
  static thread_local std::vector<float> own_logs;
  own_ids.clear();
  own_logs.clear();
  const size_t begin = piece + first / kPieceTokens, end = begin + num_pieces(count);
  for (size_t i = begin; i < end; ++i) {
    const int32_t start = starts[head * pieces + i], rows = counts[head * pieces + i];
    if (start < 0 || rows < 0 || static_cast<size_t>(start) + static_cast<size_t>(rows) > room)
      throw std::invalid_argument("rows " + std::to_string(start) + " and " + std::to_string(rows) +
                                  " more are beyond the room of " + std::to_string(room));
    const size_t at = head * room + static_cast<size_t>(start), number = static_cast<size_t>(rows);
    own_ids.insert(own_ids.end(), ids + at, ids + at + number);
    own_logs.insert(own_logs.end(), log_probability + at, log_probability + at + number);
  }
  for (const uint16_t id : own_ids)
    if (id < first || id - first >= count)
      throw std::invalid_argument("row " + std::to_string(id) + " is not among the " + std::to_string(count) +
                                  " tokens from " + std::to_string(first) + " on");
  for (float& each : own_logs) each = std::min(each, 0.0f);
  const size_t number = own_ids.size();
  own_ids.resize(number + 2 * kChunk);  // kernels may read some beyond
  own_logs.resize(number + 2 * kChunk);
  return {own_ids.data(), number, {}, own_logs.data(), 0};
}

}  // namespace magicpig
