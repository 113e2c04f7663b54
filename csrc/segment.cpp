#include "segment.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "codes.h"
#include "dispatch.h"
#include "stopwatch.h"
#include "tables.h"
#include "threads.h"

namespace magicpig {

namespace {

constexpr const char* kTypeNames[kNumRowTypes] = {"bfloat16", "float16", "float32"};

// Tokens that a thread copies, and of which it does all heads, keys and values, before the next, where tensors have the
// heads of a token side by side.
constexpr uint32_t kTaken = 64, kAtOnce = 16;

bool by_token(const Geometry& geometry, const TensorView& tensor) {
  return tensor.head_stride <= tensor.token_stride &&
         tensor.token_stride <= size_t{2} * geometry.num_kv_heads * geometry.head_dim;
}

// Asks for part `i` of `parts` of the tokens' memory.
void prefetch(const TensorView& tensor, size_t first, size_t count, size_t i, size_t parts) {
  const size_t token_bytes = tensor.token_stride * element_bytes(tensor.type), bytes = count * token_bytes;
  const char* data = tensor.data + first * token_bytes;
  for (size_t byte = bytes * i / parts; byte < bytes * (i + 1) / parts; byte += 64)
    __builtin_prefetch(data + byte, 0, 2);
}

}  // namespace

size_t num_tokens(const SegmentList& segments) {
  size_t total = 0;
  for (const auto& segment : segments) total += segment->num_tokens();
  return total;
}

std::vector<Run> runs_of(const SegmentList& segments) {
  std::vector<Run> runs;
  for (const auto& segment : segments) runs.push_back(segment->run());
  return runs;
}

Segment::Segment(const Geometry& geometry, const Source& source, size_t first, uint32_t count)
    : num_tokens_(count),
      num_kv_heads_(geometry.num_kv_heads),
      row_bytes_(geometry.row_bytes()),
      rows_(size_t{num_kv_heads_} * count * row_bytes_) {
  const size_t old = magicpig::num_tokens(source.segments);
  const uint32_t copied = first < old ? static_cast<uint32_t>(std::min<size_t>(count, old - first)) : 0;
  if (copied) copy(source.segments, first, copied);
  if (copied < count) fill(geometry, source.keys, source.values, first + copied - old, copied, count - copied);
}

Segment::Segment(const Geometry& geometry, uint32_t count)
    : num_tokens_(count),
      num_kv_heads_(geometry.num_kv_heads),
      row_bytes_(geometry.row_bytes()),
      rows_(size_t{num_kv_heads_} * count * row_bytes_) {}

void Segment::fill(const Geometry& geometry, const TensorView& keys, const TensorView& values, size_t first,
                   uint32_t at, uint32_t count) {
  const Stopwatch watch;
  const bool heads_together = by_token(geometry, keys) && by_token(geometry, values);
  const uint32_t at_once = heads_together ? kAtOnce : kTaken;
  parallel_for((count + kTaken - 1) / kTaken, [&](size_t task) {
    const auto begin = static_cast<uint32_t>(task) * kTaken, end = std::min(begin + kTaken, count);
    for (uint32_t i = begin; i < end; i += at_once) {
      const uint32_t n = std::min(at_once, end - i), ahead = heads_together ? std::min(at_once, count - i - n) : 0;
      for (uint32_t head = 0; head < num_kv_heads_; ++head) {
        prefetch(keys, first + i + n, ahead, head, num_kv_heads_);
        prefetch(values, first + i + n, ahead, head, num_kv_heads_);
        pack(geometry, keys, head, first + i, at + i, n, 0);
        pack(geometry, values, head, first + i, at + i, n, row_bytes_ / 2);
      }
    }
  });
  row_seconds_ += watch.seconds();
}

Segment::Segment(const Geometry& geometry, uint32_t count, Buffer rows, Buffer index)
    : num_tokens_(count),
      num_kv_heads_(geometry.num_kv_heads),
      row_bytes_(geometry.row_bytes()),
      rows_(std::move(rows)) {
  if (count < 1 || count > kMaxTokens) throw std::invalid_argument("a segment has from 1 to 65,536 tokens");
  if (rows_.size() != size_t{num_kv_heads_} * count * row_bytes_)
    throw std::invalid_argument("rows have the wrong size");
  if (index.size() == 0) return;
  if (!geometry.indexed()) throw std::invalid_argument("an index belongs to layers that have one");
  if (geometry.lsh)
    index_ = std::make_unique<Tables>(geometry.lsh, geometry.type, num_kv_heads_, count, std::move(index));
  else
    index_ = std::make_unique<Codes>(geometry.scan, geometry.type, num_kv_heads_, count, std::move(index));
}

void Segment::build_index(const Geometry& geometry, const Hashed* hashed) {
  if (!geometry.indexed() || num_tokens_ < geometry.exact_below) return;
  const Kernels& k = kernels();
  if (geometry.lsh) {
    auto tables = std::make_unique<Tables>(geometry.lsh, geometry.type, num_kv_heads_, num_tokens_);
    tables->build(k, rows_.data(), hashed);
    index_ = std::move(tables);
  } else {
    index_ = std::make_unique<Codes>(k, geometry.scan, geometry.type, num_kv_heads_, num_tokens_, rows_.data());
  }
}

void Segment::copy(const SegmentList& segments, size_t first, uint32_t count) {
  const Stopwatch watch;
  parallel_for(num_kv_heads_, [&](size_t head) {
    char* out = rows_.data() + head * num_tokens_ * row_bytes_;
    size_t skip = first, left = count;
    for (const auto& part : segments) {
      const size_t from = std::min<size_t>(skip, part->num_tokens()),
                   n = std::min<size_t>(left, part->num_tokens() - from);
      std::memcpy(out, part->run().rows(static_cast<uint32_t>(head)) + from * row_bytes_, n * row_bytes_);
      out += n * row_bytes_;
      skip -= from;
      left -= n;
    }
  });
  row_seconds_ += watch.seconds();
}

// `count` rows of a head from `at` on take the tensor's tokens from `first` on, in the half of the row that starts at
// byte `half`.
void Segment::pack(const Geometry& geometry, const TensorView& tensor, uint32_t head, size_t first, uint32_t at,
                   uint32_t count, size_t half) {
  const auto pack_rows = kernels().pack[tensor.type][geometry.type];
  const size_t from = head * tensor.head_stride + first * tensor.token_stride;
  char* out = rows_.data() + (size_t{head} * num_tokens_ + at) * row_bytes_ + half;
  const size_t bad = pack_rows(tensor.data + from * element_bytes(tensor.type), tensor.token_stride, count,
                               geometry.head_dim, out, size_t{2} * geometry.dim(), geometry.dim());
  if (bad == count) return;
  throw std::invalid_argument(
      std::string(tensor.name) + " at kv head " + std::to_string(head) + ", token " + std::to_string(first + bad) +
      " is NaN or infinite, or its norm exceeds 1e18 or the range of " + kTypeNames[geometry.type]);
}

}  // namespace magicpig
