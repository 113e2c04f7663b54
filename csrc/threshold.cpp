#include "threshold.h"

#include <algorithm>

#include "codes.h"
#include "threads.h"

namespace magicpig {

namespace {

constexpr size_t kBlocks = 256;  // of sixteen keys each, that a threshold is found from

// log(0.5 / log(2)^2): how much larger probabilities are, on average, than the powers that they interpolate.
constexpr float kLogExcess = 0.0398967f;

// Blocks of codes of one sequence, laid end to end.
struct Blocks {
  std::vector<const Codes*> segments;
  size_t total = 0, tokens = 0;

  explicit Blocks(const std::vector<Run>& runs) {
    for (const Run& run : runs) {
      if (!run.index) continue;
      segments.push_back(static_cast<const Codes*>(run.index));
      total += segments.back()->num_blocks();
      tokens += run.num_tokens;
    }
  }
};

void find(const Kernels& kernels, const Geometry& geometry, const Blocks& blocks, size_t query, uint32_t kv_head,
          PreparedQueries& queries) {
  const double tokens = static_cast<double>(blocks.tokens);
  const double rows = std::max(double{geometry.scan->budget} * tokens, static_cast<double>(geometry.scan->min_rows));
  if (rows >= tokens) return;  // every row, as thresholds are at first
  const uint32_t group = geometry.group();
  const size_t count = std::min(kBlocks, blocks.total), keys = count * kCodeBlock;
  const Ask ask = {queries, query, group, kv_head, nullptr, 0, 0};
  std::vector<float> logs(group * keys), part(group * keys), scratch(keys);
  std::vector<size_t> places;
  size_t start = 0, done = 0, absent = 0;
  for (const Codes* segment : blocks.segments) {
    places.clear();
    for (size_t i = done; i < count && i * blocks.total / count < start + segment->num_blocks(); ++i)
      places.push_back(i * blocks.total / count - start);
    absent += segment->logs(ask, places.data(), places.size(), part.data());
    for (size_t i = 0; i < places.size(); ++i)
      for (uint32_t h = 0; h < group; ++h)
        std::copy_n(&part[(i * group + h) * kCodeBlock], kCodeBlock, &logs[h * keys + (done + i) * kCodeBlock]);
    done += places.size();
    start += segment->num_blocks();
  }
  const auto wanted = static_cast<float>(rows / tokens * static_cast<double>(keys - absent));
  for (uint32_t h = 0; h < group; ++h) {
    queries.scan().log_thresholds[query + h] =
        kernels.log_threshold(logs.data() + h * keys, keys, wanted, scratch.data()) + kLogExcess;
  }
}

}  // namespace

void set_thresholds(const Kernels& kernels, const Geometry& geometry, const std::vector<std::vector<Run>>& batch,
                    PreparedQueries& queries) {
  parallel_for(batch.size() * geometry.num_kv_heads, [&](size_t i) {
    const Blocks blocks(batch[i / geometry.num_kv_heads]);
    if (!blocks.total) return;
    const auto kv_head = static_cast<uint32_t>(i % geometry.num_kv_heads);
    find(kernels, geometry, blocks, i * geometry.group(), kv_head, queries);
  });
}

}  // namespace magicpig
