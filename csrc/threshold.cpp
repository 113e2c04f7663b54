#include "threshold.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "codes.h"

namespace magicpig {

namespace {

// Of an eighth of the keys, in blocks of sixteen: so many blocks at least, where there are as many, and at most.
constexpr size_t kShare = 8, kLeastBlocks = 64, kMostBlocks = 256;

// log(0.5 / log(2)^2): how much larger probabilities are, on average, than the powers that they interpolate.
constexpr float kLogExcess = 0.0398967f;

// Of a multiple of sixteen numbers.
double sum_of(const float* x, size_t count) {
  double sums[kCodeBlock] = {};
  for (size_t i = 0; i < count; i += kCodeBlock)
    for (size_t k = 0; k < kCodeBlock; ++k) sums[k] += double{x[i + k]};
  return std::accumulate(sums, sums + kCodeBlock, 0.0);
}

// Which of `total` blocks is the i-th of `count`: one of each of as many equal stretches, somewhere in it. At equal
// distances text that repeats itself in step with them would show one side of itself only. Also in device_scan.py.
size_t block_at(size_t i, size_t total, size_t count) {
  if (count == total) return i;
  const size_t begin = i * total / count, end = (i + 1) * total / count;
  uint32_t where = static_cast<uint32_t>(i) * 0x9e3779b1u;
  where = (where ^ where >> 15) * 0x85ebca6bu;
  where = (where ^ where >> 13) * 0xc2b2ae35u;
  return begin + static_cast<size_t>(uint64_t{where ^ where >> 16} * (end - begin) >> 32);
}

// What a thread has at hand to find thresholds with: they may be looked for among all keys, in every step.
struct Room {
  std::vector<float> logs, biases, terms, scratch;
};
Room& room() {
  static thread_local Room own;
  return own;
}

// Keys of one KV head from all over a sequence. One at a time in a thread.
struct Subsample {
  struct Part {
    const Codes* segment;
    size_t count;  // of keys, padding included
  };

  Subsample(const Geometry& geometry, const std::vector<Run>& runs, const Ask& ask) : group(ask.num_heads) {
    size_t total = 0;
    for (const Run& run : runs) {
      if (!run.index) continue;
      parts.push_back({static_cast<const Codes*>(run.index), 0});
      total += parts.back().segment->num_blocks();
      tokens += run.num_tokens;
    }
    // Few keys can have most of the weight: what they add to the output no sample tells, and errors are of the output.
    const size_t count = geometry.scan->target_error > 0
                             ? total
                             : std::min(total, std::clamp(total / kShare, kLeastBlocks, kMostBlocks));
    keys = count * kCodeBlock;
    logs.resize(std::max(logs.size(), group * keys));
    const bool wanted = geometry.scan->target_error > 0;
    if (wanted) biases.resize(std::max(biases.size(), keys));
    size_t start = 0, done = 0;
    std::vector<size_t> places;
    for (Part& part : parts) {
      const size_t end = start + part.segment->num_blocks();
      places.clear();
      for (size_t i = done, block; i < count && (block = block_at(i, total, count)) < end; ++i)
        places.push_back(block - start);
      absent += part.segment->logs(ask, places, keys, logs.data() + done * kCodeBlock,
                                   wanted ? biases.data() + done * kCodeBlock : nullptr);
      done += places.size();
      start = end;
      part.count = places.size() * kCodeBlock;
    }
  }

  const float* of_head(uint32_t head) const { return logs.data() + head * keys; }
  double each() const { return static_cast<double>(tokens) / static_cast<double>(keys - absent); }  // stands for these

  uint32_t group;
  size_t keys = 0, absent = 0, tokens = 0;
  std::vector<Part> parts;
  std::vector<float>&logs = room().logs, &biases = room().biases;  // [group, keys], [keys], or more
};

// What the error of one head's output would be, by its codes: sqrt(sum_i (1 / p_i - 1) (w_i d_i)^2) / (W |o|), over
// keys of weight w_i and probability p_i whose values lie d_i from the mean value, W being the weight of all and o the
// output. Of o only the near part is known; the far part is taken for the mean value, with deviations that add up like
// random ones.
class Prediction {
 public:
  Prediction(const Kernels& kernels, const Geometry& geometry, const Subsample& sample, uint32_t kv_head, uint32_t head,
             const Near& near)
      : k_(kernels), logs_(sample.of_head(head)), count_(sample.keys), each_(sample.each()) {
    const Scan& scan = *geometry.scan;
    temper_ = scan.temper();
    terms_.resize(std::max(terms_.size(), 3 * count_));
    peak_ = std::max(k_.highest_score(logs_, sample.biases.data(), count_, temper_), near.lse);
    k_.error_terms({logs_, sample.biases.data(), count_, temper_, peak_}, terms_.data());
    const double beside = std::isinf(near.lse) ? 0 : std::exp(double{near.lse} - peak_);
    std::vector<double> out(scan.dim);
    for (uint32_t d = 0; d < scan.dim && beside > 0; ++d) out[d] = beside * near.out[d];
    double squares = 0;
    const float* mass = terms_.data();
    for (const Subsample::Part& part : sample.parts) {
      const double far = each_ * sum_of(mass, part.count);
      mass += part.count;
      for (uint32_t d = 0; d < scan.dim; ++d) out[d] += far * part.segment->mean_value(kv_head)[d];
    }
    squares += each_ * sum_of(terms_.data() + count_, count_);
    for (double x : out) squares += x * x;
    whole_ = std::sqrt(squares) / scan.optimism();
  }

  // The highest for which no more than the target is predicted. By Newton's method: the squared error is convex in the
  // threshold, and linear as long as no key becomes certain to be drawn.
  double log_threshold(double target) const {
    double log_threshold = kLargest;
    const double allowed = target * whole_ * target * whole_ / each_;
    for (;;) {
      const Light light = light_below(log_threshold);
      if (!(light.slope > 0)) return log_threshold;
      const double next = std::log((allowed + light.squares) / light.slope) + double{temper_} * peak_;
      if (!(next < log_threshold)) return log_threshold;
      log_threshold = next;
    }
  }

  double error(double log_threshold) const {
    const Light light = light_below(log_threshold);
    const double squared = std::exp(log_threshold - double{temper_} * peak_) * light.slope - light.squares;
    return squared > 0 && whole_ > 0 ? std::sqrt(each_ * squared) / whole_ : 0;
  }

 private:
  struct Light {
    double slope, squares;
  };
  Light light_below(double log_threshold) const {
    float sums[2];
    k_.light_sums(logs_, terms_.data() + count_, count_, static_cast<float>(log_threshold), sums);
    return {sums[0], sums[1]};
  }

  const Kernels& k_;
  const float* logs_;
  size_t count_;
  double each_, whole_;
  float temper_, peak_;
  std::vector<float>& terms_ =
      room().terms;  // [3, keys], or more: weights, squares of what keys can change, the same over their probabilities
};

}  // namespace

void set_thresholds(const Kernels& kernels, const Geometry& geometry, const std::vector<Run>& runs, uint32_t kv_head,
                    size_t query, const Near* near, PreparedQueries& queries, float* predicted) {
  const Scan& scan = *geometry.scan;
  ScanQueries& own = queries.prepare_scan(query);
  const uint32_t group = geometry.group();
  const Subsample sample(geometry, runs, {queries, query, group, kv_head, nullptr, 0, 0});
  if (!sample.keys) return;
  const auto tokens = static_cast<double>(sample.tokens);
  const double most = std::max(double{scan.budget} * tokens, static_cast<double>(scan.min_rows));
  std::vector<float>& scratch = room().scratch;
  scratch.resize(std::max(scratch.size(), 2 * sample.keys));
  for (uint32_t h = 0; h < group; ++h) {
    const auto threshold_of = [&](double rows) {  // for so many rows of all
      return kernels.log_threshold(sample.of_head(h), sample.keys, static_cast<float>(rows / sample.each()),
                                   scratch.data());
    };
    float& threshold = own.log_thresholds[query + h];  // low enough for all rows, as yet
    if (most < tokens) threshold = threshold_of(most);
    if (scan.target_error > 0) {
      const Prediction prediction(kernels, geometry, sample, kv_head, h, near[h]);
      const auto enough = static_cast<float>(prediction.log_threshold(scan.target_error));
      if (enough > threshold && scan.min_rows < tokens)
        threshold = std::min(enough, threshold_of(std::max(1u, scan.min_rows)));
      if (predicted) predicted[h] = static_cast<float>(prediction.error(threshold));
    }
    if (threshold > -kLargest) threshold += kLogExcess;
  }
}

}  // namespace magicpig
