// Rows that another device has drawn by the codes that segments have here too.
#pragma once

#include <cstddef>
#include <cstdint>

#include "index.h"

namespace magicpig {

// Of every query head of a batch: the rows' numbers in their segments and the logs of their probabilities, in pieces of
// kPieceTokens. Pieces of a sequence are counted over all of its segments that have an index; each begins anew.
struct DrawnRows {
  const uint16_t* ids;             // [batch * num_heads, room]
  const float* log_probability;    // the same
  const int32_t *starts, *counts;  // [batch * num_heads, pieces]: a piece's rows lie anywhere in its head's
  size_t room, pieces;

  // Those of one head among `count` tokens of a segment from `first` on, both multiples of kPieceTokens but at the
  // segment's end. piece: the segment's first. In the thread's memory until it asks again.
  // std::invalid_argument for rows that are not there.
  Drawn of(size_t head, size_t piece, uint32_t first, uint32_t count) const;
};

inline size_t num_pieces(size_t tokens) { return (tokens + kPieceTokens - 1) / kPieceTokens; }

}  // namespace magicpig
