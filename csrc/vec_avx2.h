// Sixteen floats in two 256-bit registers.
#pragma once

#include <immintrin.h>

#include "kernels.h"

namespace magicpig {
namespace {

struct vec {
  __m256 a, b;
};
constexpr int kHeadTile = 1;
constexpr int kHashRows = 4;
constexpr int kHashGroups = 1;
constexpr int kLinearRows = 4;  // register tile of linear layers
constexpr int kLinearPanels = 1;
constexpr float kZeroPower = -127;  // times_power_of_two gives 0

inline vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline vec set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256 load8(const bf16* p) {
  __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline __m256 load8(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline vec load(const bf16* p) { return {load8(p), load8(p + 8)}; }
inline vec load(const f16* p) { return {load8(p), load8(p + 8)}; }
inline void load_pairs8(const bf16* p, __m256& first, __m256& second) {
  __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  first = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  second = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline void load_pairs(const bf16* p, vec& first, vec& second) {
  load_pairs8(p, first.a, second.a);
  load_pairs8(p + 16, first.b, second.b);
}
inline void store(float* p, vec x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline __m256i to_bf16(__m256 x) {  // round to nearest even; NaN stays NaN
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
}
inline void store(bf16* p, vec x) {
  __m256i packed = _mm256_packus_epi32(to_bf16(x.a), to_bf16(x.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline void store(f16* p, vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
inline vec add(vec x, vec y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline vec sub(vec x, vec y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline vec mul(vec x, vec y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline vec div(vec x, vec y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline vec fma(vec x, vec y, vec z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline vec min(vec x, vec y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }  // y when either is NaN
inline vec max(vec x, vec y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }  // y when either is NaN
inline vec abs(vec x) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline vec sqrt(vec x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
inline vec round(vec x) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, kMode), _mm256_round_ps(x.b, kMode)};
}
inline vec floor(vec x) { return {_mm256_floor_ps(x.a), _mm256_floor_ps(x.b)}; }
inline __m256 power_of_two(__m256 n) {
  __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
inline vec times_power_of_two(vec x, vec n) {
  return {_mm256_mul_ps(x.a, power_of_two(n.a)), _mm256_mul_ps(x.b, power_of_two(n.b))};
}
inline vec select_less(vec x, vec y, vec if_less, vec otherwise) {
  return {_mm256_blendv_ps(otherwise.a, if_less.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(otherwise.b, if_less.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
inline bool any_greater(vec x, vec y) {
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ))) !=
         0;
}
inline uint16_t sign_bits(vec x) {
  int low = _mm256_movemask_ps(_mm256_cmp_ps(x.a, _mm256_setzero_ps(), _CMP_GE_OQ));
  int high = _mm256_movemask_ps(_mm256_cmp_ps(x.b, _mm256_setzero_ps(), _CMP_GE_OQ));
  return static_cast<uint16_t>(low | high << 8);
}
inline vec lookup(const float* table, vec index) {
  return {_mm256_i32gather_ps(table, _mm256_cvtps_epi32(index.a), 4),
          _mm256_i32gather_ps(table, _mm256_cvtps_epi32(index.b), 4)};
}
inline vec lookup(const float* table, const uint16_t* ids) {
  __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ids));
  __m256i low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(all));
  __m256i high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(all, 1));
  return {_mm256_i32gather_ps(table, low, 4), _mm256_i32gather_ps(table, high, 4)};
}
inline float sum(vec x) {
  __m256 all = _mm256_add_ps(x.a, x.b);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float largest(vec x) {
  __m256 all = _mm256_max_ps(x.a, x.b);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline void sum4(vec x, vec y, vec z, vec w, float* out) {
  __m256 xy = _mm256_hadd_ps(_mm256_add_ps(x.a, x.b), _mm256_add_ps(y.a, y.b));
  __m256 zw = _mm256_hadd_ps(_mm256_add_ps(z.a, z.b), _mm256_add_ps(w.a, w.b));
  __m256 all = _mm256_hadd_ps(xy, zw);
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

// Sixteen 32-bit integers.
struct ivec {
  __m256i a, b;
};
inline ivec iset1(uint32_t x) {
  __m256i all = _mm256_set1_epi32(static_cast<int>(x));
  return {all, all};
}
inline ivec iload(const void* p) {
  const __m256i* parts = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(parts), _mm256_loadu_si256(parts + 1)};
}
inline void istore(void* p, ivec x) {
  __m256i* parts = static_cast<__m256i*>(p);
  _mm256_storeu_si256(parts, x.a);
  _mm256_storeu_si256(parts + 1, x.b);
}
inline ivec iota() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
inline ivec iadd(ivec x, ivec y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline ivec imul(ivec x, ivec y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
inline ivec iand(ivec x, ivec y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline ivec ior(ivec x, ivec y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline ivec ixor(ivec x, ivec y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
template <int N>
inline ivec shift_right(ivec x) {
  return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)};
}
inline vec to_float(ivec x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline ivec to_int(vec x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }  // rounded
inline vec float_of_bits(ivec x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline ivec bits_of_float(vec x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline __m256i dot4(__m256i acc, __m256i codes, __m256i query) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, query), _mm256_set1_epi16(1)));
}
// acc + the products of four unsigned bytes, below 16, with four signed ones, in each lane.
inline ivec dot4(ivec acc, ivec codes, ivec query) {
  return {dot4(acc.a, codes.a, query.a), dot4(acc.b, codes.b, query.b)};
}

// out[j][i] = in[i][j] of sixteen rows of sixteen, `stride` apart.
inline void transpose(const float* in, size_t stride, float* out) {
  for (size_t i = 0; i < 16; ++i)
    for (size_t j = 0; j < 16; ++j) out[16 * j + i] = in[i * stride + j];
}

}  // namespace
}  // namespace magicpig
