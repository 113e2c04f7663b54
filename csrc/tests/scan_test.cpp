// Native tests of drawing by codes, made to run under sanitizers: see native_test.cpp.
#include <cstdio>
#include <random>
#include <string>

#include "codes.h"
#include "context.h"
#include "dispatch.h"
#include "queries.h"
#include "threads.h"

using namespace magicpig;

namespace {

// Codes of all widths, at lengths around blocks, tiles of blocks and what one task codes; all tiles of heads.
void test_scan() {
  for (const std::string& isa : tested_isas()) {
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
  for (const std::string& isa : tested_isas()) {
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
  for (const std::string& isa : tested_isas()) {
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
  for (const std::string& isa : tested_isas()) {
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
      for (const std::string& isa : tested_isas()) {
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
  for (const std::string& isa : tested_isas()) {
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

// A lower target reads more rows, and says so; what it reads is what a sample has. One segment is read whole.
void test_target_error() {
  for (const std::string& isa : tested_isas()) {
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

// Codes that were saved may have been changed: whatever they say, rows are those of the segment.
void test_any_codes() {
  const uint32_t tokens = 9'001;
  const auto scan = make_scan(2, 0.02f, 1, 24);
  const Context context(Geometry{3, 1, 24, kF32, nullptr, scan, 0}, tokens);
  LayerKV kv(context.geometry);
  context.append_to(kv, 0, tokens);
  const Segment& segment = *kv.segments()->at(0);
  for (int byte : {0x00, 0x55, 0x7f, 0xff}) {
    Buffer memory(segment.index()->memory().size());
    std::fill_n(memory.data(), memory.size(), static_cast<char>(byte));
    const Codes codes(scan, kF32, 1, tokens, std::move(memory));
    Run run = segment.run();
    run.index = &codes;
    for (const Sample& one : sample(context.geometry, {run}, context.query_bytes(), kF32, 0.25f))
      for (int32_t row : one.rows) CHECK(row >= 0 && row < static_cast<int32_t>(tokens));
  }
}

}  // namespace

int main() {
  set_num_threads(2);
  test_scan();
  test_scan_budget();
  test_scan_borders();
  test_scan_extremes();
  test_scan_kernels_agree();
  test_log_threshold();
  test_target_error();
  test_any_codes();
  std::printf("%d checks on %zu instruction sets passed\n", checks.load(), tested_isas().size());
}
