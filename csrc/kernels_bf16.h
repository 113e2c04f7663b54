// Products of bf16 rows with the AVX512-BF16 dot instruction: two bf16 products summed in float32 per lane.
// The weights of a block are rounded to bf16, and their sum is taken after the rounding, so the output stays a weighted
// mean.
#pragma once

namespace magicpig {
namespace {

using PairAcc = __m512;

inline __m512i load32(const bf16* p, uint32_t valid) {  // 32 elements, or 16 and zeros
  return valid >= 32 ? _mm512_loadu_si512(p)
                     : _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m512i load_pair(const bf16* p) {  // the same two elements in every lane
  int pair;
  memcpy(&pair, p, 4);
  return _mm512_set1_epi32(pair);
}
inline PairAcc dot2(PairAcc acc, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

template <>
struct Products<bf16> {
  using Weight = bf16;
  static constexpr int kLines = 4;  // fetched per inner step: a row's worth per row, over both products

  template <int H>
  static void dots(const bf16* const* rows, int count, uint32_t dim, const Queries& queries, float (*scores)[kBlock],
                   Ahead<bf16>& ahead) {
    if (queries.lo) {
      dots_parts<H, true>(rows, count, dim, queries, scores, ahead);
    } else {
      dots_parts<H, false>(rows, count, dim, queries, scores, ahead);
    }
  }

  static vec keep(Weight* weights, vec p) {
    store(weights, p);
    return load(weights);
  }

  // While rows are added, each 32 outputs lie as the even and odd quads of the interleaved values; finish() puts them
  // right.
  template <int H>
  static void accumulate(const bf16* const* rows, int count, uint32_t dim, const Weight (*weights)[kBlock],
                         PartialState* states, Ahead<bf16>& ahead) {
    uint32_t c = 0;
    for (; c + 64 <= dim; c += 64) chunks<H, 2>(rows, count, dim, c, weights, states, ahead);
    for (; c < dim; c += 32) chunks<H, 1>(rows, count, dim, c, weights, states, ahead);
  }

  static void finish(float* out, uint32_t dim) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (uint32_t c = 0; c < dim; c += 32) {
      vec low = load(out + c), high = load(out + c + 16);
      store(out + c, _mm512_permutex2var_ps(low, first, high));
      store(out + c + 16, _mm512_permutex2var_ps(low, second, high));
    }
  }

 private:
  template <int H, bool kLow>
  static void dots_parts(const bf16* const* rows, int count, uint32_t dim, const Queries& queries,
                         float (*scores)[kBlock], Ahead<bf16>& ahead) {
    for (int r = 0; r < count; r += 4) {
      PairAcc acc[4][H];
      for (int i = 0; i < 4; ++i)
        for (int h = 0; h < H; ++h) acc[i][h] = zero();
      for (uint32_t c = 0; c < dim; c += 32) {
        __m512i key[4];
        for (int i = 0; i < 4; ++i) key[i] = load32(rows[r + i] + c, dim - c);
        for (int h = 0; h < H; ++h) {
          __m512i query = load32(queries.hi + h * dim + c, dim - c);
          for (int i = 0; i < 4; ++i) acc[i][h] = dot2(acc[i][h], key[i], query);
          if (kLow) {
            query = load32(queries.lo + h * dim + c, dim - c);
            for (int i = 0; i < 4; ++i) acc[i][h] = dot2(acc[i][h], key[i], query);
          }
        }
        ahead.step(kLines);
      }
      for (int h = 0; h < H; ++h) sum4(acc[0][h], acc[1][h], acc[2][h], acc[3][h], scores[h] + r);
    }
  }

  template <int H, int C>
  static void chunks(const bf16* const* rows, int count, uint32_t dim, uint32_t offset, const Weight (*weights)[kBlock],
                     PartialState* states, Ahead<bf16>& ahead) {
    PairAcc acc[H][C][2];
    for (int h = 0; h < H; ++h)
      for (int c = 0; c < C; ++c)
        for (int half = 0; half < 2; ++half) acc[h][c][half] = load(states[h].out + offset + 32 * c + 16 * half);
    for (int r = 0; r < count; r += 2) {
      const bf16 *even = rows[r] + dim + offset, *odd = rows[r + 1] + dim + offset;
      for (int c = 0; c < C; ++c) {
        uint32_t valid = C > 1 ? 32 : dim - offset;
        __m512i a = load32(even + 32 * c, valid), b = load32(odd + 32 * c, valid);
        __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
        for (int h = 0; h < H; ++h) {
          __m512i weight = load_pair(weights[h] + r);
          acc[h][c][0] = dot2(acc[h][c][0], low, weight);
          acc[h][c][1] = dot2(acc[h][c][1], high, weight);
        }
      }
      ahead.step(kLines);
    }
    for (int h = 0; h < H; ++h)
      for (int c = 0; c < C; ++c)
        for (int half = 0; half < 2; ++half) store(states[h].out + offset + 32 * c + 16 * half, acc[h][c][half]);
  }
};

}  // namespace
}  // namespace magicpig
