// Exact attention of many queries, the last tokens of a sequence: what reading a prompt needs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace magicpig {

// [heads, tokens, head_dim], dense in the last dimension.
struct HeadsView {
  const bf16* data;
  size_t head_stride, token_stride;  // in elements

  const bf16* row(size_t head, size_t token) const { return data + head * head_stride + token * token_stride; }
};

struct Prompt {
  HeadsView queries;  // [num_heads, num_queries, head_dim]
  HeadsView keys;     // [num_kv_heads, num_tokens, head_dim]
  HeadsView values;
  size_t num_heads, num_kv_heads;
  size_t num_queries, num_tokens;
  uint32_t head_dim;  // even, at most kMaxDim
  float scale;        // above 0
  float softcap;      // scores s become softcap tanh(s / softcap); 0 leaves them as they are
  size_t span;        // a query sees itself and the span - 1 tokens before it; 0: all tokens before it
  bf16* out;          // [num_queries, num_heads, head_dim]

  size_t group() const { return num_heads / num_kv_heads; }
  // Tokens that a query sees: begin .. end - 1.
  size_t end(size_t query) const { return num_tokens - num_queries + query + 1; }
  size_t begin(size_t query) const { return span && end(query) > span ? end(query) - span : 0; }
};

// The result does not depend on the number of threads.
void attend(const Prompt& prompt);

}  // namespace magicpig
