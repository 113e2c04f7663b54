#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>

#include "dispatch.h"
#include "queries.h"
#include "stopwatch.h"
#include "threads.h"
#include "threshold.h"

namespace magicpig {

namespace {

constexpr size_t kExactRows = 4096;  // of one exact task; fixed, so that results depend on neither threads nor batch

// Query heads over a run's rows, none of them chosen yet.
RowsArgs rows_args(const Geometry& geometry, const Run& run, uint32_t kv_head, const PreparedQueries& queries,
                   size_t query) {
  RowsArgs args = {};
  args.rows = run.rows(kv_head);
  args.dim = geometry.dim();
  args.num_heads = 1;
  args.queries = queries.view(query);
  return args;
}

void choose(const Drawn& drawn, RowsArgs& args) {
  args.ids = drawn.ids;
  args.count = drawn.count;
  args.inclusion = drawn.inclusion;
  args.log_probability = drawn.log_probability;
}

// A range of a run's rows for some heads of a group: read exactly, or drawn from by the run's index.
struct Task {
  const Run* run;
  uint32_t head;  // the first query head, within the sequence
  uint32_t num_heads;
  uint32_t first, count;
  bool drawn;
  size_t state;  // its first PartialState
};

// All tasks of one KV head of one sequence; whoever finishes the last of them merges their states.
struct Group {
  size_t sequence;
  uint32_t kv_head;
  size_t first_task, end_task;
  std::atomic<size_t> left;
};

class Call {
 public:
  Call(const Geometry& geometry, const std::vector<std::vector<Run>>& batch, const char* queries, RowType type,
       Scoring scoring, bool exact, const AttendResult& result)
      : k_(kernels()),
        geometry_(geometry),
        scoring_(scoring),
        result_(result),
        queries_(k_, geometry, queries, type, batch.size() * geometry.num_heads, !exact && any_index(batch),
                 scoring.scale) {
    if (geometry.scan && !exact) set_thresholds(k_, geometry, batch, queries_);
    std::fill_n(result.rows_read, batch.size() * geometry.num_heads, 0);
    plan(batch, exact);
  }

  Timing run() {
    parallel_for(tasks_.size(), [&](size_t i) {
      Group& group = groups_[group_of_[i]];
      attend_task(group, tasks_[i]);
      if (group.left.fetch_sub(1, std::memory_order_acq_rel) == 1) merge(group);
    });
    for (Group& group : groups_)
      if (group.first_task == group.end_task) merge(group);
    return {draw_ns_ * 1e-9, drawn_ns_ * 1e-9, exact_ns_ * 1e-9};
  }

 private:
  static bool any_index(const std::vector<std::vector<Run>>& batch) {
    for (const auto& runs : batch)
      for (const Run& run : runs)
        if (run.index) return true;
    return false;
  }

  void plan(const std::vector<std::vector<Run>>& batch, bool exact) {
    const uint32_t group_size = geometry_.group();
    size_t num_states = 0;
    groups_ = std::vector<Group>(batch.size() * geometry_.num_kv_heads);
    for (size_t g = 0; g < groups_.size(); ++g) {
      Group& group = groups_[g];
      group.sequence = g / geometry_.num_kv_heads;
      group.kv_head = static_cast<uint32_t>(g % geometry_.num_kv_heads);
      group.first_task = tasks_.size();
      for (const Run& run : batch[group.sequence]) {
        const bool drawn = run.index && !exact;
        const uint32_t rows = drawn ? run.index->tokens_at_once() : kExactRows,
                       heads = drawn ? run.index->heads_at_once(group_size) : group_size;
        for (uint32_t first = 0; first < run.num_tokens; first += rows) {
          const uint32_t count = std::min(rows, run.num_tokens - first);
          for (uint32_t h = 0; h < group_size; h += heads, num_states += heads)
            tasks_.push_back({&run, group.kv_head * group_size + h, heads, first, count, drawn, num_states});
        }
      }
      group.end_task = tasks_.size();
      group.left.store(group.end_task - group.first_task, std::memory_order_relaxed);
      group_of_.resize(tasks_.size(), g);
    }
    const size_t stride = (geometry_.dim() + 31) / 32 * 32;
    outs_.resize(num_states * stride);
    states_.resize(num_states);
    rows_.resize(num_states);
    visited_.resize(num_states);
    for (size_t i = 0; i < num_states; ++i) states_[i].out = outs_.data() + i * stride;
  }

  void attend_task(const Group& group, Task& task) {
    const size_t query = group.sequence * geometry_.num_heads + task.head;
    RowsArgs args = rows_args(geometry_, *task.run, group.kv_head, queries_, query);
    args.scale = scoring_.scale;
    args.softcap = scoring_.softcap;
    const Stopwatch watch;
    double drawing = 0;
    if (task.drawn) {
      static thread_local std::vector<Drawn> drawn;
      drawn.resize(task.num_heads);
      task.run->index->draw(
          {queries_, query, task.num_heads, group.kv_head, task.run->rows(group.kv_head), task.first, task.count},
          drawn.data());
      drawing = watch.seconds();
      for (uint32_t h = 0; h < task.num_heads; ++h) {
        choose(drawn[h], args);
        args.queries = queries_.view(query + h);
        k_.attend[geometry_.type](args, &states_[task.state + h]);
        rows_[task.state + h] = drawn[h].count;
        visited_[task.state + h] = drawn[h].visited;
      }
    } else {
      args.rows = static_cast<const char*>(args.rows) + task.first * geometry_.row_bytes();
      args.count = task.count;
      args.num_heads = task.num_heads;
      k_.attend[geometry_.type](args, &states_[task.state]);
      std::fill_n(rows_.begin() + static_cast<std::ptrdiff_t>(task.state), task.num_heads, task.count);
    }
    draw_ns_ += static_cast<int64_t>(drawing * 1e9);
    (task.drawn ? drawn_ns_ : exact_ns_) += static_cast<int64_t>((watch.seconds() - drawing) * 1e9);
  }

  void merge(const Group& group) {
    const uint32_t group_size = geometry_.group();
    for (uint32_t h = 0; h < group_size; ++h) {
      const uint32_t head = group.kv_head * group_size + h;
      const size_t at = group.sequence * geometry_.num_heads + head;
      float* out = result_.out + at * geometry_.head_dim;
      auto each = [&](auto&& visit) {
        for (size_t i = group.first_task; i < group.end_task; ++i) {
          const Task& task = tasks_[i];
          if (task.head <= head && head < task.head + task.num_heads) visit(task.state + head - task.head);
        }
      };
      float peak = -INFINITY;
      each([&](size_t i) { peak = std::max(peak, states_[i].max); });
      double total = 0;
      int64_t rows = 0, visited = 0;
      std::fill_n(out, geometry_.head_dim, 0.0f);
      each([&](size_t i) {
        const PartialState& state = states_[i];
        rows += static_cast<int64_t>(rows_[i]);
        visited += static_cast<int64_t>(visited_[i]);
        if (rows_[i] == 0) return;
        const float weight = std::exp(state.max - peak);
        total += double{weight} * state.sum;
        for (uint32_t d = 0; d < geometry_.head_dim; ++d) out[d] += weight * state.out[d];
      });
      const float inverse = total > 0 ? static_cast<float>(1 / total) : 0;
      for (uint32_t d = 0; d < geometry_.head_dim; ++d) out[d] *= inverse;
      result_.lse[at] = total > 0 ? static_cast<float>(peak + std::log(total)) : -INFINITY;
      result_.rows_read[at] = rows;
      if (result_.visited) result_.visited[at] = visited;
    }
  }

  const Kernels& k_;
  const Geometry& geometry_;
  const Scoring scoring_;
  const AttendResult& result_;
  PreparedQueries queries_;
  std::vector<Task> tasks_;
  std::vector<size_t> group_of_, rows_, visited_;  // the last two: of each state
  std::vector<Group> groups_;
  std::vector<PartialState> states_;
  std::vector<float> outs_;
  std::atomic<int64_t> draw_ns_{0}, drawn_ns_{0}, exact_ns_{0};
};

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

}  // namespace

Timing attend(const Geometry& geometry, const std::vector<std::vector<Run>>& batch, const char* queries, RowType type,
              Scoring scoring, bool exact, const AttendResult& result) {
  return Call(geometry, batch, queries, type, scoring, exact, result).run();
}

std::vector<Sample> sample(const Geometry& geometry, const std::vector<Run>& runs, const char* queries, RowType type,
                           float scale) {
  const Kernels& k = kernels();
  PreparedQueries prepared(k, geometry, queries, type, geometry.num_heads, geometry.indexed(), scale);
  if (geometry.scan) set_thresholds(k, geometry, {runs}, prepared);
  std::vector<Sample> samples(geometry.num_heads);
  parallel_for(geometry.num_kv_heads, [&](size_t head) {
    const auto kv_head = static_cast<uint32_t>(head);
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
