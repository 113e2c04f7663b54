// Sixteen floats in four 128-bit registers (ARM64 baseline).
#pragma once

#include <arm_neon.h>

#include "kernels.h"

namespace magicpig {
namespace {

struct vec {
  float32x4_t r[4];
};
constexpr int kHeadTile = 1;
constexpr int kHashRows = 4;
constexpr int kHashGroups = 1;
constexpr int kLinearRows = 4;  // register tile of linear layers
constexpr int kLinearPanels = 1;
constexpr float kZeroPower = -127;  // times_power_of_two gives 0

#define MAGICPIG_EACH(expression)                    \
  vec out;                                           \
  for (int i = 0; i < 4; ++i) out.r[i] = expression; \
  return out
inline vec set1(float x) { MAGICPIG_EACH(vdupq_n_f32(x)); }
inline vec zero() { return set1(0.0f); }
inline float32x4_t load4(const float* p) { return vld1q_f32(p); }
inline float32x4_t load4(const bf16* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p)), 16));
}
inline float32x4_t load4(const f16* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p))));
}
template <class T>
inline vec load(const T* p) {
  MAGICPIG_EACH(load4(p + 4 * i));
}
inline void load_pairs(const bf16* p, vec& first, vec& second) {
  for (int i = 0; i < 4; ++i) {
    uint32x4_t pairs = vreinterpretq_u32_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p + 8 * i)));
    first.r[i] = vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16));
    second.r[i] = vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000u)));
  }
}
inline void store4(float* p, float32x4_t x) { vst1q_f32(p, x); }
inline void store4(bf16* p, float32x4_t x) {  // round to nearest even; NaN stays NaN
  uint32x4_t bits = vreinterpretq_u32_f32(x);
  uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
  vst1_u16(reinterpret_cast<uint16_t*>(p), vmovn_u32(vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc0))));
}
inline void store4(f16* p, float32x4_t x) {
  vst1_u16(reinterpret_cast<uint16_t*>(p), vreinterpret_u16_f16(vcvt_f16_f32(x)));
}
template <class T>
inline void store(T* p, vec x) {
  for (int i = 0; i < 4; ++i) store4(p + 4 * i, x.r[i]);
}
inline vec add(vec a, vec b) { MAGICPIG_EACH(vaddq_f32(a.r[i], b.r[i])); }
inline vec sub(vec a, vec b) { MAGICPIG_EACH(vsubq_f32(a.r[i], b.r[i])); }
inline vec mul(vec a, vec b) { MAGICPIG_EACH(vmulq_f32(a.r[i], b.r[i])); }
inline vec div(vec a, vec b) { MAGICPIG_EACH(vdivq_f32(a.r[i], b.r[i])); }
inline vec fma(vec a, vec b, vec c) { MAGICPIG_EACH(vfmaq_f32(c.r[i], a.r[i], b.r[i])); }
inline vec min(vec a, vec b) {  // b when either is NaN
  MAGICPIG_EACH(vbslq_f32(vcltq_f32(a.r[i], b.r[i]), a.r[i], b.r[i]));
}
inline vec max(vec a, vec b) {  // b when either is NaN
  MAGICPIG_EACH(vbslq_f32(vcgtq_f32(a.r[i], b.r[i]), a.r[i], b.r[i]));
}
inline vec abs(vec a) { MAGICPIG_EACH(vabsq_f32(a.r[i])); }
inline vec sqrt(vec a) { MAGICPIG_EACH(vsqrtq_f32(a.r[i])); }
inline vec round(vec a) { MAGICPIG_EACH(vrndnq_f32(a.r[i])); }
inline vec floor(vec a) { MAGICPIG_EACH(vrndmq_f32(a.r[i])); }
inline float32x4_t power_of_two(float32x4_t n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}
inline vec times_power_of_two(vec a, vec n) { MAGICPIG_EACH(vmulq_f32(a.r[i], power_of_two(n.r[i]))); }
inline vec select_less(vec a, vec b, vec if_less, vec otherwise) {
  MAGICPIG_EACH(vbslq_f32(vcltq_f32(a.r[i], b.r[i]), if_less.r[i], otherwise.r[i]));
}
inline float32x4_t lookup4(const float* table, int a, int b, int c, int d) {
  float values[4] = {table[a], table[b], table[c], table[d]};
  return vld1q_f32(values);
}
inline vec lookup(const float* table, vec index) {
  int i32[16];
  for (int i = 0; i < 4; ++i) vst1q_s32(i32 + 4 * i, vcvtq_s32_f32(index.r[i]));
  MAGICPIG_EACH(lookup4(table, i32[4 * i], i32[4 * i + 1], i32[4 * i + 2], i32[4 * i + 3]));
}
inline vec lookup(const float* table, const uint16_t* ids) {
  MAGICPIG_EACH(lookup4(table, ids[4 * i], ids[4 * i + 1], ids[4 * i + 2], ids[4 * i + 3]));
}
#undef MAGICPIG_EACH
inline bool any_greater(vec a, vec b) {
  uint32x4_t any = vcgtq_f32(a.r[0], b.r[0]);
  for (int i = 1; i < 4; ++i) any = vorrq_u32(any, vcgtq_f32(a.r[i], b.r[i]));
  return vmaxvq_u32(any) != 0;
}
inline uint16_t sign_bits(vec a) {
  static const uint32_t kWeights[4] = {1, 2, 4, 8};
  uint32_t bits = 0;
  for (int i = 0; i < 4; ++i) bits |= vaddvq_u32(vandq_u32(vcgezq_f32(a.r[i]), vld1q_u32(kWeights))) << (4 * i);
  return static_cast<uint16_t>(bits);
}
inline float32x4_t sum_of_quarters(vec a) { return vaddq_f32(vaddq_f32(a.r[0], a.r[1]), vaddq_f32(a.r[2], a.r[3])); }
inline float sum(vec a) { return vaddvq_f32(sum_of_quarters(a)); }
inline float largest(vec a) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.r[0], a.r[1]), vmaxq_f32(a.r[2], a.r[3]))); }
inline void sum4(vec a, vec b, vec c, vec d, float* out) {
  float32x4_t ab = vpaddq_f32(sum_of_quarters(a), sum_of_quarters(b));
  float32x4_t cd = vpaddq_f32(sum_of_quarters(c), sum_of_quarters(d));
  vst1q_f32(out, vpaddq_f32(ab, cd));
}

// Sixteen 32-bit integers.
struct ivec {
  uint32x4_t r[4];
};
#define MAGICPIG_EACH(expression)                    \
  ivec out;                                          \
  for (int i = 0; i < 4; ++i) out.r[i] = expression; \
  return out
inline ivec iset1(uint32_t x) { MAGICPIG_EACH(vdupq_n_u32(x)); }
inline ivec iload(const void* p) {
  MAGICPIG_EACH(vreinterpretq_u32_u8(vld1q_u8(static_cast<const uint8_t*>(p) + 16 * i)));
}
inline void istore(void* p, ivec x) {
  for (int i = 0; i < 4; ++i) vst1q_u8(static_cast<uint8_t*>(p) + 16 * i, vreinterpretq_u8_u32(x.r[i]));
}
inline ivec iota() {
  static const uint32_t kFirst[4] = {0, 1, 2, 3};
  MAGICPIG_EACH(vaddq_u32(vld1q_u32(kFirst), vdupq_n_u32(4 * i)));
}
inline ivec iadd(ivec a, ivec b) { MAGICPIG_EACH(vaddq_u32(a.r[i], b.r[i])); }
inline ivec imul(ivec a, ivec b) { MAGICPIG_EACH(vmulq_u32(a.r[i], b.r[i])); }
inline ivec iand(ivec a, ivec b) { MAGICPIG_EACH(vandq_u32(a.r[i], b.r[i])); }
inline ivec ior(ivec a, ivec b) { MAGICPIG_EACH(vorrq_u32(a.r[i], b.r[i])); }
inline ivec ixor(ivec a, ivec b) { MAGICPIG_EACH(veorq_u32(a.r[i], b.r[i])); }
template <int N>
inline ivec shift_right(ivec a) {
  if constexpr (N == 0) return a;
  MAGICPIG_EACH(vshrq_n_u32(a.r[i], N ? N : 1));
}
inline ivec to_int(vec a) { MAGICPIG_EACH(vreinterpretq_u32_s32(vcvtnq_s32_f32(a.r[i]))); }  // rounded
inline ivec bits_of_float(vec a) { MAGICPIG_EACH(vreinterpretq_u32_f32(a.r[i])); }
inline int16x8_t pair_sums(uint32x4_t codes, uint32x4_t query) {
  int8x16_t x = vreinterpretq_s8_u32(codes), y = vreinterpretq_s8_u32(query);
  return vpaddq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(y)), vmull_high_s8(x, y));
}
// acc + the products of four unsigned bytes, below 16, with four signed ones, in each lane.
inline ivec dot4(ivec acc, ivec codes, ivec query) {
  MAGICPIG_EACH(vreinterpretq_u32_s32(vpadalq_s16(vreinterpretq_s32_u32(acc.r[i]), pair_sums(codes.r[i], query.r[i]))));
}
#undef MAGICPIG_EACH
inline vec to_float(ivec a) {
  vec out;
  for (int i = 0; i < 4; ++i) out.r[i] = vcvtq_f32_s32(vreinterpretq_s32_u32(a.r[i]));
  return out;
}
inline vec float_of_bits(ivec a) {
  vec out;
  for (int i = 0; i < 4; ++i) out.r[i] = vreinterpretq_f32_u32(a.r[i]);
  return out;
}

// out[j][i] = in[i][j] of sixteen rows of sixteen, `stride` apart.
inline void transpose(const float* in, size_t stride, float* out) {
  for (size_t i = 0; i < 16; ++i)
    for (size_t j = 0; j < 16; ++j) out[16 * j + i] = in[i * stride + j];
}

}  // namespace
}  // namespace magicpig
