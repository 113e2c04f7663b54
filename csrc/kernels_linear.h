// Linear layers: rows of bf16 inputs times packed weights, summed in float32. Included by kernels.cpp only.
#pragma once

namespace magicpig {
namespace {

// Inputs taken together when there are several tiles of rows, so that the later tiles find the weights in a cache.
constexpr size_t kPairBlock = 512;

// With few rows the hardware's own prefetcher streams best. With more, the arithmetic of a line takes as long as its
// transfer, and only lines asked for well ahead, into the second-level cache, hide one behind the other.
#ifdef MAGICPIG_BF16_DOT
constexpr int kPrefetchFromRows = 7;
#else
constexpr int kPrefetchFromRows = 4;
#endif
constexpr size_t kPrefetchBytes = 16384;

template <int R, int P>
inline void prefetch_ahead(const bf16* weights) {  // past the last group's end now and then: harmless
  if (R < kPrefetchFromRows) return;
  for (int p = 0; p < P; ++p)
    __builtin_prefetch(reinterpret_cast<const char*>(weights) + kPrefetchBytes + 64 * p, 0, 2);
}

#ifdef MAGICPIG_BF16_DOT
using LinearInput = bf16;
inline void prepare(const bf16* x, size_t count, bf16* out) { memcpy(out, x, count * sizeof(bf16)); }
inline void set_zero(bf16* x) { x->bits = 0; }

// acc[r][p] += the products of `num_pairs` pairs of inputs of row r with panel p.
template <int R, int P>
inline void add_products(const bf16* x, size_t stride, size_t num_pairs, const bf16* group, vec (&acc)[R][P]) {
  for (size_t pair = 0; pair < num_pairs; ++pair) {
    prefetch_ahead<R, P>(group + pair * 2 * kGroup);
    __m512i weights[P];
    for (int p = 0; p < P; ++p) weights[p] = _mm512_loadu_si512(group + pair * 2 * kGroup + p * 2 * kPanel);
    for (int r = 0; r < R; ++r) {
      __m512i input = load_pair(x + r * stride + 2 * pair);
      for (int p = 0; p < P; ++p) acc[r][p] = dot2(acc[r][p], weights[p], input);
    }
  }
}
#else
using LinearInput = float;
inline void prepare(const bf16* x, size_t count, float* out) {
  size_t i = 0;
  for (; i + kChunk <= count; i += kChunk) store(out + i, load(x + i));
  if (i < count) {
    bf16 padded[kChunk] = {};
    memcpy(padded, x + i, (count - i) * sizeof(bf16));
    float values[kChunk];
    store(values, load(padded));
    memcpy(out + i, values, (count - i) * sizeof(float));
  }
}
inline void set_zero(float* x) { *x = 0; }

template <int R, int P>
inline void add_products(const float* x, size_t stride, size_t num_pairs, const bf16* group, vec (&acc)[R][P]) {
  for (size_t pair = 0; pair < num_pairs; ++pair) {
    prefetch_ahead<R, P>(group + pair * 2 * kGroup);
    vec first[P], second[P];
    for (int p = 0; p < P; ++p) load_pairs(group + pair * 2 * kGroup + p * 2 * kPanel, first[p], second[p]);
    for (int r = 0; r < R; ++r) {
      vec a = set1(x[r * stride + 2 * pair]), b = set1(x[r * stride + 2 * pair + 1]);
      for (int p = 0; p < P; ++p) acc[r][p] = fma(b, second[p], fma(a, first[p], acc[r][p]));
    }
  }
}
#endif

using GroupSums = float[kGroup];

template <int R>
inline void add_tile(const LinearInput* x, size_t stride, size_t num_pairs, const bf16* group, GroupSums* sums) {
  constexpr int P = R <= kLinearRows / 4 ? 2 : kLinearPanels;  // both panels at once where registers suffice
  for (int panel = 0; panel < 2; panel += P) {
    vec acc[R][P];
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p) acc[r][p] = load(sums[r] + (panel + p) * kPanel);
    add_products<R, P>(x, stride, num_pairs, group + panel * 2 * kPanel, acc);
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p) store(sums[r] + (panel + p) * kPanel, acc[r][p]);
  }
}

template <int R>
inline void add_tile_of(size_t rows, const LinearInput* x, size_t stride, size_t num_pairs, const bf16* group,
                        GroupSums* sums) {
  if (rows == R) return add_tile<R>(x, stride, num_pairs, group, sums);
  if constexpr (R > 1) add_tile_of<R - 1>(rows, x, stride, num_pairs, group, sums);
}

// sums[row] = bias + the products, for rows in tiles of about one size.
inline void sum_group(const LinearArgs& args, GroupSums* sums) {
  const LinearInput* inputs = static_cast<const LinearInput*>(args.inputs);
  const size_t num_tiles = (args.rows + kLinearRows - 1) / kLinearRows;
  const size_t block = num_tiles == 1 ? args.num_pairs : kPairBlock;
  for (size_t r = 0; r < args.rows; ++r) memset(sums[r], 0, sizeof(GroupSums));
  for (size_t pair = 0; pair < args.num_pairs; pair += block) {
    const size_t count = args.num_pairs - pair < block ? args.num_pairs - pair : block;
    for (size_t tile = 0; tile < num_tiles; ++tile) {
      const size_t first = tile * args.rows / num_tiles, end = (tile + 1) * args.rows / num_tiles;
      add_tile_of<kLinearRows>(end - first, inputs + first * args.input_stride + 2 * pair, args.input_stride, count,
                               args.group + pair * 2 * kGroup, sums + first);
    }
  }
}

template <class T>
inline void store_some(T* out, vec x, size_t count) {
  if (count >= kPanel) return store(out, x);
  T values[kPanel];
  store(values, x);
  memcpy(out, values, count * sizeof(T));
}

void prepare_inputs(const bf16* x, size_t rows, size_t in, void* inputs, size_t input_stride) {
  LinearInput* out = static_cast<LinearInput*>(inputs);
  for (size_t r = 0; r < rows; ++r) {
    prepare(x + r * in, in, out + r * input_stride);
    if (in % 2) set_zero(out + r * input_stride + in);
  }
}

void linear(const LinearArgs& args, bf16* out, size_t out_stride) {
  GroupSums sums[kLinearBlockRows];
  sum_group(args, sums);
  for (size_t r = 0; r < args.rows; ++r)
    for (size_t c = 0; c < args.num_outputs; c += kPanel)
      store_some(out + r * out_stride + c, add(load(sums[r] + c), load(args.bias + c)), args.num_outputs - c);
}

// x times the logistic function of x, or of what makes it the tanh form of gelu: (1 + tanh(u)) / 2 = logistic(2 u).
inline vec activate(Activation activation, vec x) {
  vec z = x;
  if (activation == kGeluTanh) {
    vec cubic = fma(mul(mul(x, x), set1(0.044715f)), x, x);
    z = mul(cubic, set1(1.5957691216f));  // 2 sqrt(2 / pi)
  }
  return div(x, add(set1(1.0f), exp(sub(zero(), z))));
}

void gated(const LinearArgs& args, Activation activation, void* out, size_t out_stride) {
  LinearInput* next = static_cast<LinearInput*>(out);
  GroupSums sums[kLinearBlockRows];
  sum_group(args, sums);
  for (size_t r = 0; r < args.rows; ++r) {
    vec gate = add(load(sums[r]), load(args.bias)), up = add(load(sums[r] + kPanel), load(args.bias + kPanel));
    bf16 rounded[kPanel];
    store(rounded, mul(activate(activation, gate), up));
    const size_t count = args.num_outputs < kPanel ? args.num_outputs : kPanel;
    prepare(rounded, count, next + r * out_stride);
    if (count % 2) set_zero(next + r * out_stride + count);
  }
}

}  // namespace
}  // namespace magicpig
