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

#include "chosen.h"
#include "context.h"
#include "dispatch.h"
#include "roofs.h"
#include "threads.h"

using namespace magicpig;

namespace {

void test_attention() {
  for (const std::string& isa : tested_isas()) {
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
  for (const std::string& isa : tested_isas()) {
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

// Attention over the rows of a sample is what attend gives; rows that are not there are refused.
void test_chosen_rows() {
  for (const std::string& isa : tested_isas()) {
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
  test_many_small_appends(make_lsh(4, 10, 2, 16), nullptr);
  test_many_small_appends(nullptr, make_scan(2, 0.1f, 8, 16));
  test_many_small_appends(nullptr, make_scan(2, 1.0f, 8, 16, 0.1f));
  test_chosen_rows();
  test_refusals();
  test_concurrency(make_lsh(4, 20, 2, 32), nullptr);
  test_concurrency(nullptr, make_scan(2, 0.1f, 8, 32));
  test_concurrency(nullptr, make_scan(2, 0.5f, 8, 32, 0.2f));
  test_concurrent_appends();
  test_a_long_append_is_not_starved();
  test_parallel_for();
  test_roofs();
  std::printf("%d checks on %zu instruction sets passed\n", checks.load(), tested_isas().size());
}
