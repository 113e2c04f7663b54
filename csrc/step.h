// One decode step of a batch of sequences in one layer: each gets a new token and attends to all of its own.
#pragma once

#include "attention.h"
#include "layer_kv.h"
#include "window.h"

namespace magicpig {

struct StepSequence {
  Window* window;
  const LayerKV* far;  // null: the window is all there is
};

// Someone else's [batch, num_kv_heads, head_dim] array; the innermost dimension is dense, strides count elements.
struct BatchView {
  const char* data;
  RowType type;
  size_t batch_stride, head_stride;
};

struct StepArgs {
  const char* queries;  // [batch, num_heads, head_dim] dense
  RowType type;         // of queries and out
  BatchView keys, values;
  Scoring scoring;
  size_t span;  // only this many of a window's newest tokens are attended to
  char* out;    // [batch, num_heads, head_dim] dense
};

// Appends the keys and values to the windows and attends to window and far context together. A sequence whose query,
// key or value is not finite (or out of range) gets NaN; the others are as without it. On an exception the windows are
// as they were.
void step(const std::vector<StepSequence>& batch, const StepArgs& args);

}  // namespace magicpig
