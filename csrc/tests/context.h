// A random far context, attention to it, and the same by plain loops.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention.h"
#include "layer_kv.h"
#include "testing.h"

namespace magicpig {

struct Context {
  Geometry geometry;
  size_t tokens;
  std::vector<float> keys, values, queries;

  Context(Geometry g, size_t tokens)
      : geometry(g),
        tokens(tokens),
        keys(gaussian(g.num_kv_heads * tokens * g.head_dim, 1, 0.5f)),
        values(gaussian(g.num_kv_heads * tokens * g.head_dim, 2)),
        queries(gaussian(g.num_heads * g.head_dim, 3)) {}

  void append_to(LayerKV& kv, size_t first, size_t count) const {
    const size_t at = first * geometry.head_dim, stride = tokens * geometry.head_dim;
    kv.append({reinterpret_cast<const char*>(keys.data() + at), kF32, stride, geometry.head_dim, "keys"},
              {reinterpret_cast<const char*>(values.data() + at), kF32, stride, geometry.head_dim, "values"}, count);
  }
  const char* query_bytes() const { return reinterpret_cast<const char*>(queries.data()); }
  float key(size_t head, size_t token, size_t d) const { return keys[(head * tokens + token) * geometry.head_dim + d]; }
  float value(size_t head, size_t token, size_t d) const {
    return values[(head * tokens + token) * geometry.head_dim + d];
  }
};

struct Result {
  std::vector<float> out, lse;
  std::vector<int64_t> rows;
  std::vector<float> predicted;
};

inline Result run(const LayerKV& kv, const Context& context, bool exact) {
  const Geometry& g = kv.geometry();
  Result result{std::vector<float>(g.num_heads * g.head_dim, NAN), std::vector<float>(g.num_heads, NAN),
                std::vector<int64_t>(g.num_heads, -1), std::vector<float>(g.num_heads, -1)};
  const auto segments = kv.segments();
  attend(g, {runs_of(*segments)}, context.query_bytes(), kF32, {0.25f, 0}, exact,
         {result.out.data(), result.lse.data(), result.rows.data(), nullptr, result.predicted.data()});
  return result;
}

// Attention of `head` over the rows of a sample, in double.
inline void check_against_loops(const Context& context, const Result& result, size_t head, const Sample& sample,
                                double tolerance) {
  const Geometry& g = context.geometry;
  const size_t kv_head = head / g.group();
  std::vector<double> logits;
  double peak = -INFINITY;
  for (size_t i = 0; i < sample.rows.size(); ++i) {
    double dot = 0;
    for (uint32_t d = 0; d < g.head_dim; ++d)
      dot += double{context.queries[head * g.head_dim + d]} * context.key(kv_head, sample.rows[i], d);
    logits.push_back(dot * 0.25 - sample.log_probability[i]);
    peak = std::max(peak, logits.back());
  }
  double total = 0;
  std::vector<double> out(g.head_dim);
  for (size_t i = 0; i < logits.size(); ++i) {
    const double weight = std::exp(logits[i] - peak);
    total += weight;
    for (uint32_t d = 0; d < g.head_dim; ++d) out[d] += weight * context.value(kv_head, sample.rows[i], d);
  }
  CHECK(result.rows[head] == static_cast<int64_t>(sample.rows.size()));
  if (logits.empty()) {
    CHECK(result.lse[head] == -INFINITY);
  } else {
    CHECK(std::abs(result.lse[head] - (peak + std::log(total))) < tolerance);
  }
  for (uint32_t d = 0; d < g.head_dim; ++d) {
    CHECK(std::abs(result.out[head * g.head_dim + d] - (total > 0 ? out[d] / total : 0)) < tolerance);
  }
}

inline Sample everything(size_t tokens) {
  Sample sample;
  for (size_t i = 0; i < tokens; ++i) sample.rows.push_back(static_cast<int32_t>(i));
  sample.log_probability.assign(tokens, 0.0f);
  return sample;
}

// Rows of one sequence that a query of a layer draws.
inline std::vector<Sample> drawn_from(const LayerKV& kv, const Context& context) {
  const auto segments = kv.segments();
  return sample(kv.geometry(), runs_of(*segments), context.query_bytes(), kF32, 0.25f);
}

inline void check_sample(const Sample& sample, size_t tokens) {
  for (size_t i = 0; i < sample.rows.size(); ++i) {
    CHECK(sample.rows[i] >= 0 && static_cast<size_t>(sample.rows[i]) < tokens);
    CHECK(i == 0 || sample.rows[i - 1] < sample.rows[i]);
    CHECK(sample.log_probability[i] <= 0 && sample.log_probability[i] > -12);
  }
}

}  // namespace magicpig
