// Root-mean-square normalisation of bf16 rows. Included by kernels.cpp only.
#pragma once

namespace magicpig {
namespace {

inline vec load_some(const bf16* p, size_t count) {  // zeros behind the last
  if (count >= kChunk) return load(p);
  bf16 padded[kChunk] = {};
  memcpy(padded, p, count * sizeof(bf16));
  return load(padded);
}

inline vec rounded_to_bf16(vec x) {
  bf16 rounded[kChunk];
  store(rounded, x);
  return load(rounded);
}

void rms_norm(const bf16* x, size_t rows, size_t dim, const bf16* weight, NormScale scale, float eps, bf16* out) {
  constexpr size_t kSums = 4;
  for (size_t r = 0; r < rows; ++r, x += dim, out += dim) {
    vec squares[kSums] = {zero(), zero(), zero(), zero()};
    for (size_t c = 0; c < dim; c += kSums * kChunk) {
      for (size_t i = 0; i < kSums && c + i * kChunk < dim; ++i) {
        vec value = load_some(x + c + i * kChunk, dim - c - i * kChunk);
        squares[i] = fma(value, value, squares[i]);
      }
    }
    const float mean = sum(add(add(squares[0], squares[1]), add(squares[2], squares[3]))) / static_cast<float>(dim);
    const vec inv_rms = set1(1.0f / __builtin_sqrtf(mean + eps));
    for (size_t c = 0; c < dim; c += kChunk) {
      vec normed = mul(load_some(x + c, dim - c), inv_rms), factor = load_some(weight + c, dim - c);
      if (scale == kTimesWeight) {
        normed = rounded_to_bf16(normed);
      } else {
        factor = add(factor, set1(1.0f));
      }
      store_some(out + c, mul(normed, factor), dim - c);
    }
  }
}

}  // namespace
}  // namespace magicpig
