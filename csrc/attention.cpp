#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "dispatch.h"
#include "queries.h"
#include "stopwatch.h"
#include "threads.h"

namespace magicpig {

namespace {

constexpr size_t kExactRows = 4096;  // of one exact task; fixed, so that results depend on neither threads nor batch

// One query head over a run's rows, none of them chosen yet.
RowsArgs rows_args(const Geometry& geometry, const Run& run, uint32_t kv_head, const PreparedQueries& queries,
                   size_t query) {
  RowsArgs args = {};
  args.rows = run.rows(kv_head);
  args.dim = geometry.dim();
  args.num_heads = 1;
  args.queries = queries.view(query);
  return args;
}

// Chooses the rows that the index draws; they stay in `scratch`.
void draw_rows(const Tables& index, uint32_t kv_head, const PreparedQueries& queries, size_t query,
               Tables::Scratch& scratch, RowsArgs& args) {
  queries.codes(query, scratch.codes);
  args.count = index.draw(kv_head, static_cast<const char*>(args.rows), scratch);
  args.ids = scratch.ids.data();
  args.inclusion = index.inclusion(kv_head, queries.values(query), queries.inv_norm(query));
}

// Rows of one run for one query head (drawn from its index) or for all heads of a group (a range, exactly).
struct Task {
  const Run* run;
  uint32_t head;          // the first query head, within the sequence
  uint32_t num_heads;     // 1 when drawn
  uint32_t first, count;  // the range, when exact
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
        queries_(k_, geometry, queries, type, batch.size() * geometry.num_heads, !exact && any_index(batch)) {
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
        if (run.index && !exact) {
          for (uint32_t h = 0; h < group_size; ++h, ++num_states) {
            tasks_.push_back({&run, group.kv_head * group_size + h, 1, 0, 0, true, num_states});
          }
          continue;
        }
        for (size_t first = 0; first < run.num_tokens; first += kExactRows, num_states += group_size) {
          const size_t count = std::min(kExactRows, run.num_tokens - first);
          tasks_.push_back({&run, group.kv_head * group_size, group_size, static_cast<uint32_t>(first),
                            static_cast<uint32_t>(count), false, num_states});
        }
      }
      group.end_task = tasks_.size();
      group.left.store(group.end_task - group.first_task, std::memory_order_relaxed);
      group_of_.resize(tasks_.size(), g);
    }
    const size_t stride = (geometry_.dim() + 31) / 32 * 32;
    outs_.resize(num_states * stride);
    states_.resize(num_states);
    rows_of_task_.resize(tasks_.size());
    visited_by_task_.resize(tasks_.size());
    for (size_t i = 0; i < num_states; ++i) states_[i].out = outs_.data() + i * stride;
  }

  void attend_task(const Group& group, Task& task) {
    const size_t query = group.sequence * geometry_.num_heads + task.head;
    RowsArgs args = rows_args(geometry_, *task.run, group.kv_head, queries_, query);
    args.scale = scoring_.scale;
    args.softcap = scoring_.softcap;
    const Stopwatch watch;
    double drawn = 0;
    if (task.drawn) {
      static thread_local Tables::Scratch scratch;
      draw_rows(*task.run->index, group.kv_head, queries_, query, scratch, args);
      drawn = watch.seconds();
      visited_by_task_[&task - tasks_.data()] = scratch.visited;
    } else {
      args.rows = static_cast<const char*>(args.rows) + task.first * geometry_.row_bytes();
      args.count = task.count;
      args.num_heads = task.num_heads;
    }
    k_.attend[geometry_.type](args, states_.data() + task.state);
    rows_of_task_[&task - tasks_.data()] = args.count;
    draw_ns_ += static_cast<int64_t>(drawn * 1e9);
    (task.drawn ? drawn_ns_ : exact_ns_) += static_cast<int64_t>((watch.seconds() - drawn) * 1e9);
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
          if (task.head <= head && head < task.head + task.num_heads) visit(states_[task.state + head - task.head], i);
        }
      };
      float peak = -INFINITY;
      each([&](const PartialState& state, size_t) { peak = std::max(peak, state.max); });
      double total = 0;
      int64_t rows = 0, visited = 0;
      std::fill_n(out, geometry_.head_dim, 0.0f);
      each([&](const PartialState& state, size_t i) {
        rows += static_cast<int64_t>(rows_of_task_[i]);
        visited += static_cast<int64_t>(visited_by_task_[i]);
        if (rows_of_task_[i] == 0) return;
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
  const PreparedQueries queries_;
  std::vector<Task> tasks_;
  std::vector<size_t> group_of_, rows_of_task_, visited_by_task_;
  std::vector<Group> groups_;
  std::vector<PartialState> states_;
  std::vector<float> outs_;
  std::atomic<int64_t> draw_ns_{0}, drawn_ns_{0}, exact_ns_{0};
};

}  // namespace

Timing attend(const Geometry& geometry, const std::vector<std::vector<Run>>& batch, const char* queries, RowType type,
              Scoring scoring, bool exact, const AttendResult& result) {
  return Call(geometry, batch, queries, type, scoring, exact, result).run();
}

std::vector<Sample> sample(const Geometry& geometry, const std::vector<Run>& runs, const char* queries, RowType type) {
  const Kernels& k = kernels();
  const PreparedQueries prepared(k, geometry, queries, type, geometry.num_heads, geometry.lsh != nullptr);
  std::vector<Sample> samples(geometry.num_heads);
  parallel_for(geometry.num_heads, [&](size_t head) {
    const uint32_t kv_head = static_cast<uint32_t>(head / geometry.group());
    Sample& sample = samples[head];
    Tables::Scratch scratch;
    int32_t start = 0;
    for (const Run& run : runs) {
      if (const Tables* index = run.index) {
        RowsArgs args = rows_args(geometry, run, kv_head, prepared, head);
        draw_rows(*index, kv_head, prepared, head, scratch, args);
        std::sort(scratch.ids.begin(), scratch.ids.begin() + args.count);
        const size_t at = sample.rows.size();
        sample.rows.resize(at + args.count);
        sample.log_probability.resize(at + args.count);
        k.log_inclusion[geometry.type](args, sample.log_probability.data() + at);
        for (size_t i = 0; i < args.count; ++i) sample.rows[at + i] = start + scratch.ids[i];
      } else {
        for (uint32_t i = 0; i < run.num_tokens; ++i) sample.rows.push_back(start + static_cast<int32_t>(i));
        sample.log_probability.resize(sample.rows.size(), 0.0f);
      }
      start += static_cast<int32_t>(run.num_tokens);
    }
  });
  return samples;
}

}  // namespace magicpig
