#include "threshold.h"

#include <algorithm>

#include "codes.h"
#include "threads.h"

namespace magicpig {

namespace {

constexpr size_t kBlocks = 256;  // of sixteen keys each, that a threshold is found from

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
  const uint32_t group = geometry.group();
  const size_t count = std::min(kBlocks, blocks.total);
  static thread_local std::vector<float> scratch;
  scratch.resize((group + 1) * count * kCodeBlock + group * kCodeBlock);
  float *logs = scratch.data(), *part = logs + group * count * kCodeBlock, *weights = part + group * kCodeBlock;
  size_t segment = 0, start = 0, keys = 0;
  for (size_t i = 0; i < count; ++i) {
    const size_t block = i * blocks.total / count;
    while (block - start >= blocks.segments[segment]->num_blocks()) start += blocks.segments[segment++]->num_blocks();
    blocks.segments[segment]->logs(queries.scan(), queries.values(0), query, group, kv_head, block - start, part);
    for (uint32_t h = 0; h < group; ++h)
      std::copy_n(part + h * kCodeBlock, kCodeBlock, logs + (h * count + i) * kCodeBlock);
    for (uint32_t k = 0; k < kCodeBlock; ++k) keys += part[k] > -1e37f;
  }
  const Scan& scan = *geometry.scan;
  const double rows = std::max(double{scan.budget} * static_cast<double>(blocks.tokens), double{scan.min_rows});
  if (rows >= static_cast<double>(blocks.tokens)) return;  // every row, as thresholds are at first
  const double share = rows / static_cast<double>(blocks.tokens);
  for (uint32_t h = 0; h < group; ++h) {
    queries.scan().log_thresholds[query + h] =
        log_threshold(kernels, logs + h * count * kCodeBlock, count * kCodeBlock, share * static_cast<double>(keys),
                      weights);
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
