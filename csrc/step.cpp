#include "step.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "dispatch.h"

namespace magicpig {

namespace {

// Adds a token to each window, and takes them back unless told that all went well.
class Appended {
 public:
  explicit Appended(const std::vector<StepSequence>& batch) : batch_(batch) {}
  ~Appended() {
    for (size_t i = 0; i < count_; ++i) batch_[i].window->drop(batch_[i].window->num_tokens() - 1, 1);
  }
  bool append(const BatchView& keys, const BatchView& values) {
    Window& window = *batch_[count_].window;
    const bool fine = window.append(token(keys, "keys"), token(values, "values"), 1);
    ++count_;
    return fine;
  }
  void keep() { count_ = 0; }

 private:
  TensorView token(const BatchView& view, const char* name) const {
    return {view.data + count_ * view.batch_stride * element_bytes(view.type), view.type, view.head_stride, 0, name};
  }

  const std::vector<StepSequence>& batch_;
  size_t count_ = 0;
};

bool all_finite(const Geometry& geometry, const char* queries, RowType type, std::vector<float>& scratch) {
  scratch.resize(size_t{geometry.num_heads} * geometry.dim());
  return kernels().pack[type][kF32](queries, geometry.head_dim, geometry.num_heads, geometry.head_dim, scratch.data(),
                                    geometry.dim(), geometry.dim()) == geometry.num_heads;
}

// Writes `count` vectors of floats in another type, densely.
void convert(const float* in, size_t count, uint32_t head_dim, RowType type, char* out) {
  const auto pack = kernels().pack[kF32][type];
  const uint32_t dim = padded_dim(head_dim);
  const size_t bytes = head_dim * element_bytes(type);
  if (dim == head_dim) {
    pack(in, head_dim, count, head_dim, out, head_dim, dim);
    return;
  }
  alignas(64) char padded[kMaxDim * sizeof(float)];
  for (size_t i = 0; i < count; ++i) {
    pack(in + i * head_dim, head_dim, 1, head_dim, padded, dim, dim);
    std::memcpy(out + i * bytes, padded, bytes);
  }
}

}  // namespace

void step(const std::vector<StepSequence>& batch, const StepArgs& args) {
  const Geometry& geometry = batch[0].window->geometry();
  const size_t heads = geometry.num_heads, query_bytes = heads * geometry.head_dim * element_bytes(args.type);
  std::vector<bool> fine(batch.size());
  std::vector<float> scratch;
  Appended appended(batch);
  for (size_t i = 0; i < batch.size(); ++i) {
    const bool finite = appended.append(args.keys, args.values);
    fine[i] = all_finite(geometry, args.queries + i * query_bytes, args.type, scratch) && finite;
  }

  // A sequence with bad numbers attends to nothing, with a query of zeros.
  std::vector<char> copied;
  const char* queries = args.queries;
  if (std::count(fine.begin(), fine.end(), false)) {
    copied.assign(args.queries, args.queries + batch.size() * query_bytes);
    for (size_t i = 0; i < batch.size(); ++i)
      if (!fine[i]) std::fill_n(copied.begin() + static_cast<std::ptrdiff_t>(i * query_bytes), query_bytes, 0);
    queries = copied.data();
  }

  std::vector<std::shared_ptr<const SegmentList>> kept;
  std::vector<std::vector<Run>> runs(batch.size());
  for (size_t i = 0; i < batch.size(); ++i) {
    if (!fine[i]) continue;
    if (batch[i].far) {
      kept.push_back(batch[i].far->segments());
      runs[i] = runs_of(*kept.back());
    }
    runs[i].push_back(batch[i].window->newest(args.span));
  }

  std::vector<float> out(batch.size() * heads * geometry.head_dim), lse(batch.size() * heads);
  std::vector<int64_t> rows(batch.size() * heads), visited(batch.size() * heads);
  const Timing timing = attend(geometry, runs, queries, args.type, args.scoring, false,
                               {out.data(), lse.data(), rows.data(), visited.data(), nullptr});
  for (size_t i = 0; i < batch.size(); ++i) {
    if (!fine[i]) std::fill_n(out.data() + i * heads * geometry.head_dim, heads * geometry.head_dim, NAN);
    Reads& reads = batch[i].window->reads;
    uint64_t read = 0, there = 0;
    for (size_t h = 0; h < heads; ++h) {
      read += static_cast<uint64_t>(rows[i * heads + h]);
      reads.visited += static_cast<uint64_t>(visited[i * heads + h]);
    }
    for (const Run& run : runs[i]) there += heads * run.num_tokens;
    const uint64_t near = runs[i].empty() ? 0 : heads * runs[i].back().num_tokens;
    reads.rows += read;
    reads.tokens += there;
    reads.far_rows += read - near;
    reads.far_tokens += there - near;
    ++reads.steps;
  }
  convert(out.data(), batch.size() * heads, geometry.head_dim, args.type, args.out);
  Timing& spent = batch[0].window->spent;
  spent.draw += timing.draw;
  spent.drawn += timing.drawn;
  spent.exact += timing.exact;
  appended.keep();
}

}  // namespace magicpig
