// Functions of sixteen floats, and the row products in float32. Included by kernels.cpp only.
#pragma once

namespace magicpig {
namespace {

// A number that is a type.
template <int N>
struct Constant {
  static constexpr int value = N;
};

// exp(x) for x <= 88; relative error below 2e-7 where the result is a normal number, exactly 0 below -87.33 (the last
// argument whose result is normal), 1 at 0, NaN for NaN.
inline vec exp(vec x) {
  vec bounded = max(set1(-87.33f), min(set1(88.0f), x));  // constants first: NaN passes through
  vec n = round(mul(bounded, set1(1.44269504089f)));
  vec r = fma(n, set1(-0.693359375f), bounded);  // ln 2 in two parts, so that n ln 2 is exact enough
  r = fma(n, set1(2.12194440e-4f), r);
  vec p = fma(set1(1.9875691500e-4f), r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(mul(p, r), r, r), set1(1.0f));
  return select_less(x, set1(-87.33f), zero(), times_power_of_two(p, n));
}

// tanh(x); absolute error below 3e-7.
inline vec tanh(vec x) {
  vec t = exp(mul(abs(x), set1(-2.0f)));
  vec magnitude = div(sub(set1(1.0f), t), add(set1(1.0f), t));
  return select_less(x, zero(), sub(zero(), magnitude), magnitude);
}

// acos(x) / pi for x in [-1, 1]; absolute error below 1e-7 (polynomial 4.4.46 of Abramowitz and Stegun).
inline vec angle_over_pi(vec x) {
  vec y = abs(x);
  vec p = fma(set1(-0.0012624911f), y, set1(0.0066700901f));
  p = fma(p, y, set1(-0.0170881256f));
  p = fma(p, y, set1(0.0308918810f));
  p = fma(p, y, set1(-0.0501743046f));
  p = fma(p, y, set1(0.0889789874f));
  p = fma(p, y, set1(-0.2145988016f));
  p = fma(p, y, set1(1.5707963050f));
  vec t = mul(mul(p, sqrt(sub(set1(1.0f), y))), set1(0.318309886f));
  return select_less(x, zero(), sub(set1(1.0f), t), t);
}

// log u of sixteen rows from their raw products q.k; 0 for keys at the mean, which are always drawn.
inline vec log_inclusion(const Inclusion& inclusion, vec products, const uint16_t* ids) {
  vec inv_norms = lookup(inclusion.inv_norms, ids);
  vec cosine = mul(sub(products, set1(inclusion.query_dot_mean)), mul(inv_norms, set1(inclusion.inv_query_norm)));
  cosine = min(max(cosine, set1(-1.0f)), set1(1.0f));
  vec t = mul(angle_over_pi(cosine), set1(static_cast<float>(kLogUIntervals)));
  vec left = floor(t);
  vec low = lookup(inclusion.log_u, left);
  vec high = lookup(inclusion.log_u + 1, left);
  return select_less(zero(), inv_norms, fma(sub(t, left), sub(high, low), low), zero());
}

constexpr int kBlock = 32;  // rows taken together; a multiple of 16

// Rows whose memory is asked for while others are computed with: a few cache lines at a time, so that the requests
// neither queue up nor run dry. They go to the second-level cache; the first has too few miss buffers to keep memory
// busy.
template <class T>
struct Ahead {
  Ahead(const T* const* rows, int count, size_t row_bytes) : rows_(rows), end_(rows + count), row_bytes_(row_bytes) {}

  void step(int lines) {
    if (rows_ == end_) return;
    const char* line = reinterpret_cast<const char*>(*rows_) + byte_;
    for (int i = 0; i < lines; ++i) __builtin_prefetch(line + 64 * i, 0, 2);  // past a row's end now and then: harmless
    byte_ += 64 * lines;
    if (byte_ >= row_bytes_) {
      byte_ = 0;
      ++rows_;
    }
  }
  void finish() {
    while (rows_ != end_) step(4);
  }

 private:
  const T *const *rows_, *const *end_;
  size_t row_bytes_, byte_ = 0;
};

// Products of rows with queries and weights with rows, in float32 whatever the rows' type.
template <class T>
struct Products {
  using Weight = float;

  // scores[h][r] = q_h . key_r for r < count, a multiple of 4.
  template <int H>
  static void dots(const T* const* rows, int count, uint32_t dim, const Queries& queries, float (*scores)[kBlock],
                   Ahead<T>& ahead) {
    for (int r = 0; r < count; r += 4) {
      vec acc[4][H];
      for (int i = 0; i < 4; ++i)
        for (int h = 0; h < H; ++h) acc[i][h] = zero();
      for (uint32_t c = 0; c < dim; c += kChunk) {
        vec query[H];
        for (int h = 0; h < H; ++h) query[h] = load(queries.values + h * dim + c);
        for (int i = 0; i < 4; ++i) {
          vec key = load(rows[r + i] + c);
          for (int h = 0; h < H; ++h) acc[i][h] = fma(key, query[h], acc[i][h]);
        }
        ahead.step(2);
      }
      for (int h = 0; h < H; ++h) sum4(acc[0][h], acc[1][h], acc[2][h], acc[3][h], scores[h] + r);
    }
  }

  // Stores weights as the product will use them and returns what was stored.
  static vec keep(Weight* weights, vec p) {
    store(weights, p);
    return p;
  }

  // out_h += sum_r weights[h][r] value_r.
  template <int H>
  static void accumulate(const T* const* rows, int count, uint32_t dim, const Weight (*weights)[kBlock],
                         PartialState* states, Ahead<T>& ahead) {
    uint32_t c = 0;
    for (; c + 4 * kChunk <= dim; c += 4 * kChunk) chunks<H, 4>(rows, count, dim, c, weights, states, ahead);
    for (; c < dim; c += kChunk) chunks<H, 1>(rows, count, dim, c, weights, states, ahead);
  }

  static void finish(float*, uint32_t) {}

 private:
  template <int H, int C>
  static void chunks(const T* const* rows, int count, uint32_t dim, uint32_t offset, const Weight (*weights)[kBlock],
                     PartialState* states, Ahead<T>& ahead) {
    vec acc[H][C];
    for (int h = 0; h < H; ++h)
      for (int c = 0; c < C; ++c) acc[h][c] = load(states[h].out + offset + c * kChunk);
    for (int r = 0; r < count; ++r) {
      const T* value = rows[r] + dim + offset;
      vec weight[H];
      for (int h = 0; h < H; ++h) weight[h] = set1(weights[h][r]);
      for (int c = 0; c < C; ++c) {
        vec v = load(value + c * kChunk);
        for (int h = 0; h < H; ++h) acc[h][c] = fma(v, weight[h], acc[h][c]);
      }
      ahead.step(2);
    }
    for (int h = 0; h < H; ++h)
      for (int c = 0; c < C; ++c) store(states[h].out + offset + c * kChunk, acc[h][c]);
  }
};

}  // namespace
}  // namespace magicpig
