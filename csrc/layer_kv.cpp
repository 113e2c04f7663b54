#include "layer_kv.h"

#include <pthread.h>

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>

namespace magicpig {

namespace {

// When this many segments of about one size (one power of kFanout) stand at the end of the list they become one. So the
// list stays short, and a token is copied, and hashed where its segment has an index, a few times per power:
// log(length) times in all, eight powers at most.
constexpr uint32_t kFanout = 4;

uint32_t size_class(size_t tokens) {
  uint32_t level = 0;
  for (; tokens >= kFanout; tokens /= kFanout) ++level;
  return level;
}

// Appends `count` to a list of segment sizes, in full segments and a rest.
void add_pieces(size_t count, std::vector<size_t>& sizes) {
  for (; count > Segment::kMaxTokens; count -= Segment::kMaxTokens) sizes.push_back(Segment::kMaxTokens);
  if (count) sizes.push_back(count);
}

// Merges small segments at the end of the list of sizes; returns how many at its beginning stay as they are.
size_t merge_small(size_t num_old, std::vector<size_t>& sizes) {
  size_t kept = num_old;
  for (;;) {
    // The segments at the end that are no larger than the last one, by class. A full segment stays as it is.
    const uint32_t level = size_class(sizes.back());
    size_t begin = sizes.size(), total = 0;
    while (begin > 0 && size_class(sizes[begin - 1]) <= level && sizes[begin - 1] < Segment::kMaxTokens)
      total += sizes[--begin];
    if (sizes.size() - begin < kFanout) return kept;
    sizes.resize(begin);
    add_pieces(total, sizes);
    kept = std::min(kept, begin);
  }
}

void require(bool fine, const std::string& message) {
  if (!fine) throw std::invalid_argument(message);
}

// Segments of the given sizes from the source's tokens. All rows are checked and copied before the first is indexed.
SegmentList build(const Geometry& geometry, const Source& source, const std::vector<size_t>& sizes) {
  std::vector<std::shared_ptr<Segment>> fresh;
  require_memory(std::accumulate(sizes.begin(), sizes.end(), size_t{0}) * geometry.num_kv_heads * geometry.row_bytes());
  size_t first = 0;
  for (size_t size : sizes) {
    fresh.push_back(std::make_shared<Segment>(geometry, source, first, static_cast<uint32_t>(size)));
    first += size;
  }
  for (const auto& segment : fresh) segment->build_index(geometry);
  return SegmentList(fresh.begin(), fresh.end());
}

// The first `kept` segments of a list, and others behind them.
std::shared_ptr<const SegmentList> joined(const SegmentList& list, size_t kept, const SegmentList& others) {
  auto longer = std::make_shared<SegmentList>(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(kept));
  longer->insert(longer->end(), others.begin(), others.end());
  return longer;
}

// Guards the list pointers of all LayerKVs, for a copy or a swap at a time. One for all, so that a process can be
// forked while other threads are at work: the child gets it free.
std::mutex list_mutex;
const int fork_handlers =
    pthread_atfork([] { list_mutex.lock(); }, [] { list_mutex.unlock(); }, [] { list_mutex.unlock(); });

}  // namespace

LayerKV::LayerKV(Geometry geometry) : geometry_(std::move(geometry)), list_(std::make_shared<SegmentList>()) {
  const Geometry& g = geometry_;
  require(g.num_kv_heads >= 1, "num_kv_heads must be at least 1, not " + std::to_string(g.num_kv_heads));
  require(g.num_heads >= 1 && g.num_heads % g.num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads (" +
                                                                     std::to_string(g.num_kv_heads) + "), not " +
                                                                     std::to_string(g.num_heads));
  require(g.head_dim >= 8 && g.head_dim <= kMaxDim && g.head_dim % 8 == 0,
          "head_dim must be a multiple of 8 from 8 to 256, not " + std::to_string(g.head_dim));
  require(!g.lsh || g.lsh->head_dim == g.head_dim, "index was made for another head_dim");
  require(!g.scan || g.scan->head_dim == g.head_dim, "index was made for another head_dim");
  require(!g.lsh || !g.scan, "a layer has one index");
}

std::shared_ptr<const SegmentList> LayerKV::segments() const {
  std::lock_guard<std::mutex> lock(list_mutex);
  return list_;
}

void LayerKV::append(const TensorView& keys, const TensorView& values, size_t count) {
  if (count == 0) return;
  const auto check_length = [&](const SegmentList& list) {
    require(num_tokens(list) + count <= INT32_MAX, "keys would make the sequence longer than 2,147,483,647 tokens");
  };
  const std::shared_ptr<const SegmentList> old = segments();
  check_length(*old);
  std::vector<size_t> sizes;
  for (const auto& segment : *old) sizes.push_back(segment->num_tokens());
  add_pieces(count, sizes);
  const auto kept = static_cast<std::ptrdiff_t>(merge_small(old->size(), sizes));
  sizes.erase(sizes.begin(), sizes.begin() + kept);
  SegmentList fresh = build(geometry_, {SegmentList(old->begin() + kept, old->end()), keys, values}, sizes);
  {
    std::lock_guard<std::mutex> lock(list_mutex);
    if (list_ == old) {
      list_ = joined(*old, static_cast<size_t>(kept), fresh);
      return;
    }
  }
  // Another append was quicker. The new tokens alone can go behind any list; a later append merges them.
  sizes.clear();
  add_pieces(count, sizes);
  fresh = build(geometry_, {{}, keys, values}, sizes);
  std::lock_guard<std::mutex> lock(list_mutex);
  check_length(*list_);
  list_ = joined(*list_, list_->size(), fresh);
}

void LayerKV::adopt(std::shared_ptr<const Segment> segment) {
  std::lock_guard<std::mutex> lock(list_mutex);
  require(num_tokens(*list_) + segment->num_tokens() <= INT32_MAX,
          "the sequence would be longer than 2,147,483,647 tokens");
  list_ = joined(*list_, list_->size(), {std::move(segment)});
}

std::unique_ptr<LayerKV> LayerKV::fork() const {
  auto copy = std::make_unique<LayerKV>(geometry_);
  copy->list_ = segments();
  return copy;
}

}  // namespace magicpig
