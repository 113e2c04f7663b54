#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>

#include "dispatch.h"
#include "queries.h"
#include "states.h"
#include "stopwatch.h"
#include "threads.h"
#include "threshold.h"

namespace magicpig {

namespace {

constexpr uint32_t kExactRows = 4096;  // of one exact part; fixed, so that results depend on neither threads nor batch

// A range of a run's rows: read whole, or drawn from by the run's index. Each query head of the group has a
// PartialState of it.
struct Part {
  const Run* run;
  uint32_t first, count;
  bool drawn;
  size_t piece;  // of rows that were drawn elsewhere: the run's first
};

// The parts of one KV head of one sequence; whoever finishes its last task merges their states.
struct Group {
  size_t sequence;
  uint32_t kv_head;
  size_t first_part, end_part;
  std::atomic<size_t> left;        // tasks
  std::atomic<size_t> whole_left;  // of them, parts that are read whole
  std::atomic<bool> ready;         // its thresholds are set
};

enum Work { kAttend, kSetThresholds };

struct Task {
  Work work;
  size_t group, part;
  uint32_t head, num_heads;  // the first query head, within the group
};

class Call {
 public:
  Call(const Geometry& geometry, const std::vector<std::vector<Run>>& batch, const char* queries, RowType type,
       Scoring scoring, bool exact, const AttendResult& result, const Found& found)
      : k_(kernels()),
        geometry_(geometry),
        batch_(batch),
        scoring_(scoring),
        result_(result),
        heads_(geometry.group()),
        elsewhere_(found.rows),
        queries_(k_, geometry, queries, type, batch.size() * geometry.num_heads,
                 !exact && !elsewhere_ && any_index(batch), scoring.scale, found.signs) {
    plan(exact);
  }

  Timing run() {
    parallel_for(tasks_.size(), [&](size_t i) {
      const Task& task = tasks_[i];
      Group& group = groups_[task.group];
      task.work == kSetThresholds ? find_thresholds(group) : attend_part(group, task);
      if (group.left.fetch_sub(1, std::memory_order_acq_rel) == 1) merge(group);
    });
    for (Group& group : groups_)
      if (group.first_part == group.end_part) merge(group);
    return {draw_ns_ * 1e-9, drawn_ns_ * 1e-9, exact_ns_ * 1e-9};
  }

 private:
  static bool any_index(const std::vector<std::vector<Run>>& batch) {
    for (const auto& runs : batch)
      for (const Run& run : runs)
        if (run.index) return true;
    return false;
  }

  void plan(bool exact) {
    groups_ = std::vector<Group>(batch_.size() * geometry_.num_kv_heads);
    for (size_t g = 0; g < groups_.size(); ++g) {
      Group& group = groups_[g];
      group.sequence = g / geometry_.num_kv_heads;
      group.kv_head = static_cast<uint32_t>(g % geometry_.num_kv_heads);
      group.first_part = parts_.size();
      size_t piece = 0;
      for (const Run& run : batch_[group.sequence]) {
        const bool drawn = run.index && !exact;
        const uint32_t rows = drawn ? run.index->tokens_at_once() : kExactRows;
        for (uint32_t first = 0; first < run.num_tokens; first += rows)
          parts_.push_back({&run, first, std::min(rows, run.num_tokens - first), drawn, piece});
        if (drawn) piece += num_pieces(run.num_tokens);
      }
      group.end_part = parts_.size();
    }
    plan_tasks(draws_by_codes() && !exact);
    const size_t num_states = parts_.size() * heads_, stride = (geometry_.dim() + 31) / 32 * 32;
    outs_.reset(new float[num_states * stride]);  // kernels begin by clearing theirs
    states_.resize(num_states);
    rows_.resize(num_states);
    visited_.resize(num_states);
    for (size_t i = 0; i < num_states; ++i) states_[i].out = outs_.get() + i * stride;
  }

  // Tasks are begun in their order. Those that wait for others come after them: no barrier is needed.
  void plan_tasks(bool staged) {
    const auto add = [&](bool whole, bool drawn) {
      for (size_t g = 0; g < groups_.size(); ++g)
        for (size_t p = groups_[g].first_part; p < groups_[g].end_part; ++p)
          if (parts_[p].drawn ? drawn : whole) add_part(g, p);
    };
    if (!staged) {
      add(true, true);
    } else {
      add(true, false);
      for (Group& group : groups_) {
        group.whole_left = group.left.load();
        if (group.left == group.end_part - group.first_part) continue;
        tasks_.push_back({kSetThresholds, static_cast<size_t>(&group - groups_.data()), 0, 0, 0});
        ++group.left;
      }
      add(false, true);
    }
  }

  void add_part(size_t group, size_t part) {
    const uint32_t heads = parts_[part].drawn ? parts_[part].run->index->heads_at_once(heads_) : heads_;
    for (uint32_t h = 0; h < heads_; h += heads) {
      tasks_.push_back({kAttend, group, part, h, heads});
      ++groups_[group].left;
    }
  }

  void find_thresholds(Group& group) {
    struct Ready {  // whatever happens: others wait for it
      ~Ready() { flag.store(true, std::memory_order_release); }
      std::atomic<bool>& flag;
    } ready{group.ready};
    std::vector<Near> near(heads_);
    std::vector<float> outs(heads_ * geometry_.dim());
    if (geometry_.scan->target_error > 0) {
      wait_until([&] { return group.whole_left.load(std::memory_order_acquire) == 0; });
      for (uint32_t h = 0; h < heads_; ++h) {
        float* out = outs.data() + h * geometry_.dim();
        near[h] = {merged(group, h, false, geometry_.dim(), out), out};
      }
    }
    const Stopwatch watch;
    const size_t query = group.sequence * geometry_.num_heads + group.kv_head * heads_;
    set_thresholds(k_, geometry_, batch_[group.sequence], group.kv_head, query, near.data(), queries_,
                   result_.predicted ? result_.predicted + query : nullptr);
    draw_ns_ += nanoseconds(watch.seconds());
  }

  void attend_part(Group& group, const Task& task) {
    const Part& part = parts_[task.part];
    const size_t query = group.sequence * geometry_.num_heads + group.kv_head * heads_ + task.head,
                 state = task.part * heads_ + task.head;
    RowsArgs args = rows_args(geometry_, *part.run, group.kv_head, queries_, query);
    args.scale = scoring_.scale;
    args.softcap = scoring_.softcap;
    if (!part.drawn) {
      const Stopwatch watch;
      args.rows = static_cast<const char*>(args.rows) + part.first * geometry_.row_bytes();
      args.count = part.count;
      args.num_heads = task.num_heads;
      k_.attend[geometry_.type](args, &states_[state]);
      std::fill_n(rows_.begin() + static_cast<std::ptrdiff_t>(state), task.num_heads, part.count);
      exact_ns_ += nanoseconds(watch.seconds());
      group.whole_left.fetch_sub(1, std::memory_order_acq_rel);
      return;
    }
    if (draws_by_codes()) wait_until([&] { return group.ready.load(std::memory_order_acquire); });
    static thread_local std::vector<Drawn> drawn;
    drawn.resize(task.num_heads);
    const Stopwatch watch;
    if (!elsewhere_) {
      part.run->index->draw(
          {queries_, query, task.num_heads, group.kv_head, part.run->rows(group.kv_head), part.first, part.count},
          drawn.data());
    }
    const double drawing = watch.seconds();
    for (uint32_t h = 0; h < task.num_heads; ++h) {
      if (elsewhere_) drawn[h] = elsewhere_->of(query + h, part.piece, part.first, part.count);
      choose(drawn[h], args);
      args.queries = queries_.view(query + h);
      k_.attend[geometry_.type](args, &states_[state + h]);
      rows_[state + h] = drawn[h].count;
      visited_[state + h] = drawn[h].visited;
    }
    draw_ns_ += nanoseconds(drawing);
    drawn_ns_ += nanoseconds(watch.seconds() - drawing);
  }

  bool draws_by_codes() const { return geometry_.scan && !elsewhere_; }

  static int64_t nanoseconds(double seconds) { return static_cast<int64_t>(seconds * 1e9); }

  // Output [dim] and log-sum-exp of a head of the group over its parts: all, or those that are read whole.
  float merged(const Group& group, uint32_t head, bool all, uint32_t dim, float* out) const {
    const auto each = [&](auto&& visit) {
      for (size_t p = group.first_part; p < group.end_part; ++p) {
        const size_t i = p * heads_ + head;
        if ((all || !parts_[p].drawn) && rows_[i]) visit(states_[i]);
      }
    };
    return merge_states(each, dim, out);
  }

  void merge(const Group& group) {
    for (uint32_t h = 0; h < heads_; ++h) {
      const size_t at = group.sequence * geometry_.num_heads + group.kv_head * heads_ + h;
      result_.lse[at] = merged(group, h, true, geometry_.head_dim, result_.out + at * geometry_.head_dim);
      size_t rows = 0, visited = 0;
      for (size_t p = group.first_part; p < group.end_part; ++p) {
        rows += rows_[p * heads_ + h];
        visited += visited_[p * heads_ + h];
      }
      result_.rows_read[at] = static_cast<int64_t>(rows);
      if (result_.visited) result_.visited[at] = static_cast<int64_t>(visited);
    }
  }

  const Kernels& k_;
  const Geometry& geometry_;
  const std::vector<std::vector<Run>>& batch_;
  const Scoring scoring_;
  const AttendResult& result_;
  const uint32_t heads_;  // of a group
  const DrawnRows* elsewhere_;
  PreparedQueries queries_;
  std::vector<Part> parts_;
  std::vector<Task> tasks_;
  std::vector<size_t> rows_, visited_;  // of each state
  std::vector<Group> groups_;
  std::vector<PartialState> states_;
  std::unique_ptr<float[]> outs_;
  std::atomic<int64_t> draw_ns_{0}, drawn_ns_{0}, exact_ns_{0};
};

}  // namespace

Timing attend(const Geometry& geometry, const std::vector<std::vector<Run>>& batch, const char* queries, RowType type,
              Scoring scoring, bool exact, const AttendResult& result, const Found& found) {
  return Call(geometry, batch, queries, type, scoring, exact, result, found).run();
}

}  // namespace magicpig
