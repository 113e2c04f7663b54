#include "tables.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "dot.h"
#include "queries.h"
#include "stopwatch.h"
#include "threads.h"

namespace magicpig {

namespace {

constexpr size_t kHashChunk = 192;  // rows hashed at once: their centred keys stay in the second-level cache
constexpr uint32_t kAhead = 12;     // tables whose buckets are being fetched while one is counted
constexpr size_t kPage = 4096, kTaken = size_t{2} << 20;  // bytes of memory that come together

// Drawn rows asked for before the attention over them begins: as many as a second-level cache holds without losing the
// first.
constexpr size_t kEarlyBytes = size_t{512} << 10;

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

Tables::Tables(std::shared_ptr<const Lsh> lsh, RowType type, uint32_t num_kv_heads, uint32_t num_tokens)
    : lsh_(std::move(lsh)),
      row_type_(type),
      num_kv_heads_(num_kv_heads),
      num_tokens_(num_tokens),
      row_bytes_(size_t{2} * lsh_->dim * element_bytes(type)),
      at_mean_(num_kv_heads) {
  offsets_at_ = aligned(size_t{lsh_->num_tables} * num_tokens * sizeof(uint16_t));
  norms_at_ = offsets_at_ + aligned(size_t{lsh_->num_tables} * (lsh_->num_buckets() + 1) * sizeof(uint32_t));
  mean_at_ = norms_at_ + aligned(num_tokens * sizeof(float));
  head_bytes_ = mean_at_ + aligned(lsh_->dim * sizeof(float));
}

Tables::Tables(std::shared_ptr<const Lsh> lsh, RowType type, uint32_t num_kv_heads, uint32_t num_tokens, Buffer memory)
    : Tables(std::move(lsh), type, num_kv_heads, num_tokens) {
  if (memory.size() != num_kv_heads * head_bytes_) throw std::invalid_argument("tables have the wrong size");
  memory_ = std::move(memory);
  std::atomic<bool> all{true};
  parallel_for(size_t{num_kv_heads} * lsh_->num_tables, [&](size_t i) {
    if (!valid(static_cast<uint32_t>(i / lsh_->num_tables), static_cast<uint32_t>(i % lsh_->num_tables))) all = false;
  });
  if (!all) throw std::invalid_argument("tables name rows that are not there, or one twice");
  for (uint32_t head = 0; head < num_kv_heads; ++head) find_keys_at_mean(head);
}

bool Tables::valid(uint32_t kv_head, uint32_t table) const {
  const uint32_t buckets = lsh_->num_buckets();
  const uint32_t* starts = offsets(kv_head) + size_t{table} * (buckets + 1);
  const uint16_t* begin = ids(kv_head) + size_t{table} * num_tokens_;
  // Each row once: drawing counts on it. Rows that are there are as many as ids, so all are, or one is named twice.
  std::array<uint8_t, 65536> named;
  std::fill_n(named.begin(), num_tokens_, uint8_t{0});
  for (uint32_t i = 0; i < num_tokens_; ++i) named[begin[i]] = 1;
  const uint32_t there = std::accumulate(named.begin(), named.begin() + num_tokens_, uint32_t{0});
  return starts[0] == 0 && starts[buckets] == num_tokens_ && std::is_sorted(starts, starts + buckets + 1) &&
         there == num_tokens_;
}

void Tables::find_keys_at_mean(uint32_t kv_head) {
  at_mean_[kv_head].clear();  // of a build that failed
  for (uint32_t i = 0; i < num_tokens_; ++i)
    if (inv_norms(kv_head)[i] == 0) at_mean_[kv_head].push_back(static_cast<uint16_t>(i));
}

void Tables::take_memory(uint32_t count) {
  const auto end_of = [&](uint32_t tokens) { return num_kv_heads_ * head_bytes_ / num_tokens_ * tokens; };
  if (memory_.size() == 0) memory_ = Buffer(num_kv_heads_ * head_bytes_);
  const size_t first = end_of(num_taken_), last = end_of(num_taken_ = std::min(num_tokens_, num_taken_ + count));
  parallel_for((last - first + kTaken - 1) / kTaken, [&](size_t i) {
    const size_t begin = first + i * kTaken;
    for (size_t byte = begin; byte < std::min(begin + kTaken, last); byte += kPage) memory_.data()[byte] = 0;
  });
}

void Tables::build(const Kernels& kernels, const char* rows, const Hashed* hashed) {
  const size_t num_words = size_t{lsh_->num_groups} * num_tokens_,
               bit_bytes = hashed ? 0 : num_words * sizeof(uint16_t);
  const bool sorted = hashed && !hashed->signs;
  const bool taken = memory_.size() > 0;
  require_memory((taken ? 0 : num_kv_heads_ * head_bytes_) + bit_bytes);
  if (!taken) memory_ = Buffer(num_kv_heads_ * head_bytes_);
  zero_gaps();
  Buffer bit_memory(bit_bytes);
  uint16_t* bits = reinterpret_cast<uint16_t*>(bit_memory.data());
  const uint32_t at_once = hashed ? num_kv_heads_ : 1;  // heads: there is room for bits of one
  for (uint32_t first = 0; first < num_kv_heads_; first += at_once) {
    const Stopwatch hashing;
    if (hashed) {
      take(*hashed);
    } else {
      hash(kernels, rows, first, bits);
    }
    for (uint32_t head = first; head < first + at_once; ++head) find_keys_at_mean(head);
    code_seconds_ += hashing.seconds();
    const Stopwatch sorting;
    std::atomic<bool> fine{true};
    parallel_for(size_t{at_once} * lsh_->num_tables, [&](size_t task) {
      const auto head = first + static_cast<uint32_t>(task / lsh_->num_tables);
      const auto table = static_cast<uint32_t>(task % lsh_->num_tables);
      if (sorted) {
        if (!take_table(*hashed, head, table)) fine = false;
        return;
      }
      sort_into_buckets(hashed ? hashed->signs + head * num_words : bits, head, table);
    });
    if (!fine) throw std::invalid_argument("tables must have each row once, and buckets one behind the other");
    sort_seconds_ += sorting.seconds();
  }
}

void Tables::zero_gaps() const {
  const size_t ends[] = {lsh_->num_tables * sizeof(uint16_t) * num_tokens_,
                         offsets_at_ + size_t{lsh_->num_tables} * (lsh_->num_buckets() + 1) * sizeof(uint32_t),
                         norms_at_ + num_tokens_ * sizeof(float), mean_at_ + lsh_->dim * sizeof(float)};
  const size_t next[] = {offsets_at_, norms_at_, mean_at_, head_bytes_};
  for (uint32_t head = 0; head < num_kv_heads_; ++head)
    for (size_t i = 0; i < 4; ++i) std::memset(memory_.data() + head * head_bytes_ + ends[i], 0, next[i] - ends[i]);
}

void Tables::take(const Hashed& hashed) const {
  const uint32_t head_dim = lsh_->head_dim;
  std::atomic<bool> fine{true};
  parallel_for(num_kv_heads_, [&](size_t i) {
    const auto head = static_cast<uint32_t>(i);
    std::fill_n(std::copy_n(hashed.means + i * head_dim, head_dim, mean(head)), lsh_->dim - head_dim, 0.0f);
    std::copy_n(hashed.inv_norms + i * num_tokens_, num_tokens_, inv_norms(head));
    const auto finite = [](float x) { return std::isfinite(x); };
    if (!std::all_of(mean(head), mean(head) + head_dim, finite)) fine = false;
    for (uint32_t k = 0; k < num_tokens_; ++k)
      if (!(inv_norms(head)[k] >= 0 && inv_norms(head)[k] <= 1 / kMinNorm)) fine = false;
  });
  if (!fine) throw std::invalid_argument("means and inv_norms must be numbers, and norms no smaller than 1e-12");
}

bool Tables::take_table(const Hashed& hashed, uint32_t kv_head, uint32_t table) const {
  const size_t borders = lsh_->num_buckets() + 1, place = size_t{kv_head} * lsh_->num_tables + table;
  std::copy_n(hashed.offsets + place * borders, borders, offsets(kv_head) + table * borders);
  std::copy_n(hashed.ids + place * num_tokens_, num_tokens_, ids(kv_head) + size_t{table} * num_tokens_);
  return valid(kv_head, table);
}

// Means, norms, and signs of projections, of one head's keys.
void Tables::hash(const Kernels& kernels, const char* rows, uint32_t kv_head, uint16_t* bits) const {
  const char* keys = rows + size_t{kv_head} * num_tokens_ * row_bytes_;
  const uint32_t dim = lsh_->dim;
  mean_of(kernels, row_type_, keys, num_tokens_, dim, dim, mean(kv_head));
  const double mean_norm = std::sqrt(dot(mean(kv_head), mean(kv_head), dim));
  const float tolerance = std::max(kMinNorm, kAtMean * static_cast<float>(mean_norm));
  parallel_for((num_tokens_ + kHashChunk - 1) / kHashChunk, [&](size_t part) {
    const size_t first = part * kHashChunk, count = std::min(kHashChunk, num_tokens_ - first);
    static thread_local std::vector<float> scratch;
    scratch.resize((2 * kHashChunk + 8) * dim);
    float* centred = scratch.data() + (kHashChunk + 8) * dim;
    kernels.centre[row_type_](keys + first * row_bytes_, count, dim, mean(kv_head), tolerance, centred,
                              inv_norms(kv_head) + first);
    kernels.hash(centred, count, dim, lsh_->panels.data(), lsh_->num_groups, bits + first, num_tokens_, scratch.data());
  });
}

void Tables::sort_into_buckets(const uint16_t* bits, uint32_t kv_head, uint32_t table) const {
  const uint32_t buckets = lsh_->num_buckets(), count = num_tokens_, in_fours = count / 4 * 4;
  uint32_t* starts = offsets(kv_head) + size_t{table} * (buckets + 1);
  uint16_t* out = ids(kv_head) + size_t{table} * count;
  static thread_local std::vector<uint16_t> code_memory;
  static thread_local std::vector<uint32_t> place_memory;
  code_memory.resize(count);
  place_memory.assign(4 * buckets, 0);
  uint16_t* codes = code_memory.data();
  lsh_->codes(bits, count, table, codes);
  // Four codes at a time, with counts of their own: neighbours are often alike, and one would wait for the other.
  uint32_t *places = place_memory.data(), *second = places + buckets, *third = second + buckets,
           *fourth = third + buckets;
  const auto four_codes = [&](uint32_t i) {
    uint64_t word;
    std::memcpy(&word, codes + i, sizeof word);
    return word;
  };
  for (uint32_t i = 0; i < in_fours; i += 4) {
    const uint64_t word = four_codes(i);
    ++places[word & 0xffff];
    ++second[word >> 16 & 0xffff];
    ++third[word >> 32 & 0xffff];
    ++fourth[word >> 48];
  }
  for (uint32_t i = in_fours; i < count; ++i) ++places[codes[i]];
  uint32_t total = 0;
  for (uint32_t b = 0; b < buckets; ++b) {
    starts[b] = total;
    total += places[b] + second[b] + third[b] + fourth[b];
    places[b] = starts[b];
  }
  starts[buckets] = total;
  for (uint32_t i = 0; i < in_fours; i += 4) {
    const uint64_t word = four_codes(i);
    out[places[word & 0xffff]++] = static_cast<uint16_t>(i);
    out[places[word >> 16 & 0xffff]++] = static_cast<uint16_t>(i + 1);
    out[places[word >> 32 & 0xffff]++] = static_cast<uint16_t>(i + 2);
    out[places[word >> 48]++] = static_cast<uint16_t>(i + 3);
  }
  for (uint32_t i = in_fours; i < count; ++i) out[places[codes[i]]++] = static_cast<uint16_t>(i);
}

void Tables::draw(const Ask& ask, Drawn* drawn) const {
  static thread_local Scratch scratch;
  ask.queries.codes(ask.query, scratch.codes);
  // A counter is never touched more than num_tables times; count() says why it must not come round to zero twice.
  const size_t num_drawn = lsh_->num_tables < 256 ? count<uint8_t>(ask.kv_head, ask.rows, scratch.narrow, scratch)
                                                  : count<uint16_t>(ask.kv_head, ask.rows, scratch.wide, scratch);
  const Inclusion known = inclusion(ask.kv_head, ask.queries.values(ask.query), ask.queries.inv_norm(ask.query));
  *drawn = {scratch.ids.data(), num_drawn, known, nullptr, scratch.visited};
}

template <class Counter>
size_t Tables::count(uint32_t kv_head, const char* rows, std::vector<Counter>& counters, Scratch& scratch) const {
  const uint16_t* codes = scratch.codes.data();
  const uint32_t num_tables = lsh_->num_tables, buckets = lsh_->num_buckets();
  const uint32_t* starts = offsets(kv_head);
  const uint16_t* table_ids = ids(kv_head);
  const float* norms = inv_norms(kv_head);
  // Counters start min_collisions below zero: the increment that makes one zero draws its row.
  counters.assign(num_tokens_, static_cast<Counter>(0u - lsh_->min_collisions));
  scratch.ids.resize(num_tokens_ + 1);  // one more, for the store that is not kept
  scratch.buckets.resize(num_tables);
  Counter* counts = counters.data();
  uint16_t* drawn = scratch.ids.data();
  Bucket* visits = scratch.buckets.data();

  for (uint32_t t = 0; t < num_tables; ++t) __builtin_prefetch(starts + size_t{t} * (buckets + 1) + codes[t], 0, 2);
  auto look_up = [&](uint32_t t) {
    const uint32_t* start = starts + size_t{t} * (buckets + 1) + codes[t];
    const uint16_t* table = table_ids + size_t{t} * num_tokens_;
    visits[t] = {table + start[0], table + start[1]};
    for (const uint16_t* line = visits[t].begin; line < visits[t].end; line += 32) __builtin_prefetch(line, 0, 2);
  };
  for (uint32_t t = 0; t < std::min(kAhead, num_tables); ++t) look_up(t);

  // Keys at the mean come first. Their counters start at zero, from where no number of tables brings them there again.
  size_t num_drawn = 0, asked = 0, visited = 0;
  for (uint16_t id : at_mean_[kv_head]) {
    counts[id] = 0;
    drawn[num_drawn++] = id;
  }
  const size_t early = kEarlyBytes / row_bytes_;
  for (uint32_t t = 0; t < num_tables; ++t) {
    if (t + kAhead < num_tables) look_up(t + kAhead);
    const Bucket bucket = visits[t];
    visited += static_cast<size_t>(bucket.end - bucket.begin);
    for (const uint16_t* next = bucket.begin; next < bucket.end; ++next) {
      const uint16_t id = *next;
      const Counter seen = static_cast<Counter>(counts[id] + 1);
      counts[id] = seen;
      drawn[num_drawn] = id;
      num_drawn += seen == 0;
    }
    for (; asked < std::min(num_drawn, early); ++asked) {
      __builtin_prefetch(norms + drawn[asked], 0, 2);
      const char* row = rows + drawn[asked] * row_bytes_;
      for (size_t byte = 0; byte < row_bytes_; byte += 64) __builtin_prefetch(row + byte, 0, 2);
    }
  }
  scratch.visited = visited;
  return num_drawn;
}

Inclusion Tables::inclusion(uint32_t kv_head, const float* query, float inv_query_norm) const {
  const double product = dot(query, mean(kv_head), lsh_->dim);
  return {lsh_->log_u.data(), inv_norms(kv_head), static_cast<float>(product), inv_query_norm};
}

std::vector<int32_t> Tables::codes(uint32_t kv_head) const {
  const uint32_t num_tables = lsh_->num_tables, buckets = lsh_->num_buckets();
  std::vector<int32_t> out(size_t{num_tokens_} * num_tables);
  for (uint32_t t = 0; t < num_tables; ++t) {
    const uint32_t* starts = offsets(kv_head) + size_t{t} * (buckets + 1);
    const uint16_t* table = ids(kv_head) + size_t{t} * num_tokens_;
    for (uint32_t b = 0; b < buckets; ++b)
      for (uint32_t i = starts[b]; i < starts[b + 1]; ++i)
        out[size_t{table[i]} * num_tables + t] = static_cast<int32_t>(b);
  }
  return out;
}

}  // namespace magicpig
