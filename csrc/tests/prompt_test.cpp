// Native tests of attention over prompts, made to run under sanitizers: every supported instruction set against plain
// loops in double, at sizes around the borders of tiles, groups and blocks; then many threads at once.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <thread>

#include "bf16_rows.h"
#include "dispatch.h"
#include "prompt_attention.h"
#include "threads.h"

using namespace magicpig;

namespace {

bf16 upper_half(float x) {  // of NaN too
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return {static_cast<uint16_t>(bits >> 16)};
}

struct Case {
  size_t num_heads, num_kv_heads, num_queries, num_tokens;
  uint32_t head_dim;
  float softcap = 0;
  size_t span = 0;
};

// Rows in memory of its exact size.
struct Rows {
  Case shape;
  std::vector<bf16> queries, keys, values;

  explicit Rows(const Case& shape)
      : shape(shape),
        queries(gaussian(shape.num_heads * shape.num_queries * shape.head_dim, 1)),
        keys(gaussian(shape.num_kv_heads * shape.num_tokens * shape.head_dim, 2)),
        values(gaussian(shape.num_kv_heads * shape.num_tokens * shape.head_dim, 3)) {}

  HeadsView view(const std::vector<bf16>& rows, size_t tokens) const {
    return {rows.data(), tokens * shape.head_dim, shape.head_dim};
  }
  Prompt prompt(bf16* out) const {
    return {view(queries, shape.num_queries),
            view(keys, shape.num_tokens),
            view(values, shape.num_tokens),
            shape.num_heads,
            shape.num_kv_heads,
            shape.num_queries,
            shape.num_tokens,
            shape.head_dim,
            0.3f,
            shape.softcap,
            shape.span,
            out};
  }
  std::vector<bf16> attended() const {
    std::vector<bf16> out(queries.size());
    attend(prompt(out.data()));
    return out;
  }
};

std::vector<double> plain(const Prompt& prompt, size_t query, size_t head) {
  const size_t kv_head = head / prompt.group();
  const bf16* q = prompt.queries.row(head, query);
  std::vector<double> scores, out(prompt.head_dim);
  for (size_t t = prompt.begin(query); t < prompt.end(query); ++t) {
    double score = 0;
    for (uint32_t c = 0; c < prompt.head_dim; ++c) score += value(q[c]) * value(prompt.keys.row(kv_head, t)[c]);
    score *= prompt.scale;
    scores.push_back(prompt.softcap > 0 ? prompt.softcap * std::tanh(score / prompt.softcap) : score);
  }
  const double peak = *std::max_element(scores.begin(), scores.end());
  double total = 0;
  for (double& score : scores) total += score = std::exp(score - peak);
  for (size_t i = 0; i < scores.size(); ++i)
    for (uint32_t c = 0; c < prompt.head_dim; ++c)
      out[c] += scores[i] / total * value(prompt.values.row(kv_head, prompt.begin(query) + i)[c]);
  return out;
}

void test_prompts() {
  const Case cases[] = {
      {1, 1, 1, 1, 8},
      {2, 1, 5, 5, 16},
      {3, 1, 7, 40, 24},
      {4, 2, 13, 33, 64},
      {8, 1, 20, 300, 40},
      {2, 2, 50, 257, 80},
      {3, 3, 9, 64, 256},
      {6, 2, 30, 100, 32, 2.0f},
      {4, 1, 40, 90, 16, 0, 1},
      {4, 1, 40, 90, 16, 0, 33},
      {2, 1, 40, 90, 16, 3.0f, 1000},
      {1, 1, 600, 2100, 8},
  };
  for (const std::string& isa : tested_isas()) {
    set_isa(isa);
    for (const Case& shape : cases) {
      const Rows rows(shape);
      std::vector<bf16> out(rows.queries.size());
      const Prompt prompt = rows.prompt(out.data());
      attend(prompt);
      for (size_t query = 0; query < shape.num_queries; query += 1 + shape.num_queries / 40) {
        for (size_t head = 0; head < shape.num_heads; ++head) {
          const std::vector<double> truth = plain(prompt, query, head);
          const bf16* row = out.data() + (query * shape.num_heads + head) * shape.head_dim;
          for (uint32_t c = 0; c < shape.head_dim; ++c) CHECK(std::abs(value(row[c]) - truth[c]) < 0.02);
        }
      }
    }
  }
}

void test_threads_do_not_matter() {
  const Rows rows({6, 2, 60, 400, 32, 0, 300});
  for (const std::string& isa : tested_isas()) {
    set_isa(isa);
    set_num_threads(1);
    const std::vector<bf16> alone = rows.attended();
    set_num_threads(3);
    const std::vector<bf16> together = rows.attended();
    CHECK(std::memcmp(alone.data(), together.data(), alone.size() * sizeof(bf16)) == 0);
  }
}

// Whatever the rows hold, nothing undefined happens, and what is not finite shows.
void test_nan_and_infinity() {
  for (const std::string& isa : tested_isas()) {
    set_isa(isa);
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(), 3e38f}) {
      for (const float softcap : {0.0f, 5.0f}) {
        Rows rows({2, 1, 40, 80, 16, softcap});
        for (std::vector<bf16>* part : {&rows.queries, &rows.keys, &rows.values})
          for (size_t c = 0; c < 16; ++c) (*part)[10 * 16 + c] = upper_half(bad);
        const std::vector<bf16> out = rows.attended();
        if (std::isfinite(bad)) continue;
        for (size_t i = 0; i < 16; ++i) CHECK(!std::isfinite(value(out[10 * 2 * 16 + i])));
      }
    }
  }
}

void test_concurrency() {
  const Rows rows({4, 2, 30, 200, 32});
  const std::vector<bf16> truth = rows.attended();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < 20; ++i) {
        const std::vector<bf16> out = rows.attended();
        CHECK(std::memcmp(out.data(), truth.data(), truth.size() * sizeof(bf16)) == 0);
        if (t == 0) set_num_threads(1 + i % 3);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
  set_num_threads(2);
  test_prompts();
  test_threads_do_not_matter();
  test_nan_and_infinity();
  test_concurrency();
  std::printf("%d checks on %zu instruction sets passed\n", checks.load(), tested_isas().size());
}
