// What an index is built from: packed rows, centred keys, signs of projections. Included by kernels.cpp only.
#pragma once

namespace magicpig {
namespace {

template <class S, class T>
constexpr bool kSame = false;
template <class T>
constexpr bool kSame<T, T> = true;

template <class S, class T>
size_t pack(const void* source, size_t source_stride, size_t count, uint32_t head_dim, void* out_rows,
            size_t out_stride, uint32_t dim) {
  size_t first_bad = count;
  for (size_t r = 0; r < count; ++r) {
    const S* in = static_cast<const S*>(source) + r * source_stride;
    T* out = static_cast<T*>(out_rows) + r * out_stride;
    vec squares = zero(), others = zero();  // two, so that one need not wait for the other
    const auto take = [&](uint32_t c, const S* from, vec& total) {
      const vec value = load(from);
      store(out + c, value);
      const vec stored = kSame<S, T> ? value : load(out + c);
      total = fma(stored, stored, total);
    };
    uint32_t c = 0;
    for (; c + 2 * kChunk <= head_dim; c += 2 * kChunk) {
      take(c, in + c, squares);
      take(c + kChunk, in + c + kChunk, others);
    }
    for (; c < dim; c += kChunk) {
      S padded[kChunk] = {};
      memcpy(padded, in + c, (c + kChunk <= head_dim ? kChunk : head_dim - c) * sizeof(S));
      take(c, padded, squares);
    }
    if (!(sum(add(squares, others)) <= kMaxSquaredNorm) && first_bad == count)
      first_bad = r;  // NaN fails the comparison too
  }
  return first_bad;
}

template <class T>
void add_rows(const void* rows, size_t count, uint32_t dim, uint32_t size, float* sums) {
  for (size_t r = 0; r < count; ++r) {
    const T* row = static_cast<const T*>(rows) + r * 2 * dim;
    for (uint32_t c = 0; c < size; c += kChunk) store(sums + c, add(load(sums + c), load(row + c)));
  }
}

template <class T>
void centre(const void* rows, size_t count, uint32_t dim, const float* mean, float tolerance, float* centred,
            float* inv_norms) {
  for (size_t r = 0; r < count; ++r) {
    const T* key = static_cast<const T*>(rows) + r * 2 * dim;
    float* out = centred + r * dim;
    vec squares = zero();
    for (uint32_t c = 0; c < dim; c += kChunk) {
      vec difference = sub(load(key + c), load(mean + c));
      store(out + c, difference);
      squares = fma(difference, difference, squares);
    }
    float norm = __builtin_sqrtf(sum(squares));
    if (norm > tolerance) {
      inv_norms[r] = 1.0f / norm;
    } else {
      inv_norms[r] = 0;
      for (uint32_t c = 0; c < dim; c += kChunk) store(out + c, zero());
    }
  }
}

#ifdef MAGICPIG_BF16_DOT
using HashInput = bf16;
template <int R, int G>
inline void project(const bf16* x, uint32_t dim, const bf16* panels, vec (&acc)[R][G]) {
  const size_t group_stride = static_cast<size_t>(dim) * kChunk;
  for (uint32_t pair = 0; pair < dim / 2; ++pair) {
    __m512i columns[G];
    for (int g = 0; g < G; ++g) columns[g] = _mm512_loadu_si512(panels + g * group_stride + pair * 2 * kChunk);
    for (int r = 0; r < R; ++r) {
      __m512i input = load_pair(x + r * dim + 2 * pair);
      for (int g = 0; g < G; ++g) acc[r][g] = dot2(acc[r][g], columns[g], input);
    }
  }
}
#else
using HashInput = float;
template <int R, int G>
inline void project(const float* x, uint32_t dim, const bf16* panels, vec (&acc)[R][G]) {
  const size_t group_stride = static_cast<size_t>(dim) * kChunk;
  for (uint32_t pair = 0; pair < dim / 2; ++pair) {
    vec first[G], second[G];
    for (int g = 0; g < G; ++g) load_pairs(panels + g * group_stride + pair * 2 * kChunk, first[g], second[g]);
    for (int r = 0; r < R; ++r) {
      vec a = set1(x[r * dim + 2 * pair]), b = set1(x[r * dim + 2 * pair + 1]);
      for (int g = 0; g < G; ++g) acc[r][g] = fma(b, second[g], fma(a, first[g], acc[r][g]));
    }
  }
}
#endif

template <int R, int G>
inline void hash_tile(const HashInput* x, int valid_rows, uint32_t dim, const bf16* panels, uint16_t* bits,
                      size_t bits_stride) {
  vec acc[R][G];
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < G; ++g) acc[r][g] = zero();
  project<R, G>(x, dim, panels, acc);
  for (int g = 0; g < G; ++g)
    for (int r = 0; r < R; ++r)
      if (r < valid_rows) bits[g * bits_stride + r] = sign_bits(acc[r][g]);
}

void hash(const float* x, size_t count, uint32_t dim, const bf16* panels, uint32_t num_groups, uint16_t* bits,
          size_t bits_stride, float* scratch) {
  // Inputs are rounded to bf16, on every machine alike; rows beyond the last fill up a register tile and are not
  // written.
  HashInput* inputs = reinterpret_cast<HashInput*>(scratch);
  const size_t padded = (count + kHashRows - 1) / kHashRows * kHashRows;
  for (size_t r = 0; r < padded; ++r) {
    for (uint32_t c = 0; c < dim; c += kChunk) {
      bf16 rounded[kChunk];
      store(rounded, r < count ? load(x + r * dim + c) : zero());
#ifdef MAGICPIG_BF16_DOT
      memcpy(inputs + r * dim + c, rounded, sizeof rounded);
#else
      store(inputs + r * dim + c, load(rounded));
#endif
    }
  }
  const size_t group_size = static_cast<size_t>(dim) * kChunk;
  for (uint32_t group = 0; group < num_groups;) {
    const bool full = group + kHashGroups <= num_groups;
    for (size_t r = 0; r < count; r += kHashRows) {
      const int valid = count - r < kHashRows ? static_cast<int>(count - r) : kHashRows;
      uint16_t* out = bits + group * bits_stride + r;
      if (full) {
        hash_tile<kHashRows, kHashGroups>(inputs + r * dim, valid, dim, panels + group * group_size, out, bits_stride);
      } else {
        hash_tile<kHashRows, 1>(inputs + r * dim, valid, dim, panels + group * group_size, out, bits_stride);
      }
    }
    group += full ? kHashGroups : 1;
  }
}

}  // namespace
}  // namespace magicpig
