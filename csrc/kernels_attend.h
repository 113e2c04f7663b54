// Attention over rows by online softmax. Included by kernels.cpp only.
#pragma once

namespace magicpig {
namespace {

template <class T>
struct Block {
  const T* rows[kBlock];
  uint16_t ids[kBlock];
  size_t first;
  int valid;   // rows that count
  int padded;  // valid rounded up to a multiple of 4; the surplus repeats the last row
};

// Fills the block with the rows from `first` on.
template <class T>
inline void fill(const RowsArgs& args, size_t first, Block<T>& block) {
  const T* base = static_cast<const T*>(args.rows);
  const size_t stride = 2 * static_cast<size_t>(args.dim);
  const size_t left = args.count - first;
  block.first = first;
  block.valid = left < kBlock ? static_cast<int>(left) : kBlock;
  block.padded = (block.valid + 3) & ~3;
  for (int i = 0; i < block.valid; ++i) {
    size_t id = args.ids ? args.ids[first + i] : first + i;
    block.ids[i] = static_cast<uint16_t>(id);
    block.rows[i] = base + id * stride;
  }
  for (int i = block.valid; i < kBlock; ++i) {
    block.ids[i] = block.ids[block.valid - 1];
    block.rows[i] = block.rows[block.valid - 1];
  }
}

inline void rescale(PartialState& state, float factor, uint32_t dim) {
  vec f = set1(factor);
  store(state.lanes, mul(load(state.lanes), f));
  for (uint32_t c = 0; c < dim; c += 2 * kChunk) {
    store(state.out + c, mul(load(state.out + c), f));
    store(state.out + c + kChunk, mul(load(state.out + c + kChunk), f));
  }
}

// Raw products in, weights relative to the state's maximum out.
template <class T>
inline void to_weights(const RowsArgs& args, const Block<T>& block, float* scores, PartialState& state,
                       typename Products<T>::Weight* weights) {
  float peak = state.max;
  for (int i = 0; i < block.valid; i += kChunk) {
    vec products = load(scores + i);
    vec logits = mul(products, set1(args.scale));
    if (args.softcap > 0) logits = mul(tanh(mul(logits, set1(1 / args.softcap))), set1(args.softcap));
    if (args.log_probability) logits = sub(logits, load(args.log_probability + block.first + i));
    if (args.inclusion.log_u) logits = sub(logits, log_inclusion(args.inclusion, products, block.ids + i));
    store(scores + i, logits);
    for (int j = block.valid; j < i + static_cast<int>(kChunk); ++j) scores[j] = -__builtin_inff();
    if (any_greater(load(scores + i), set1(peak))) peak = largest(load(scores + i));
  }
  if (peak > state.max) {
    alignas(64) float factor[kChunk];
    store(factor, exp(set1(state.max - peak)));
    rescale(state, factor[0], args.dim);
    state.max = peak;
  }
  for (int i = 0; i < block.valid; i += kChunk) {
    vec kept = Products<T>::keep(weights + i, exp(sub(load(scores + i), set1(peak))));
    store(state.lanes, add(load(state.lanes), kept));
  }
}

template <class T, int H>
inline void attend_block(const RowsArgs& args, const Block<T>& block, uint32_t head, PartialState* states,
                         Ahead<T>& ahead) {
  alignas(64) float scores[H][kBlock];
  alignas(64) typename Products<T>::Weight weights[H][kBlock];
  const size_t at = static_cast<size_t>(head) * args.dim;
  Queries queries = {args.queries.values + at, args.queries.hi + at, args.queries.lo ? args.queries.lo + at : nullptr};
  for (int h = 0; h < H; ++h)  // lanes of the last, partial group of sixteen that no product fills
    for (int i = block.padded; i < kBlock; ++i) scores[h][i] = 0;
  Products<T>::template dots<H>(block.rows, block.padded, args.dim, queries, scores, ahead);
  for (int h = 0; h < H; ++h) to_weights<T>(args, block, scores[h], states[head + h], weights[h]);
  Products<T>::template accumulate<H>(block.rows, block.padded, args.dim, weights, states + head, ahead);
}

template <class T>
inline void attend_heads(const RowsArgs& args, const Block<T>& block, uint32_t head, PartialState* states,
                         Ahead<T>& ahead) {
  if constexpr (kHeadTile > 1) {
    switch (args.num_heads - head) {
      case 1:
        return attend_block<T, 1>(args, block, head, states, ahead);
      case 2:
        return attend_block<T, 2>(args, block, head, states, ahead);
      case 3:
        return attend_block<T, 3>(args, block, head, states, ahead);
    }
  }
  attend_block<T, kHeadTile>(args, block, head, states, ahead);
}

template <class T>
void attend(const RowsArgs& args, PartialState* states) {
  for (uint32_t h = 0; h < args.num_heads; ++h) {
    states[h].max = -__builtin_inff();
    store(states[h].lanes, zero());
    for (uint32_t c = 0; c < args.dim; c += 2 * kChunk) {
      store(states[h].out + c, zero());
      store(states[h].out + c + kChunk, zero());
    }
  }
  Block<T> blocks[2];
  if (args.count) fill<T>(args, 0, blocks[0]);
  for (size_t first = 0, turn = 0; first < args.count; first += kBlock, turn ^= 1) {
    Block<T>& next = blocks[turn ^ 1];
    if (first + kBlock < args.count) {
      fill<T>(args, first + kBlock, next);
    } else {
      next.valid = 0;
    }
    const size_t row_bytes = 2 * args.dim * sizeof(T);
    Ahead<T> ahead = args.ids ? Ahead<T>(next.rows, next.valid, row_bytes)
                              : Ahead<T>(next.rows, next.valid > 0, next.valid * row_bytes);
    for (uint32_t head = 0; head < args.num_heads; head += kHeadTile)
      attend_heads<T>(args, blocks[turn], head, states, ahead);
    ahead.finish();
  }
  for (uint32_t h = 0; h < args.num_heads; ++h) {
    states[h].sum = sum(load(states[h].lanes));
    Products<T>::finish(states[h].out, args.dim);
  }
}

template <class T>
void log_inclusion_of_rows(const RowsArgs& args, float* log_u) {
  Block<T> block;
  for (size_t first = 0; first < args.count; first += kBlock) {
    fill<T>(args, first, block);
    Ahead<T> ahead = {block.rows, 0, 0};
    alignas(64) float scores[1][kBlock] = {};
    Products<T>::template dots<1>(block.rows, block.padded, args.dim, args.queries, scores, ahead);
    for (int i = 0; i < block.valid; i += kChunk) {
      store(scores[0] + i, log_inclusion(args.inclusion, load(scores[0] + i), block.ids + i));
    }
    for (int i = 0; i < block.valid; ++i) log_u[first + i] = scores[0][i];
  }
}

}  // namespace
}  // namespace magicpig
