// Native tests without Python, made to run under sanitizers: every kernel of every supported instruction set against
// plain loops in double, at sizes around the borders of vectors, blocks and segments; then many threads at once.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "attention.h"
#include "chosen.h"
#include "codes.h"
#include "dispatch.h"
#include "layer_kv.h"
#include "queries.h"
#include "roofs.h"
#include "testing.h"
#include "threads.h"

using namespace magicpig;

namespace {

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

Result run(const LayerKV& kv, const Context& context, bool exact) {
  const Geometry& g = kv.geometry();
  Result result{std::vector<float>(g.num_heads * g.head_dim, NAN), std::vector<float>(g.num_heads, NAN),
                std::vector<int64_t>(g.num_heads, -1), std::vector<float>(g.num_heads, -1)};
  const auto segments = kv.segments();
  attend(g, {runs_of(*segments)}, context.query_bytes(), kF32, {0.25f, 0}, exact,
         {result.out.data(), result.lse.data(), result.rows.data(), nullptr, result.predicted.data()});
  return result;
}

// Attention of `head` over the rows of a sample, in double.
void check_against_loops(const Context& context, const Result& result, size_t head, const Sample& sample,
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

Sample everything(size_t tokens) {
  Sample sample;
  for (size_t i = 0; i < tokens; ++i) sample.rows.push_back(static_cast<int32_t>(i));
  sample.log_probability.assign(tokens, 0.0f);
  return sample;
}

void test_attention() {
  for (const std::string& isa : supported_isas()) {
    set_isa(isa);
    for (RowType type : {kBF16, kF16, kF32}) {
      const double tolerance = isa == "avx512_bf16" && type == kBF16 ? 1e-2 : 2e-5;
      for (uint32_t head_dim : {8u, 24u, 64u, 80u, 128u, 256u}) {
        const auto lsh = make_lsh(3, 12, 2, head_dim);
        for (size_t tokens : {0, 1, 15, 16, 17, 33, 129}) {
          for (uint32_t group : {1u, 3u, 4u, 6u}) {
            const Context context(Geometry{2 * group, 2, head_dim, type, lsh, nullptr, 0}, tokens);
            LayerKV kv(context.geometry);
            context.append_to(kv, 0, tokens);
            const Result exact = run(kv, context, true), sampled = run(kv, context, false);
            const std::vector<Sample> samples =
                sample(context.geometry, runs_of(*kv.segments()), context.query_bytes(), kF32, 0.25f);
            for (size_t head = 0; head < 2 * group; ++head) {
              check_against_loops(context, exact, head, everything(tokens), tolerance);
              check_against_loops(context, sampled, head, samples[head], tolerance);
            }
          }
        }
      }
    }
  }
}

// Row ids drawn from a segment of the largest size reach its last row; longer input is split.
void test_segment_borders() {
  const size_t tokens = Segment::kMaxTokens + 5;
  for (const std::string& isa : supported_isas()) {
    set_isa(isa);
    for (RowType type : {kBF16, kF16, kF32}) {
      const Context context(Geometry{1, 1, 8, type, make_lsh(1, 2, 1, 8), nullptr, 0}, tokens);
      LayerKV kv(context.geometry);
      context.append_to(kv, 0, tokens);
      CHECK(kv.segments()->size() == 2 && num_tokens(*kv.segments()) == tokens);
      const std::vector<Sample> samples =
          sample(context.geometry, runs_of(*kv.segments()), context.query_bytes(), kF32, 0.25f);
      const std::vector<int32_t>& rows = samples[0].rows;
      const auto is_late = [](int32_t row) { return row > 65'500 && row < 65'536; };
      CHECK(std::count_if(rows.begin(), rows.end(), is_late) > 0 && rows.back() >= 65'536);
      check_against_loops(context, run(kv, context, false), 0, samples[0], 1e-2);
    }
  }
}

// Rows of one sequence that a query of a layer draws.
std::vector<Sample> drawn_from(const LayerKV& kv, const Context& context) {
  const auto segments = kv.segments();
  return sample(kv.geometry(), runs_of(*segments), context.query_bytes(), kF32, 0.25f);
}

void check_sample(const Sample& sample, size_t tokens) {
  for (size_t i = 0; i < sample.rows.size(); ++i) {
    CHECK(sample.rows[i] >= 0 && static_cast<size_t>(sample.rows[i]) < tokens);
    CHECK(i == 0 || sample.rows[i - 1] < sample.rows[i]);
    CHECK(sample.log_probability[i] <= 0 && sample.log_probability[i] > -12);
  }
}

// Codes of all widths, at lengths around blocks, tiles of blocks and what one task codes; all tiles of heads.
void test_scan() {
  for (const std::string& isa : supported_isas()) {
    set_isa(isa);
    for (uint32_t bits : {1u, 2u, 4u}) {
      for (uint32_t head_dim : {8u, 16u, 24u, 64u, 80u, 128u, 256u}) {
        const auto scan = make_scan(bits, 0.1f, 2, head_dim);
        uint32_t group = 1;
        for (size_t tokens : {1, 15, 16, 17, 33, 63, 65, 129, 193, 500}) {
          const RowType type = static_cast<RowType>(tokens % 3);
          const double tolerance = isa == "avx512_bf16" && type == kBF16 ? 1e-2 : 5e-5;
          const Context context(Geometry{2 * group, 2, head_dim, type, nullptr, scan, 0}, tokens);
          LayerKV kv(context.geometry);
          context.append_to(kv, 0, tokens);
          const Result result = run(kv, context, false);
          const std::vector<Sample> samples = drawn_from(kv, context);
          for (size_t head = 0; head < 2 * group; ++head) {
            check_sample(samples[head], tokens);
            check_against_loops(context, result, head, samples[head], tolerance);
          }
          group = group % 9 + 1;
        }
      }
    }
  }
}

// A budget of everything reads everything, as one that is smaller does not.
void test_scan_budget() {
  for (const std::string& isa : supported_isas()) {
    set_isa(isa);
    for (float budget : {1.0f, 0.05f}) {
      const size_t tokens = 3000;
      const Context context(Geometry{4, 1, 32, kF32, nullptr, make_scan(2, budget, 0, 32), 0}, tokens);
      LayerKV kv(context.geometry);
      context.append_to(kv, 0, tokens);
      const Result result = run(kv, context, false);
      for (size_t head = 0; head < 4; ++head) {
        if (budget == 1) check_against_loops(context, result, head, everything(tokens), 1e-4);
        CHECK(std::abs(static_cast<float>(result.rows[head]) / tokens - budget) < 0.3f * budget);
      }
    }
  }
}

// Around the ends of tasks and of segments; whatever the number of threads, the same rows.
void test_scan_borders() {
  for (const std::string& isa : supported_isas()) {
    set_isa(isa);
    for (size_t tokens : {size_t{16383}, size_t{16385}, size_t{Segment::kMaxTokens + 17}}) {
      const RowType type = tokens < 20000 ? kF16 : kBF16;
      const Context context(Geometry{3, 1, 8, type, nullptr, make_scan(2, 0.02f, 0, 8), 0}, tokens);
      LayerKV kv(context.geometry);
      context.append_to(kv, 0, tokens);
      const std::vector<Sample> samples = drawn_from(kv, context);
      for (size_t threads : {1, 5, 2}) {
        set_num_threads(threads);
        const Result result = run(kv, context, false);
        for (size_t head = 0; head < 3; ++head) {
          check_sample(samples[head], tokens);
          CHECK(samples[head].rows.back() > static_cast<int32_t>(tokens) - 1000);
          check_against_loops(context, result, head, samples[head], 1e-2);
        }
      }
    }
  }
}

// Keys that are all equal, and vectors as long and as short as they may be.
void test_scan_extremes() {
  for (const std::string& isa : supported_isas()) {
    set_isa(isa);
    for (float factor : {0.0f, 1e-30f, 1e-12f, 1e9f, 1e17f}) {
      for (uint32_t bits : {1u, 2u, 4u}) {
        for (float budget : {0.1f, 1.0f}) {
          Context context(Geometry{2, 1, 8, kF32, nullptr, make_scan(bits, budget, 1, 8), 0}, 100);
          for (std::vector<float>* part : {&context.keys, &context.values, &context.queries})
            for (float& x : *part) x *= factor;
          LayerKV kv(context.geometry);
          context.append_to(kv, 0, 100);
          const Result result = run(kv, context, false);
          for (float x : result.out) CHECK(std::isfinite(x));
          for (float x : result.lse) CHECK(!std::isnan(x));
          for (const Sample& one : drawn_from(kv, context)) check_sample(one, 100);
        }
      }
    }
  }
}

// Every kernel gives the codes and weights of the plain one, but for the last bits of floats.
void test_scan_kernels_agree() {
  for (uint32_t bits : {1u, 2u, 4u}) {
    for (uint32_t head_dim : {8u, 24u, 80u, 256u}) {
      const size_t tokens = 150;
      const Context context(Geometry{9, 1, head_dim, kF32, nullptr, make_scan(bits, 0.2f, 0, head_dim), 0}, tokens);
      std::vector<float> expected;
      for (const std::string& isa : supported_isas()) {
        set_isa(isa);
        LayerKV kv(context.geometry);
        context.append_to(kv, 0, tokens);
        const auto* codes = dynamic_cast<const Codes*>(kv.segments()->at(0)->index());
        CHECK(codes != nullptr && codes->num_blocks() == 10);
        PreparedQueries queries(kernels(), context.geometry, context.query_bytes(), kF32, 9, true, 0.25f);
        queries.prepare_scan(0);
        const std::vector<size_t> blocks = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
        std::vector<float> logs(9 * 10 * kCodeBlock, NAN), biases(10 * kCodeBlock, NAN);
        CHECK(codes->logs({queries, 0, 9, 0, nullptr, 0, 0}, blocks, 10 * kCodeBlock, logs.data(), biases.data()) ==
              10);
        for (float bias : biases) CHECK(std::isfinite(bias));
        if (expected.empty()) expected = logs;
        size_t different = 0;
        for (size_t i = 0; i < logs.size(); ++i) different += !(std::abs(logs[i] - expected[i]) < 1e-3f);
        CHECK(different <= logs.size() / 50);  // elements at the border of two levels
      }
    }
  }
}

// The threshold of some weights, against what defines it.
void test_log_threshold() {
  std::mt19937 engine(3);
  std::normal_distribution<float> normal;
  for (const std::string& isa : supported_isas()) {
    set_isa(isa);
    for (size_t count : {16, 160, 4096}) {
      for (float spread : {0.0f, 1.0f, 5.0f, 30.0f}) {
        for (float share : {0.001f, 0.01f, 0.3f, 0.9f}) {
          std::vector<float> logs(count), scratch(2 * count);
          for (float& x : logs) x = 50 + spread * normal(engine);
          const float rows = share * static_cast<float>(count);
          const float threshold = kernels().log_threshold(logs.data(), count, rows, scratch.data());
          double found = 0;
          for (float x : logs) found += std::min(1.0, std::exp(double{x} - threshold));
          CHECK(spread == 30 ? found < 1.02 * rows : std::abs(found - rows) < 0.02 * rows);
        }
      }
    }
  }
}

// Attention over the rows of a sample is what attend gives; rows that are not there are refused.
void test_chosen_rows() {
  for (const std::string& isa : supported_isas()) {
    set_isa(isa);
    const size_t tokens = 700;
    const Geometry geometry{6, 2, 24, kF32, make_lsh(4, 10, 2, 24), nullptr, 100};
    const Context context(geometry, tokens);
    LayerKV kv(geometry);
    context.append_to(kv, 0, 650);
    context.append_to(kv, 650, 50);
    const Result expected = run(kv, context, false);
    const std::vector<Sample> samples = drawn_from(kv, context);
    const size_t room = 800;
    std::vector<int32_t> rows(6 * room, -7), counts;
    std::vector<float> logs(6 * room, NAN), out(6 * 24), lse(6);
    for (size_t head = 0; head < 6; ++head) {
      counts.push_back(static_cast<int32_t>(samples[head].rows.size()));
      std::copy(samples[head].rows.begin(), samples[head].rows.end(), rows.data() + head * room);
      std::copy(samples[head].log_probability.begin(), samples[head].log_probability.end(), logs.data() + head * room);
    }
    const auto segments = kv.segments();
    const auto attend_to = [&] {
      attend_chosen(geometry, {runs_of(*segments)}, context.query_bytes(), kF32, {0.25f, 0},
                    {rows.data(), logs.data(), counts.data(), room}, out.data(), lse.data());
    };
    attend_to();
    for (size_t i = 0; i < out.size(); ++i) CHECK(std::abs(out[i] - expected.out[i]) < 1e-4f);
    for (size_t i = 0; i < lse.size(); ++i) CHECK(std::abs(lse[i] - expected.lse[i]) < 1e-4f);
    for (int32_t bad : {-1, 700}) {
      const int32_t before = std::exchange(rows[0], bad);
      CHECK(throws<std::invalid_argument>(attend_to));
      rows[0] = before;
    }
    logs[0] = 0.5f;
    CHECK(throws<std::invalid_argument>(attend_to));
  }
}

// A lower target reads more rows, and says so; what it reads is what a sample has. One segment is read whole.
void test_target_error() {
  for (const std::string& isa : supported_isas()) {
    set_isa(isa);
    for (uint32_t bits : {1, 2, 4}) {
      std::vector<int64_t> before(6, 0);
      for (float target : {1.0f, 0.3f, 0.1f, 0.03f}) {
        const size_t tokens = 3000, near = 50;
        const Geometry geometry{6, 2, 24, kF32, nullptr, make_scan(bits, 1.0f, 1, 24, target), 100};
        const Context context(geometry, tokens + near);
        LayerKV kv(geometry);
        context.append_to(kv, 0, tokens);
        context.append_to(kv, tokens, near);
        const Result result = run(kv, context, false);
        const std::vector<Sample> samples = drawn_from(kv, context);
        for (size_t head = 0; head < 6; ++head) {
          CHECK(result.rows[head] == static_cast<int64_t>(samples[head].rows.size()));
          CHECK(result.rows[head] >= before[head] && result.rows[head] >= static_cast<int64_t>(near));
          CHECK(result.predicted[head] >= 0 && result.predicted[head] <= target * 1.001f);
          check_against_loops(context, result, head, samples[head], 1e-2);
          before[head] = result.rows[head];
        }
      }
    }
  }
}

void test_many_small_appends(std::shared_ptr<const Lsh> lsh, std::shared_ptr<const Scan> scan) {
  const size_t tokens = 3000;
  const Context context(Geometry{2, 1, 16, kBF16, std::move(lsh), std::move(scan), 64}, tokens);
  LayerKV whole(context.geometry), pieces(context.geometry);
  context.append_to(whole, 0, tokens);
  for (size_t first = 0; first < tokens; ++first) context.append_to(pieces, first, 1);
  CHECK(num_tokens(*pieces.segments()) == tokens && pieces.segments()->size() < 24);
  const Result a = run(whole, context, true), b = run(pieces, context, true);
  for (size_t i = 0; i < a.out.size(); ++i) CHECK(std::abs(a.out[i] - b.out[i]) < 1e-2);
  const Result drawn = run(pieces, context, false);
  const std::vector<Sample> samples = drawn_from(pieces, context);
  for (size_t head = 0; head < 2; ++head) check_against_loops(context, drawn, head, samples[head], 1e-2);
}

void test_refusals() {
  Context context(Geometry{1, 1, 8, kF16, nullptr, nullptr, 0}, 4);
  LayerKV kv(context.geometry);
  context.append_to(kv, 0, 2);
  for (float bad : {NAN, INFINITY, 1e19f, 70000.0f}) {  // the last is beyond float16
    context.values[3 * 8 + 5] = bad;
    CHECK(throws<std::invalid_argument>([&] { context.append_to(kv, 2, 2); }));
    CHECK(num_tokens(*kv.segments()) == 2);
  }
  context.queries[0] = NAN;
  CHECK(throws<std::invalid_argument>([&] { run(kv, context, true); }));
  CHECK(throws<std::invalid_argument>([] { make_scan(3, 0.1f, 0, 16); }));
  for (float budget : {0.0f, -1.0f, 1.1f, NAN}) {
    CHECK(throws<std::invalid_argument>([&] { make_scan(2, budget, 0, 16); }));
  }
  CHECK(throws<std::invalid_argument>([] { LayerKV(Geometry{1, 1, 8, kF16, nullptr, make_scan(2, 0.1f, 0, 16), 0}); }));
  CHECK(throws<std::invalid_argument>(
      [] { LayerKV(Geometry{1, 1, 16, kF16, make_lsh(2, 2, 1, 16), make_scan(2, 0.1f, 0, 16), 0}); }));
  CHECK(throws<std::invalid_argument>([] { set_isa("mmx"); }));
  CHECK(throws<std::invalid_argument>([] { set_num_threads(0); }));
  CHECK(throws<std::runtime_error>([] {
    parallel_for(100, [](size_t i) {
      if (i == 50) throw std::runtime_error("x");
    });
  }));
}

void test_concurrency(std::shared_ptr<const Lsh> lsh, std::shared_ptr<const Scan> scan) {
  const size_t tokens = 600;
  const Context context(Geometry{4, 2, 32, kF32, std::move(lsh), std::move(scan), 100}, tokens);
  LayerKV kv(context.geometry);
  context.append_to(kv, 0, 200);
  std::atomic<bool> stop{false};
  std::vector<std::thread> readers;
  for (int i = 0; i < 4; ++i) {
    readers.emplace_back([&, i] {
      while (!stop) {
        const auto fork = kv.fork();
        context.append_to(*fork, 0, 5);
        const Result result = run(i % 2 ? kv : *fork, context, i % 3 == 0);
        for (float x : result.out) CHECK(std::isfinite(x));
      }
    });
  }
  for (size_t first = 200; first < tokens; first += 4) {
    context.append_to(kv, first, 4);
    if (first % 80 == 0) set_num_threads(1 + first / 80 % 3);
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
  CHECK(num_tokens(*kv.segments()) == tokens);
  const Result result = run(kv, context, true);
  check_against_loops(context, result, 0, everything(tokens), 1e-4);
}

// Two threads append to one object: both arrive, whoever had to begin again.
void test_concurrent_appends() {
  const Context context(Geometry{1, 1, 8, kF32, nullptr, nullptr, 0}, 100);
  LayerKV kv(context.geometry);
  std::vector<std::thread> writers;
  for (int i = 0; i < 3; ++i) {
    writers.emplace_back([&] {
      for (int j = 0; j < 50; ++j) context.append_to(kv, 0, 2);
    });
  }
  for (std::thread& writer : writers) writer.join();
  CHECK(num_tokens(*kv.segments()) == 3 * 50 * 2);
}

// Every task runs exactly once: with more callers than the pool has slots, nested calls, sleeping workers, other pools.
void test_parallel_for() {
  std::atomic<bool> stop{false};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 20; ++caller) {
    callers.emplace_back([&, caller] {
      for (int round = 0; round < 30; ++round) {
        std::vector<std::atomic<int>> runs(1 + caller);
        parallel_for(runs.size(), [&](size_t i) { parallel_for(3, [&](size_t) { ++runs[i]; }); });
        for (const auto& count : runs) CHECK(count == 3);
        if (round % 10 == caller % 10) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
  }
  std::thread resizer([&] {
    for (size_t count = 1; !stop; count = count % 4 + 1) set_num_threads(count);
  });
  for (std::thread& caller : callers) caller.join();
  stop = true;
  resizer.join();
  set_num_threads(3);
  CHECK(num_threads() == 3);
  std::atomic<int> begun{0};
  CHECK(throws<std::runtime_error>([&] {
    parallel_for(100000, [&](size_t) {
      ++begun;
      throw std::runtime_error("at once");
    });
  }));
  CHECK(begun < 100);  // the rest is skipped
}

// A long append gets in although short ones arrive all the time.
void test_a_long_append_is_not_starved() {
  const size_t tokens = 20000;
  const Context context(Geometry{1, 1, 32, kF32, make_lsh(6, 20, 2, 32), nullptr, 64}, tokens);
  LayerKV kv(context.geometry);
  std::atomic<bool> done{false};
  std::atomic<size_t> others{0};
  std::thread writer([&] {
    for (; !done; ++others) context.append_to(kv, 0, 1);
  });
  context.append_to(kv, 0, tokens);
  done = true;
  writer.join();
  CHECK(num_tokens(*kv.segments()) == tokens + others);
}

void test_roofs() {
  CHECK(stream_read_roof(size_t{4} << 20, 2) > 0);
  CHECK(gather_read_roof(size_t{4} << 20, 512, 2) > 0);
  CHECK(throws<std::invalid_argument>([] { gather_read_roof(100, 512, 1); }));
}

}  // namespace

int main() {
  set_num_threads(2);
  test_attention();
  test_segment_borders();
  test_scan();
  test_scan_budget();
  test_scan_borders();
  test_scan_extremes();
  test_scan_kernels_agree();
  test_log_threshold();
  test_many_small_appends(make_lsh(4, 10, 2, 16), nullptr);
  test_many_small_appends(nullptr, make_scan(2, 0.1f, 8, 16));
  test_many_small_appends(nullptr, make_scan(2, 1.0f, 8, 16, 0.1f));
  test_target_error();
  test_chosen_rows();
  test_refusals();
  test_concurrency(make_lsh(4, 20, 2, 32), nullptr);
  test_concurrency(nullptr, make_scan(2, 0.1f, 8, 32));
  test_concurrency(nullptr, make_scan(2, 0.5f, 8, 32, 0.2f));
  test_concurrent_appends();
  test_a_long_append_is_not_starved();
  test_parallel_for();
  test_roofs();
  std::printf("%d checks on %zu instruction sets passed\n", checks.load(), supported_isas().size());
}
