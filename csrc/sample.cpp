// The rows that attention would read.
#include <algorithm>
#include <numeric>

#include "attention.h"
#include "dispatch.h"
#include "queries.h"
#include "threads.h"
#include "threshold.h"

namespace magicpig {

namespace {

// What the heads of a group draw from a run whose first token is number `start`, behind what is in their samples.
void sample_run(const Geometry& geometry, const Run& run, uint32_t kv_head, const PreparedQueries& queries,
                int32_t start, Sample* samples) {
  const uint32_t group = geometry.group(), rows = run.index ? run.index->tokens_at_once() : run.num_tokens,
                 heads = run.index ? run.index->heads_at_once(group) : 1;
  std::vector<Drawn> drawn(heads);
  for (uint32_t first = 0; first < run.num_tokens; first += rows) {
    for (uint32_t h = 0; h < group; h += heads) {
      const size_t query = kv_head * group + h;
      if (run.index)
        run.index->draw(
            {queries, query, heads, kv_head, run.rows(kv_head), first, std::min(rows, run.num_tokens - first)},
            drawn.data());
      for (uint32_t i = 0; i < heads; ++i) {
        Sample& sample = samples[h + i];
        const size_t at = sample.rows.size(), count = run.index ? drawn[i].count : run.num_tokens;
        for (size_t j = 0; j < count; ++j)
          sample.rows.push_back(start + (run.index ? drawn[i].ids[j] : static_cast<int32_t>(j)));
        sample.log_probability.resize(at + count, 0.0f);
        float* log_probability = sample.log_probability.data() + at;
        if (run.index && drawn[i].log_probability) {
          std::copy_n(drawn[i].log_probability, count, log_probability);
        } else if (run.index) {
          RowsArgs args = rows_args(geometry, run, kv_head, queries, query + i);
          choose(drawn[i], args);
          kernels().log_inclusion[geometry.type](args, log_probability);
        }
      }
    }
  }
}

// In ascending order of rows.
void sort(Sample& sample) {
  std::vector<size_t> order(sample.rows.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return sample.rows[a] < sample.rows[b]; });
  Sample sorted;
  for (size_t i : order) {
    sorted.rows.push_back(sample.rows[i]);
    sorted.log_probability.push_back(sample.log_probability[i]);
  }
  sample = std::move(sorted);
}

// Attention over the runs that are read whole, where thresholds depend on it.
struct WholeRuns {
  WholeRuns(const Geometry& geometry, const std::vector<Run>& runs, const char* queries, RowType type, float scale)
      : near(geometry.num_heads), outs(size_t{geometry.num_heads} * geometry.dim()) {
    if (!geometry.scan || geometry.scan->target_error == 0) return;
    std::vector<Run> whole;
    for (const Run& run : runs)
      if (!run.index) whole.push_back(run);
    std::vector<float> out(size_t{geometry.num_heads} * geometry.head_dim), lse(geometry.num_heads);
    std::vector<int64_t> rows(geometry.num_heads);
    attend(geometry, {whole}, queries, type, {scale, 0}, true, {out.data(), lse.data(), rows.data(), nullptr, nullptr});
    for (size_t h = 0; h < near.size(); ++h) {
      near[h] = {lse[h], outs.data() + h * geometry.dim()};
      std::copy_n(out.data() + h * geometry.head_dim, geometry.head_dim, outs.data() + h * geometry.dim());
    }
  }

  std::vector<Near> near;  // of each query head
  std::vector<float> outs;
};

}  // namespace

std::vector<Sample> sample(const Geometry& geometry, const std::vector<Run>& runs, const char* queries, RowType type,
                           float scale) {
  const Kernels& k = kernels();
  PreparedQueries prepared(k, geometry, queries, type, geometry.num_heads, geometry.indexed(), scale);
  const WholeRuns whole(geometry, runs, queries, type, scale);
  std::vector<Sample> samples(geometry.num_heads);
  parallel_for(geometry.num_kv_heads, [&](size_t head) {
    const auto kv_head = static_cast<uint32_t>(head);
    const size_t query = head * geometry.group();
    if (geometry.scan) set_thresholds(k, geometry, runs, kv_head, query, whole.near.data() + query, prepared, nullptr);
    int32_t start = 0;
    for (const Run& run : runs) {
      sample_run(geometry, run, kv_head, prepared, start, samples.data() + kv_head * geometry.group());
      start += static_cast<int32_t>(run.num_tokens);
    }
  });
  for (Sample& one : samples) sort(one);
  return samples;
}

}  // namespace magicpig
