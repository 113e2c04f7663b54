// Exact attention of many queries over packed keys and values, by online softmax. Included by kernels.cpp only.
//
// Both products are those of linear layers: rows of queries times groups of keys, rows of weights times groups of
// values.
#pragma once

namespace magicpig {
namespace {

constexpr uint32_t kPromptBlock = 256;  // tokens whose scores are held at once
constexpr float kLog2E = 1.44269504089f;
static_assert(kPromptRows % kLinearRows == 0 && kLinearRows <= static_cast<int>(kChunk), "tiles fill a block of rows");

// 2^x for x <= 0; relative error below 3e-6, exactly 0 for -inf, NaN for NaN.
inline vec power_of_two_of(vec x) {
  vec bounded = max(set1(kZeroPower), x);  // the constant first: NaN passes through
  vec n = round(bounded);
  vec r = sub(bounded, n);
  vec p = fma(set1(9.5701045e-3f), r, set1(5.5917860e-2f));
  p = fma(p, r, set1(2.4024745e-1f));
  p = fma(p, r, set1(6.9312181e-1f));
  p = fma(p, r, set1(9.9999926e-1f));
  return times_power_of_two(p, n);
}

// A tile of rows against a block of tokens. Element t of a row belongs to token first + t.
struct PromptTile {
  static constexpr int R = kLinearRows;
  static constexpr size_t kWeightStride = kPromptBlock + 64 / sizeof(LinearInput);  // an odd number of cache lines

  alignas(64) float scores[R][kPromptBlock];
  alignas(64) float peaks[R][kChunk];  // of the scores, in parts
  alignas(64) LinearInput weights[R * kWeightStride];
  alignas(64) float rescale[kChunk];  // per row, of what was summed before
  uint32_t first, count;              // multiples of kGroup
};

// Stores the weights of 2 * kChunk tokens and adds what was stored to the sums.
#ifdef MAGICPIG_BF16_DOT
inline vec keep_weights(bf16* weights, vec low, vec high, vec sums) {
  __m512i rounded = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
  _mm512_store_si512(weights, rounded);
  return dot2(sums, rounded, _mm512_set1_epi32(0x3f803f80));  // times one
}
#else
inline vec keep_weights(float* weights, vec low, vec high, vec sums) {
  store(weights, low);
  store(weights + kChunk, high);
  return add(sums, add(low, high));
}
#endif

// Bends the scores, over softcap until then, of sixteen tokens from `token` on, and hides what a row does not see.
inline vec bend_and_hide(const PromptArgs& args, size_t row, uint32_t token, vec scores) {
  static const float kPlaces[kChunk] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  if (args.softcap > 0) scores = mul(tanh(scores), set1(args.softcap * kLog2E));
  vec hidden = set1(-__builtin_inff()), places = add(load(kPlaces), set1(static_cast<float>(token)));
  scores = select_less(places, set1(static_cast<float>(args.ends[row])), scores, hidden);
  return select_less(places, set1(static_cast<float>(args.begins[row])), hidden, scores);
}

// Scores times log2(e) of what each row sees. They are rounded here, before a maximum is taken from them: a product
// fused with the difference would leave weights above one, or none at all, where scores are very large.
inline void score_tile(const PromptArgs& args, size_t row, PromptTile& tile) {
  constexpr int R = PromptTile::R, P = kLinearPanels;
  const vec factor = set1(args.softcap > 0 ? args.scale / args.softcap : args.scale * kLog2E);
  const LinearInput* queries = static_cast<const LinearInput*>(args.queries) + row * args.query_stride;
  for (int r = 0; r < R; ++r) store(tile.peaks[r], set1(-__builtin_inff()));
  for (uint32_t t = 0; t < tile.count; t += P * kPanel) {
    const uint32_t token = tile.first + t;
    const bf16* group = args.keys + static_cast<size_t>(token / kGroup * kGroup) * args.head_dim;
    vec acc[R][P];
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p) acc[r][p] = zero();
    add_products<R, P>(queries, args.query_stride, args.head_dim / 2, group + token % kGroup * 2, acc);
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p) store(tile.scores[r] + t + p * kPanel, mul(acc[r][p], factor));
    const bool all_see = token >= args.begins[row + R - 1] && token + P * kPanel <= args.ends[row];
    if (args.softcap > 0 || !all_see) {
      for (int r = 0; r < R; ++r) {
        for (int p = 0; p < P; ++p) {
          float* scores = tile.scores[r] + t + p * kPanel;
          store(scores, bend_and_hide(args, row + r, token + p * kPanel, load(scores)));
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p)  // the peak second: NaN does not become it
        store(tile.peaks[r], max(load(tile.scores[r] + t + p * kPanel), load(tile.peaks[r])));
  }
}

// Scores in, weights relative to each row's maximum so far out.
inline void weigh_tile(size_t row, PromptTile& tile, const PromptState& state) {
  alignas(64) float before[kChunk] = {}, after[kChunk] = {};
  for (int r = 0; r < PromptTile::R; ++r) {
    before[r] = state.max[row + r];
    const float peak = largest(load(tile.peaks[r]));
    after[r] = peak > before[r] ? peak : before[r];
    state.max[row + r] = after[r];
  }
  store(tile.rescale, power_of_two_of(sub(load(before), load(after))));
  for (int r = 0; r < PromptTile::R; ++r) {
    float* lanes = state.sums + (row + r) * kChunk;
    vec sums = mul(load(lanes), set1(tile.rescale[r])), peak = set1(after[r]);
    for (uint32_t t = 0; t < tile.count; t += 2 * kChunk) {
      vec low = power_of_two_of(sub(load(tile.scores[r] + t), peak));
      vec high = power_of_two_of(sub(load(tile.scores[r] + t + kChunk), peak));
      sums = keep_weights(tile.weights + r * PromptTile::kWeightStride + t, low, high, sums);
    }
    store(lanes, sums);
  }
}

template <int P>
inline void add_values(const PromptArgs& args, const PromptTile& tile, uint32_t c, float* out) {
  constexpr int R = PromptTile::R;
  const uint32_t width = (args.head_dim + kChunk - 1) / kChunk * kChunk;
  const bf16* group = args.values + c / kGroup * args.value_stride + c % kGroup * 2;
  vec acc[R][P];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) acc[r][p] = mul(load(out + r * width + c + p * kPanel), set1(tile.rescale[r]));
  add_products<R, P>(tile.weights, PromptTile::kWeightStride, tile.count / 2,
                     group + static_cast<size_t>(tile.first) * kGroup, acc);
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) store(out + r * width + c + p * kPanel, acc[r][p]);
}

void attend_prompt(const PromptArgs& args, const PromptState& state) {
  const uint32_t width = (args.head_dim + kChunk - 1) / kChunk * kChunk;
  const uint32_t end = args.ends[args.num_rows - 1];
  PromptTile tile;
  for (uint32_t block = args.begins[0] / kPromptBlock * kPromptBlock; block < end; block += kPromptBlock) {
    for (size_t row = 0; row < args.num_rows; row += PromptTile::R) {
      const uint32_t begin = args.begins[row], last = args.ends[row + PromptTile::R - 1];
      tile.first = (begin > block ? begin : block) / kGroup * kGroup;
      const uint32_t stop = last < block + kPromptBlock ? last : block + kPromptBlock;
      if (tile.first >= stop) continue;
      tile.count = (stop - tile.first + kGroup - 1) / kGroup * kGroup;
      score_tile(args, row, tile);
      weigh_tile(row, tile, state);
      float* out = state.out + row * width;
      for (uint32_t c = 0; c < width; c += kLinearPanels * kPanel) {
        if (width - c < kLinearPanels * kPanel) {
          add_values<1>(args, tile, c, out);
        } else {
          add_values<kLinearPanels>(args, tile, c, out);
        }
      }
    }
  }
}

void finish_prompt_row(const float* out, const float* sums, uint32_t head_dim, bf16* result) {
  vec total = set1(sum(load(sums)));
  for (uint32_t c = 0; c < head_dim; c += kChunk) store_some(result + c, div(load(out + c), total), head_dim - c);
}

}  // namespace
}  // namespace magicpig
