// Sixteen floats in an array: the form every compiler and machine understands.
#pragma once

#include <string.h>

#include "kernels.h"

namespace magicpig {
namespace {

struct vec {
  float x[16];
};
constexpr int kHeadTile = 1;
constexpr int kHashRows = 2;
constexpr int kHashGroups = 1;
constexpr int kLinearRows = 2;  // register tile of linear layers
constexpr int kLinearPanels = 1;
constexpr float kZeroPower = -127;  // times_power_of_two gives 0

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}
inline float to_float(f16 x) {
  uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, exponent = (x.bits >> 10) & 31,
           fraction = x.bits & 0x3ff;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000u | fraction << 13;
  } else if (exponent != 0) {
    bits = sign | (exponent + 112) << 23 | fraction << 13;
  } else {  // subnormal: fraction * 2^-24, exact in float
    float magnitude = static_cast<float>(fraction) * 5.9604644775390625e-8f;
    return sign ? -magnitude : magnitude;
  }
  float out;
  memcpy(&out, &bits, 4);
  return out;
}
inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline void from_float(float x, float& out) { out = x; }
inline void from_float(float x, bf16& out) {  // round to nearest even; NaN stays NaN
  uint32_t bits = bits_of(x);
  out.bits = static_cast<uint16_t>(x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void from_float(float x, f16& out) {
  uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffffu, half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00;  // NaN
  } else if (magnitude >= 0x477ff000u) {
    half = 0x7c00;  // rounds beyond 65504: infinity
  } else if (magnitude >= 0x38800000u) {
    half = (magnitude - 0x38000000u + 0xfff + (magnitude >> 13 & 1)) >> 13;
  } else {  // subnormal: let the float adder round at 2^-24
    float shifted;
    memcpy(&shifted, &magnitude, 4);
    half = bits_of(shifted + 0.5f) - 0x3f000000u;
  }
  out.bits = static_cast<uint16_t>(sign | half);
}

#define MAGICPIG_EACH(expression)                     \
  vec out;                                            \
  for (int i = 0; i < 16; ++i) out.x[i] = expression; \
  return out
inline vec set1(float x) { MAGICPIG_EACH(x); }
inline vec zero() { return set1(0.0f); }
template <class T>
inline vec load(const T* p) {
  MAGICPIG_EACH(to_float(p[i]));
}
inline void load_pairs(const bf16* p, vec& first, vec& second) {
  for (int i = 0; i < 16; ++i) {
    first.x[i] = to_float(p[2 * i]);
    second.x[i] = to_float(p[2 * i + 1]);
  }
}
template <class T>
inline void store(T* p, vec v) {
  for (int i = 0; i < 16; ++i) from_float(v.x[i], p[i]);
}
inline vec add(vec a, vec b) { MAGICPIG_EACH(a.x[i] + b.x[i]); }
inline vec sub(vec a, vec b) { MAGICPIG_EACH(a.x[i] - b.x[i]); }
inline vec mul(vec a, vec b) { MAGICPIG_EACH(a.x[i] * b.x[i]); }
inline vec div(vec a, vec b) { MAGICPIG_EACH(a.x[i] / b.x[i]); }
inline vec fma(vec a, vec b, vec c) { MAGICPIG_EACH(a.x[i] * b.x[i] + c.x[i]); }
inline vec min(vec a, vec b) { MAGICPIG_EACH(a.x[i] < b.x[i] ? a.x[i] : b.x[i]); }  // b when either is NaN
inline vec max(vec a, vec b) { MAGICPIG_EACH(a.x[i] > b.x[i] ? a.x[i] : b.x[i]); }  // b when either is NaN
inline vec abs(vec a) { MAGICPIG_EACH(__builtin_fabsf(a.x[i])); }
inline vec sqrt(vec a) { MAGICPIG_EACH(__builtin_sqrtf(a.x[i])); }
inline vec round(vec a) { MAGICPIG_EACH((a.x[i] + 12582912.0f) - 12582912.0f); }          // for |x| < 2^22
inline vec floor(vec a) { MAGICPIG_EACH(static_cast<float>(static_cast<int>(a.x[i]))); }  // for 0 <= x < 2^31
inline float power_of_two(float n) {
  uint32_t bits = static_cast<uint32_t>(static_cast<int>(n == n ? n : 0) + 127) << 23;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}
inline vec times_power_of_two(vec a, vec n) { MAGICPIG_EACH(a.x[i] * power_of_two(n.x[i])); }
inline vec select_less(vec a, vec b, vec if_less, vec otherwise) {
  MAGICPIG_EACH(a.x[i] < b.x[i] ? if_less.x[i] : otherwise.x[i]);
}
inline vec lookup(const float* table, vec index) { MAGICPIG_EACH(table[static_cast<int>(index.x[i])]); }
inline vec lookup(const float* table, const uint16_t* ids) { MAGICPIG_EACH(table[ids[i]]); }
#undef MAGICPIG_EACH
inline bool any_greater(vec a, vec b) {
  bool any = false;
  for (int i = 0; i < 16; ++i) any |= a.x[i] > b.x[i];
  return any;
}
inline uint16_t sign_bits(vec a) {
  uint32_t bits = 0;
  for (int i = 0; i < 16; ++i) bits |= static_cast<uint32_t>(a.x[i] >= 0) << i;
  return static_cast<uint16_t>(bits);
}
inline float sum(vec a) {
  float total = 0;
  for (int i = 0; i < 16; ++i) total += a.x[i];
  return total;
}
inline float largest(vec a) {
  float best = a.x[0];
  for (int i = 1; i < 16; ++i) best = a.x[i] > best ? a.x[i] : best;
  return best;
}
inline void sum4(vec a, vec b, vec c, vec d, float* out) {
  out[0] = sum(a);
  out[1] = sum(b);
  out[2] = sum(c);
  out[3] = sum(d);
}

// Sixteen 32-bit integers.
struct ivec {
  uint32_t x[16];
};
#define MAGICPIG_EACH(expression)                     \
  ivec out;                                           \
  for (int i = 0; i < 16; ++i) out.x[i] = expression; \
  return out
inline ivec iset1(uint32_t x) { MAGICPIG_EACH(x); }
inline ivec iload(const void* p) {
  ivec out;
  memcpy(out.x, p, sizeof out.x);
  return out;
}
inline void istore(void* p, ivec x) { memcpy(p, x.x, sizeof x.x); }
inline ivec iota() { MAGICPIG_EACH(static_cast<uint32_t>(i)); }
inline ivec iadd(ivec a, ivec b) { MAGICPIG_EACH(a.x[i] + b.x[i]); }
inline ivec imul(ivec a, ivec b) { MAGICPIG_EACH(a.x[i] * b.x[i]); }
inline ivec iand(ivec a, ivec b) { MAGICPIG_EACH(a.x[i] & b.x[i]); }
inline ivec ior(ivec a, ivec b) { MAGICPIG_EACH(a.x[i] | b.x[i]); }
inline ivec ixor(ivec a, ivec b) { MAGICPIG_EACH(a.x[i] ^ b.x[i]); }
template <int N>
inline ivec shift_right(ivec a) {
  MAGICPIG_EACH(a.x[i] >> N);
}
inline ivec to_int(vec a) { MAGICPIG_EACH(static_cast<uint32_t>(__builtin_lrintf(a.x[i]))); }  // rounded
inline ivec bits_of_float(vec a) { MAGICPIG_EACH(bits_of(a.x[i])); }
inline uint32_t dot4(uint32_t acc, uint32_t codes, uint32_t query) {
  for (int shift = 0; shift < 32; shift += 8)
    acc += (codes >> shift & 255) * static_cast<uint32_t>(static_cast<int8_t>(query >> shift & 255));
  return acc;
}
// acc + the products of four unsigned bytes, below 16, with four signed ones, in each lane.
inline ivec dot4(ivec acc, ivec codes, ivec query) { MAGICPIG_EACH(dot4(acc.x[i], codes.x[i], query.x[i])); }
#undef MAGICPIG_EACH
inline vec to_float(ivec a) {
  vec out;
  for (int i = 0; i < 16; ++i) out.x[i] = static_cast<float>(static_cast<int32_t>(a.x[i]));
  return out;
}
inline vec float_of_bits(ivec a) {
  vec out;
  memcpy(out.x, a.x, sizeof out.x);
  return out;
}

// out[j][i] = in[i][j] of sixteen rows of sixteen, `stride` apart.
inline void transpose(const float* in, size_t stride, float* out) {
  for (size_t i = 0; i < 16; ++i)
    for (size_t j = 0; j < 16; ++j) out[16 * j + i] = in[i * stride + j];
}

}  // namespace
}  // namespace magicpig
