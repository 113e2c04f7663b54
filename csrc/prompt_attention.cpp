#include "prompt_attention.h"

#include <algorithm>

#include "dispatch.h"
#include "memory.h"
#include "prompt_pack.h"
#include "threads.h"

namespace magicpig {

namespace {

// What is held at once, so that memory is bounded; and tasks of some tenths of a millisecond.
constexpr size_t kQueriesAtOnce = 512, kTokensAtOnce = 2048, kRowsPerTask = 8 * kPromptRows, kTokensPerPack = 128;

size_t round_up(size_t x, size_t step) { return (x + step - 1) / step * step; }

// Memory of the calling thread, kept for the next layer: new pages would cost as much as the attention of a few tokens.
char* scratch(size_t bytes) {
  constexpr size_t kKept = size_t{32} << 20;
  thread_local Buffer buffer;
  if (buffer.size() < bytes || (buffer.size() > kKept && bytes <= kKept)) {
    buffer = Buffer();
    buffer = Buffer(bytes);
  }
  return buffer.data();
}

// Some queries of a prompt. The query heads of a KV head are rows of one matrix: row = query * group + head.
class Pass {
 public:
  Pass(const Kernels& kernels, const Prompt& prompt, size_t first_query, size_t num_queries)
      : kernels_(kernels),
        prompt_(prompt),
        first_query_(first_query),
        num_rows_(num_queries * prompt.group()),
        padded_rows_(round_up(num_rows_, kPromptRows)),
        width_(round_up(prompt.head_dim, kChunk)),
        begin_(prompt.begin(first_query)),
        end_(prompt.end(first_query + num_queries - 1)),
        capacity_(round_up(std::min(kTokensAtOnce, end_ - begin_), kGroup)) {
    const size_t line = 64 / kernels.input_bytes;
    query_stride_ = (round_up(prompt.head_dim, line) / line | 1) * line;
    const size_t rows = prompt.num_kv_heads * padded_rows_, tokens = prompt.num_kv_heads * capacity_;
    const size_t sizes[] = {rows * query_stride_ * kernels.input_bytes,
                            rows * sizeof(float),
                            rows * kChunk * sizeof(float),
                            rows * width_ * sizeof(float),
                            tokens * prompt.head_dim * sizeof(bf16),
                            tokens * packed_width(prompt.head_dim) * sizeof(bf16)};
    size_t bytes = 0;
    for (size_t size : sizes) bytes += round_up(size, 64);
    char* next = scratch(bytes);
    char* parts[6];
    for (size_t i = 0; i < 6; next += round_up(sizes[i++], 64)) parts[i] = next;
    queries_ = parts[0];
    state_ = {reinterpret_cast<float*>(parts[1]), reinterpret_cast<float*>(parts[2]),
              reinterpret_cast<float*>(parts[3])};
    keys_ = reinterpret_cast<bf16*>(parts[4]);
    values_ = reinterpret_cast<bf16*>(parts[5]);
  }

  void run() {
    const size_t num_blocks = (num_rows_ + kRowsPerTask - 1) / kRowsPerTask;
    for (size_t first = begin_; first < end_; first += kTokensAtOnce) {
      const size_t count = std::min(kTokensAtOnce, end_ - first);
      const size_t num_packs = (count + kTokensPerPack - 1) / kTokensPerPack;
      parallel_for(prompt_.num_kv_heads * num_packs, [&](size_t task) {
        const size_t at = task % num_packs * kTokensPerPack;
        pack(task / num_packs, first, at, std::min(kTokensPerPack, count - at));
      });
      parallel_for(prompt_.num_kv_heads * num_blocks, [&](size_t task) {
        const size_t row = task % num_blocks * kRowsPerTask, kv_head = task / num_blocks;
        const size_t rows = std::min(kRowsPerTask, padded_rows_ - row);
        if (first == begin_) prepare(kv_head, row, rows);
        attend_rows(kv_head, row, rows, first, count);
        if (first + count == end_) finish(kv_head, row, rows);
      });
    }
  }

 private:
  size_t query(size_t row) const { return first_query_ + std::min(row, num_rows_ - 1) / prompt_.group(); }
  size_t head(size_t kv_head, size_t row) const { return kv_head * prompt_.group() + row % prompt_.group(); }
  char* inputs(size_t at) const { return queries_ + at * query_stride_ * kernels_.input_bytes; }
  PromptState state(size_t at) const { return {state_.max + at, state_.sums + at * kChunk, state_.out + at * width_}; }
  bf16* keys(size_t kv_head) const { return keys_ + kv_head * capacity_ * prompt_.head_dim; }
  bf16* values(size_t kv_head) const { return values_ + kv_head * capacity_ * packed_width(prompt_.head_dim); }

  void pack(size_t kv_head, size_t first, size_t at, size_t count) const {
    pack_keys(prompt_.keys.row(kv_head, first + at), prompt_.keys.token_stride, count, prompt_.head_dim,
              keys(kv_head) + at * prompt_.head_dim);
    pack_values(prompt_.values.row(kv_head, first + at), prompt_.values.token_stride, count, prompt_.head_dim,
                values(kv_head) + at * kGroup, capacity_ * kGroup);
  }

  void prepare(size_t kv_head, size_t row, size_t rows) const {
    const size_t at = kv_head * padded_rows_ + row;
    const PromptState begun = state(at);
    std::fill_n(begun.max, rows, -kLargest);
    std::fill_n(begun.sums, rows * kChunk, 0.0f);
    std::fill_n(begun.out, rows * width_, 0.0f);
    for (size_t r = 0; r < rows; ++r) {  // padding repeats a row
      const size_t source = std::min(row + r, num_rows_ - 1);
      kernels_.prepare_inputs(prompt_.queries.row(head(kv_head, source), query(source)), 1, prompt_.head_dim,
                              inputs(at + r), query_stride_);
    }
  }

  void attend_rows(size_t kv_head, size_t row, size_t rows, size_t first, size_t count) const {
    uint32_t begins[kRowsPerTask], ends[kRowsPerTask];
    const auto within = [&](size_t token) {
      return static_cast<uint32_t>(std::min(token, first + count) - std::min(token, first));
    };
    for (size_t r = 0; r < rows; ++r) {
      begins[r] = within(prompt_.begin(query(row + r)));
      ends[r] = within(prompt_.end(query(row + r)));
    }
    const size_t at = kv_head * padded_rows_ + row;
    const PromptArgs args = {inputs(at),         query_stride_, rows, prompt_.head_dim, keys(kv_head),  values(kv_head),
                             capacity_ * kGroup, begins,        ends, prompt_.scale,    prompt_.softcap};
    kernels_.attend_prompt(args, state(at));
  }

  void finish(size_t kv_head, size_t row, size_t rows) const {
    const size_t at = kv_head * padded_rows_;
    for (size_t r = row; r < std::min(row + rows, num_rows_); ++r) {
      const PromptState done = state(at + r);
      kernels_.finish_prompt_row(done.out, done.sums, prompt_.head_dim,
                                 prompt_.out + (query(r) * prompt_.num_heads + head(kv_head, r)) * prompt_.head_dim);
    }
  }

  const Kernels& kernels_;
  const Prompt& prompt_;
  const size_t first_query_, num_rows_, padded_rows_, width_;
  const size_t begin_, end_;  // of the tokens that any of the queries sees
  const size_t capacity_;     // tokens packed at once
  size_t query_stride_;
  char* queries_;      // [num_kv_heads, padded_rows, query_stride]
  PromptState state_;  // of num_kv_heads * padded_rows rows
  bf16 *keys_, *values_;
};

}  // namespace

void attend(const Prompt& prompt) {
  const Kernels& kernel = kernels();
  for (size_t first = 0; first < prompt.num_queries; first += kQueriesAtOnce)
    Pass(kernel, prompt, first, std::min(kQueriesAtOnce, prompt.num_queries - first)).run();
}

}  // namespace magicpig
