// Windows, decode steps and saved segments, without Python, made to run under sanitizers.
#include "step.h"

#include <algorithm>
#include <thread>

#include "dispatch.h"
#include "growing.h"
#include "testing.h"
#include "threads.h"

using namespace magicpig;

namespace {

// Tokens of one sequence: [num_kv_heads, tokens, head_dim].
struct Tokens {
  Geometry geometry;
  size_t count;
  std::vector<float> keys, values;

  Tokens(const Geometry& g, size_t count, uint32_t seed)
      : geometry(g),
        count(count),
        keys(gaussian(g.num_kv_heads * count * g.head_dim, seed, 0.5f)),
        values(gaussian(g.num_kv_heads * count * g.head_dim, seed + 1)) {}

  TensorView view(const std::vector<float>& from, size_t first) const {
    return {reinterpret_cast<const char*>(from.data() + first * geometry.head_dim), kF32, count * geometry.head_dim,
            geometry.head_dim, "tokens"};
  }
  BatchView one(const std::vector<float>& from, size_t token) const {
    return {reinterpret_cast<const char*>(from.data() + token * geometry.head_dim), kF32, 0, count * geometry.head_dim};
  }
};

// Exact attention of one query head over some tokens, in double.
std::vector<double> expected(const Tokens& tokens, const float* query, size_t kv_head,
                             const std::vector<size_t>& visible) {
  const uint32_t dim = tokens.geometry.head_dim;
  std::vector<double> out(dim);
  double total = 0;
  for (size_t token : visible) {
    const float* key = tokens.keys.data() + (kv_head * tokens.count + token) * dim;
    const float* value = tokens.values.data() + (kv_head * tokens.count + token) * dim;
    double dot = 0;
    for (uint32_t d = 0; d < dim; ++d) dot += double{query[d]} * key[d];
    const double weight = std::exp(dot * 0.25);
    total += weight;
    for (uint32_t d = 0; d < dim; ++d) out[d] += weight * value[d];
  }
  for (double& x : out) x /= total;
  return out;
}

std::vector<float> run_step(Window& window, const LayerKV* far, const Tokens& tokens, size_t token,
                            const std::vector<float>& queries, size_t span) {
  std::vector<float> out(queries.size(), -1.0f);
  step({{&window, far}}, {reinterpret_cast<const char*>(queries.data()),
                          kF32,
                          tokens.one(tokens.keys, token),
                          tokens.one(tokens.values, token),
                          {0.25f, 0},
                          span,
                          reinterpret_cast<char*>(out.data())});
  return out;
}

void test_steps() {
  for (const std::string& isa : tested_isas()) {
    set_isa(isa);
    for (uint32_t head_dim : {8u, 40u, 64u}) {
      const Geometry geometry{6, 2, head_dim, kF32, nullptr, nullptr, 0};
      const Tokens tokens(geometry, 150, 11);
      Window window(geometry);
      LayerKV far(geometry);
      far.append(tokens.view(tokens.keys, 0), tokens.view(tokens.values, 0), 20);
      CHECK(window.append(tokens.view(tokens.keys, 20), tokens.view(tokens.values, 20), 10));
      std::vector<size_t> visible;
      for (size_t i = 0; i < 30; ++i) visible.push_back(i);
      for (size_t token = 30; token < tokens.count; ++token) {  // the window grows past its first capacity
        const std::vector<float> queries = gaussian(6 * head_dim, static_cast<uint32_t>(token));
        const std::vector<float> out = run_step(window, &far, tokens, token, queries, SIZE_MAX);
        visible.push_back(token);
        if (token % 40 == 0) {
          window.drop(3, 2);
          visible.erase(visible.begin() + 23, visible.begin() + 25);
        } else if (token % 10 == 0) {
          for (size_t head = 0; head < 6; ++head) {
            const auto truth = expected(tokens, queries.data() + head * head_dim, head / 3, visible);
            for (uint32_t d = 0; d < head_dim; ++d) CHECK(std::abs(out[head * head_dim + d] - truth[d]) < 2e-5);
          }
        }
      }
      CHECK(window.num_tokens() + 20 == visible.size());
      const std::vector<float> queries = gaussian(6 * head_dim, 5);
      const std::vector<float> near = run_step(window, nullptr, tokens, 149, queries, 1);
      for (uint32_t d = 0; d < head_dim; ++d) CHECK(near[d] == tokens.values[149 * head_dim + d]);
    }
  }
}

void test_bad_numbers_and_refusals() {
  const Geometry geometry{2, 1, 8, kF32, nullptr, nullptr, 0};
  Tokens tokens(geometry, 4, 3);
  Window window(geometry), other(geometry);
  CHECK(window.append(tokens.view(tokens.keys, 0), tokens.view(tokens.values, 0), 2));
  tokens.values[2 * 8] = NAN;
  std::vector<float> queries(2 * 2 * 8, 0.5f), out(queries.size());
  step({{&window, nullptr}, {&other, nullptr}}, {reinterpret_cast<const char*>(queries.data()),
                                                 kF32,
                                                 {reinterpret_cast<const char*>(tokens.keys.data()), kF32, 8, 8},
                                                 {reinterpret_cast<const char*>(tokens.values.data() + 8), kF32, 8, 8},
                                                 {1.0f, 0},
                                                 SIZE_MAX,
                                                 reinterpret_cast<char*>(out.data())});
  for (size_t i = 0; i < 16; ++i) CHECK(std::isfinite(out[i]) && std::isnan(out[16 + i]));
  CHECK(throws<std::invalid_argument>([&] { window.drop(3, 1); }));
  CHECK(throws<std::invalid_argument>([&] { window.drop(0, 4); }));
  window.drop(0, 3);
  CHECK(window.num_tokens() == 0);
  const auto fork = window.fork();
  CHECK(fork->num_tokens() == 0);
}

// A segment's memory, saved and adopted, draws the same rows; what reaches outside is refused.
void test_adopted_segments() {
  const Geometry geometry{2, 2, 16, kBF16, make_lsh(4, 10, 2, 16), nullptr, 0};
  const Tokens tokens(geometry, 300, 17);
  LayerKV original(geometry), adopted(geometry);
  original.append(tokens.view(tokens.keys, 0), tokens.view(tokens.values, 0), 300);
  const auto segment = original.segments()->at(0);
  const auto copy = [](const Buffer& buffer) {
    Buffer other(buffer.size());
    std::memcpy(other.data(), buffer.data(), buffer.size());
    return other;
  };
  const Buffer& rows = segment->row_memory();
  const Buffer& tables = segment->index()->memory();
  adopted.adopt(std::make_shared<Segment>(geometry, 300, copy(rows), copy(tables)));
  const std::vector<float> queries = gaussian(2 * 16, 23);
  const char* bytes = reinterpret_cast<const char*>(queries.data());
  const auto a = sample(geometry, runs_of(*original.segments()), bytes, kF32, 0.25f);
  const auto b = sample(geometry, runs_of(*adopted.segments()), bytes, kF32, 0.25f);
  for (size_t head = 0; head < 2; ++head) CHECK(a[head].rows == b[head].rows && !a[head].rows.empty());
  for (size_t at = 0; at < tables.size(); at += 61) {  // whatever a byte becomes: refused, or harmless
    Buffer changed = copy(tables);
    changed.data()[at] = static_cast<char>(changed.data()[at] ^ 0x81);
    try {
      LayerKV other(geometry);
      other.adopt(std::make_shared<Segment>(geometry, 300, copy(rows), std::move(changed)));
      sample(geometry, runs_of(*other.segments()), bytes, kF32, 0.25f);
    } catch (const std::invalid_argument&) {
    }
  }
  CHECK(throws<std::invalid_argument>([&] { Segment(geometry, 299, copy(rows), copy(tables)); }));
  CHECK(throws<std::invalid_argument>([&] { Segment(geometry, 300, copy(rows), Buffer(64)); }));
}

// Segments that grow, several at a time, become those that are made of all their tokens at once.
void test_growing_segments(const Geometry& geometry) {
  std::vector<std::thread> threads;
  for (uint32_t count : {1u, 33u, 301u, 1000u, 5003u}) {
    threads.emplace_back([&geometry, count] {
      const Tokens tokens(geometry, count, count);
      LayerKV whole(geometry), grown(geometry);
      whole.append(tokens.view(tokens.keys, 0), tokens.view(tokens.values, 0), count);
      GrowingSegment growing(geometry, count);
      for (size_t first = 0, part = 1; first < count; first += part, part = std::min<size_t>(2 * part, count - first)) {
        CHECK(throws<std::invalid_argument>([&] { growing.finish(nullptr); }));
        growing.add(tokens.view(tokens.keys, first), tokens.view(tokens.values, first), part);
      }
      grown.adopt(growing.finish(nullptr));
      const std::vector<float> queries = gaussian(4 * 24, 23);
      const char* bytes = reinterpret_cast<const char*>(queries.data());
      const auto a = sample(geometry, runs_of(*whole.segments()), bytes, kF32, 0.25f);
      const auto b = sample(geometry, runs_of(*grown.segments()), bytes, kF32, 0.25f);
      for (size_t head = 0; head < 4; ++head)
        CHECK(a[head].rows == b[head].rows && a[head].log_probability == b[head].log_probability);
      CHECK(throws<std::invalid_argument>([&] { growing.finish(nullptr); }));
      GrowingSegment short_one(geometry, count);
      CHECK(throws<std::invalid_argument>(
          [&] { short_one.add(tokens.view(tokens.keys, 0), tokens.view(tokens.values, 0), count + 1); }));
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(throws<std::invalid_argument>([&] { GrowingSegment(geometry, 0); }));
  CHECK(throws<std::invalid_argument>([&] { GrowingSegment(geometry, 65537); }));
}

// Tables that were sorted elsewhere draw what the same tables do that were sorted here; others are refused.
void test_tables_sorted_elsewhere() {
  const Geometry geometry{2, 2, 16, kBF16, make_lsh(4, 10, 2, 16), nullptr, 0};
  const std::vector<float> queries = gaussian(2 * 16, 23);
  const char* bytes = reinterpret_cast<const char*>(queries.data());
  for (uint32_t count : {1u, 64u, 301u}) {
    const Tokens tokens(geometry, count, 17);
    const TensorView keys = tokens.view(tokens.keys, 0), values = tokens.view(tokens.values, 0);
    LayerKV here(geometry);
    here.append(keys, values, count);
    const auto& tables = dynamic_cast<const Tables&>(*here.segments()->at(0)->index());
    std::vector<uint32_t> offsets;
    std::vector<uint16_t> ids;
    for (uint32_t head = 0; head < 2; ++head) {
      const std::vector<int32_t> codes = tables.codes(head);
      for (uint32_t table = 0; table < 10; ++table) {
        const size_t first = ids.size();
        for (int32_t bucket = 0; bucket < 16; ++bucket) {
          offsets.push_back(static_cast<uint32_t>(ids.size() - first));
          for (uint32_t i = 0; i < count; ++i)
            if (codes[size_t{i} * 10 + table] == bucket) ids.push_back(static_cast<uint16_t>(i));
        }
        offsets.push_back(count);
      }
    }
    // Alone a key is the mean, which is always drawn.
    const std::vector<float> means(2 * 16), inv_norms(2 * count, count == 1 ? 0.0f : 1.0f);
    const auto finished = [&] {
      GrowingSegment growing(geometry, count);
      growing.add(keys, values, count);
      const Hashed hashed{means.data(), inv_norms.data(), nullptr, offsets.data(), ids.data()};
      return growing.finish(&hashed);
    };
    LayerKV there(geometry);
    there.adopt(finished());
    const auto a = sample(geometry, runs_of(*here.segments()), bytes, kF32, 0.25f);
    const auto b = sample(geometry, runs_of(*there.segments()), bytes, kF32, 0.25f);
    for (size_t head = 0; head < 2; ++head) CHECK(a[head].rows == b[head].rows);
    const auto refused = [&](auto& numbers, size_t place, auto value) {
      const auto before = std::exchange(numbers[place], value);
      CHECK(throws<std::invalid_argument>(finished));
      numbers[place] = before;
    };
    refused(ids, ids.size() - 1, static_cast<uint16_t>(count));
    refused(ids, size_t{0}, uint16_t{65535});
    if (count > 1) refused(ids, ids.size() - 1, ids[ids.size() - 2]);
    for (uint32_t value : {count + 1, count - 1, 0xffffffffu}) refused(offsets, offsets.size() - 1, value);
    refused(offsets, size_t{0}, 1u);
  }
}

// Saved codes are as good as the fresh ones; any other bytes of their size draw some rows of the segment.
void test_adopted_codes() {
  std::mt19937 engine(1);
  for (const std::string& isa : tested_isas()) {
    set_isa(isa);
    for (uint32_t bits : {1u, 2u, 4u}) {
      const Geometry geometry{6, 2, 24, kBF16, nullptr, make_scan(bits, 0.1f, 4, 24), 0};
      const uint32_t count = 301;
      const Tokens tokens(geometry, count, 17);
      LayerKV original(geometry);
      original.append(tokens.view(tokens.keys, 0), tokens.view(tokens.values, 0), count);
      const auto segment = original.segments()->at(0);
      const Buffer& codes = segment->index()->memory();
      const auto copy = [](const Buffer& buffer) {
        Buffer other(buffer.size());
        std::memcpy(other.data(), buffer.data(), buffer.size());
        return other;
      };
      const std::vector<float> queries = gaussian(6 * 24, 23);
      const char* bytes = reinterpret_cast<const char*>(queries.data());
      const auto adopt_and_draw = [&](Buffer index) {
        LayerKV kv(geometry);
        kv.adopt(std::make_shared<Segment>(geometry, count, copy(segment->row_memory()), std::move(index)));
        std::vector<float> out(6 * 24), lse(6);
        std::vector<int64_t> rows(6);
        attend(geometry, {runs_of(*kv.segments())}, bytes, kF32, {0.25f, 0}, false,
               {out.data(), lse.data(), rows.data(), nullptr, nullptr});
        const auto samples = sample(geometry, runs_of(*kv.segments()), bytes, kF32, 0.25f);
        for (size_t head = 0; head < 6; ++head) {
          CHECK(rows[head] == static_cast<int64_t>(samples[head].rows.size()));
          for (int32_t row : samples[head].rows) CHECK(row >= 0 && row < static_cast<int32_t>(count));
          for (float p : samples[head].log_probability) CHECK(p <= 0 && p > -12);
        }
        return samples;
      };
      const auto a = sample(geometry, runs_of(*original.segments()), bytes, kF32, 0.25f);
      const auto b = adopt_and_draw(copy(codes));
      for (size_t head = 0; head < 6; ++head) CHECK(a[head].rows == b[head].rows && !a[head].rows.empty());
      for (int fill : {0x00, 0x7f, 0x80, 0xff}) {
        Buffer changed = copy(codes);
        std::memset(changed.data(), fill, changed.size());
        adopt_and_draw(std::move(changed));
      }
      for (int round = 0; round < 40; ++round) {
        Buffer changed = copy(codes);
        for (size_t at = 0; at < changed.size(); at += 4) {  // floats that are NaN, infinite, huge: single ones or all
          if (round >= 20 && engine() % 97) continue;
          const uint32_t special[] = {0x7fc00000u, 0x7f800000u, 0xff800000u, 0x7f7fffffu, 0x00000001u};
          const uint32_t word = round % 2 ? special[engine() % 5] : static_cast<uint32_t>(engine());
          std::memcpy(changed.data() + at, &word, 4);
        }
        adopt_and_draw(std::move(changed));
      }
      const auto refused = [&](uint32_t tokens_of, size_t size) {
        return throws<std::invalid_argument>(
            [&] { Segment(geometry, tokens_of, copy(segment->row_memory()), Buffer(size)); });
      };
      CHECK(refused(count, codes.size() - 64) && refused(count, codes.size() + 64) && refused(count - 1, codes.size()));
    }
  }
}

// Sequences of their own step on several threads while segments are built from their windows.
void test_concurrency(std::shared_ptr<const Lsh> lsh, std::shared_ptr<const Scan> scan) {
  const Geometry geometry{4, 2, 32, kBF16, std::move(lsh), std::move(scan), 32};
  const Tokens tokens(geometry, 400, 29);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      Window window(geometry);
      auto far = std::make_unique<LayerKV>(geometry);
      for (size_t token = 0; token < 200; ++token) {
        const std::vector<float> queries = gaussian(4 * 32, static_cast<uint32_t>(token + 1000 * i));
        for (float x : run_step(window, far.get(), tokens, token, queries, SIZE_MAX)) CHECK(std::isfinite(x));
        if (window.num_tokens() == 50) {
          auto longer = far->fork();
          std::thread([&] {
            longer->append(tokens.view(tokens.keys, token), tokens.view(tokens.values, token), 40);
          }).join();
          far = std::move(longer);
          window.drop(2, 40);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
  set_num_threads(2);
  test_steps();
  test_bad_numbers_and_refusals();
  test_tables_sorted_elsewhere();
  test_adopted_segments();
  test_growing_segments({4, 2, 24, kBF16, make_lsh(5, 21, 2, 24), nullptr, 32});
  test_growing_segments({4, 2, 24, kBF16, nullptr, make_scan(2, 0.2f, 4, 24), 32});
  test_growing_segments({4, 2, 24, kBF16, nullptr, nullptr, 0});
  test_adopted_codes();
  test_concurrency(make_lsh(4, 20, 2, 32), nullptr);
  test_concurrency(nullptr, make_scan(2, 0.2f, 4, 32));
  test_concurrency(nullptr, make_scan(2, 0.5f, 4, 32, 0.2f));
  std::printf("%d checks passed\n", checks.load());
}
