// Sixteen floats in one 512-bit register.
#pragma once

#include <immintrin.h>

#include "kernels.h"

namespace magicpig {
namespace {

using vec = __m512;
constexpr int kHeadTile = 4;  // heads that share a loaded row
constexpr int kHashRows = 6;  // register tile of the hashing product
constexpr int kHashGroups = 4;
constexpr int kLinearRows = 12;  // register tile of linear layers
constexpr int kLinearPanels = 2;
constexpr float kZeroPower = -200;  // times_power_of_two gives 0

inline vec zero() { return _mm512_setzero_ps(); }
inline vec set1(float x) { return _mm512_set1_ps(x); }
inline vec load(const float* p) { return _mm512_loadu_ps(p); }
inline vec load(const bf16* p) {
  __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline vec load(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
// Sixteen pairs of bf16: the first and the second of each.
inline void load_pairs(const bf16* p, vec& first, vec& second) {
  __m512i pairs = _mm512_loadu_si512(p);
  first = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  second = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline void store(float* p, vec x) { _mm512_storeu_ps(p, x); }
inline void store(bf16* p, vec x) {  // round to nearest even; NaN stays NaN
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}
inline void store(f16* p, vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
inline vec sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
inline vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
inline vec div(vec a, vec b) { return _mm512_div_ps(a, b); }
inline vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
inline vec min(vec a, vec b) { return _mm512_min_ps(a, b); }  // b when either is NaN
inline vec max(vec a, vec b) { return _mm512_max_ps(a, b); }  // b when either is NaN
inline vec abs(vec x) { return _mm512_abs_ps(x); }
inline vec sqrt(vec x) { return _mm512_sqrt_ps(x); }
inline vec round(vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vec floor(vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
inline vec times_power_of_two(vec x, vec n) { return _mm512_scalef_ps(x, n); }
inline vec select_less(vec a, vec b, vec if_less, vec otherwise) {
  return _mm512_mask_mov_ps(otherwise, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), if_less);
}
inline bool any_greater(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
inline uint16_t sign_bits(vec x) { return _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GE_OQ); }
inline vec lookup(const float* table, vec index) { return _mm512_i32gather_ps(_mm512_cvtps_epi32(index), table, 4); }
inline vec lookup(const float* table, const uint16_t* ids) {
  __m512i index = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(ids)));
  return _mm512_i32gather_ps(index, table, 4);
}
inline float sum(vec x) { return _mm512_reduce_add_ps(x); }
inline float largest(vec x) { return _mm512_reduce_max_ps(x); }
inline void sum4(vec a, vec b, vec c, vec d, float* out) {
  vec ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  vec cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  vec low = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd)));
  vec high = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd)));
  vec lanes = _mm512_add_ps(low, high);
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

// Sixteen 32-bit integers.
using ivec = __m512i;
inline ivec iset1(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline ivec iload(const void* p) { return _mm512_loadu_si512(p); }
inline void istore(void* p, ivec x) { _mm512_storeu_si512(p, x); }
inline ivec iota() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline ivec iadd(ivec a, ivec b) { return _mm512_add_epi32(a, b); }
inline ivec imul(ivec a, ivec b) { return _mm512_mullo_epi32(a, b); }
inline ivec iand(ivec a, ivec b) { return _mm512_and_si512(a, b); }
inline ivec ior(ivec a, ivec b) { return _mm512_or_si512(a, b); }
inline ivec ixor(ivec a, ivec b) { return _mm512_xor_si512(a, b); }
template <int N>
inline ivec shift_right(ivec a) {
  return _mm512_srli_epi32(a, N);
}
inline vec to_float(ivec a) { return _mm512_cvtepi32_ps(a); }
inline ivec to_int(vec a) { return _mm512_cvtps_epi32(a); }  // rounded
inline vec float_of_bits(ivec a) { return _mm512_castsi512_ps(a); }
inline ivec bits_of_float(vec a) { return _mm512_castps_si512(a); }
// acc + the products of four unsigned bytes, below 16, with four signed ones, in each lane.
inline ivec dot4(ivec acc, ivec codes, ivec query) {
#ifdef MAGICPIG_BF16_DOT  // machines with bf16 products have these too
  return _mm512_dpbusd_epi32(acc, codes, query);
#else
  return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(codes, query), _mm512_set1_epi16(1)));
#endif
}

// out[j][i] = in[i][j] of sixteen rows of sixteen, `stride` apart.
inline void transpose(const float* in, size_t stride, float* out) {
  __m512 pairs[16], fours[16];
  for (int i = 0; i < 16; i += 2) {
    vec a = load(in + i * stride), b = load(in + (i + 1) * stride);
    pairs[i] = _mm512_unpacklo_ps(a, b);
    pairs[i + 1] = _mm512_unpackhi_ps(a, b);
  }
  for (int i = 0; i < 16; i += 4) {  // fours[i + j]: column 4 l + j of rows i to i + 3 in each lane l
    for (int j = 0; j < 2; ++j) {
      __m512d a = _mm512_castps_pd(pairs[i + j]), b = _mm512_castps_pd(pairs[i + 2 + j]);
      fours[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      fours[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  }
  for (int j = 0; j < 4; ++j) {
    vec even_low = _mm512_shuffle_f32x4(fours[j], fours[4 + j], 0x88),
        odd_low = _mm512_shuffle_f32x4(fours[j], fours[4 + j], 0xdd);
    vec even_high = _mm512_shuffle_f32x4(fours[8 + j], fours[12 + j], 0x88),
        odd_high = _mm512_shuffle_f32x4(fours[8 + j], fours[12 + j], 0xdd);
    store(out + 16 * j, _mm512_shuffle_f32x4(even_low, even_high, 0x88));
    store(out + 16 * (4 + j), _mm512_shuffle_f32x4(odd_low, odd_high, 0x88));
    store(out + 16 * (8 + j), _mm512_shuffle_f32x4(even_low, even_high, 0xdd));
    store(out + 16 * (12 + j), _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd));
  }
}

}  // namespace
}  // namespace magicpig
