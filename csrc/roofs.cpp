#include "roofs.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

#include "memory.h"
#include "stopwatch.h"
#include "threads.h"

namespace magicpig {

namespace {

constexpr size_t kStep = size_t{1} << 20;

// Brings every 64-byte line in by touching one word of it, so that memory and not the core is the limit. Lines `ahead`
// bytes on are asked for: hardware prefetchers alone do not always keep memory busy.
uint64_t touch_lines(const char* data, size_t bytes, size_t ahead) {
  uint64_t total = 0;
  for (size_t i = 0; i + 64 <= bytes; i += 64) {
    if (ahead) __builtin_prefetch(data + i + ahead, 0, 2);
    uint64_t word;
    std::memcpy(&word, data + i, sizeof word);
    total ^= word;
  }
  return total;
}

Buffer touched(size_t bytes) {
  Buffer buffer(bytes);
  parallel_for((bytes + kStep - 1) / kStep, [&](size_t i) {
    std::memset(buffer.data() + i * kStep, static_cast<int>(i & 127), std::min(kStep, bytes - i * kStep));
  });
  return buffer;
}

// Calls pass(0) .. pass(modes - 1) `repeats` times each; the best mode's median rate.
template <class F>
double median_rate(size_t bytes, int modes, int repeats, F&& pass) {
  double best = 0;
  for (int mode = 0; mode < modes; ++mode) {
    std::vector<double> rates;
    for (int i = 0; i < repeats; ++i) {
      const Stopwatch watch;
      pass(mode);
      rates.push_back(static_cast<double>(bytes) / watch.seconds());
    }
    std::sort(rates.begin(), rates.end());
    best = std::max(best, rates[rates.size() / 2]);
  }
  return best;
}

}  // namespace

double stream_read_roof(size_t bytes, int repeats) {
  if (repeats < 1) throw std::invalid_argument("repeats must be at least 1");
  const Buffer buffer = touched(bytes);
  std::atomic<uint64_t> sink{0};
  return median_rate(bytes, 2, repeats, [&](int mode) {
    const size_t ahead = mode == 0 ? 0 : 16384;
    parallel_for((bytes + kStep - 1) / kStep, [&](size_t i) {
      sink ^= touch_lines(buffer.data() + i * kStep, std::min(kStep, bytes - i * kStep), ahead);
    });
  });
}

double gather_read_roof(size_t bytes, size_t row_bytes, int repeats) {
  if (repeats < 1) throw std::invalid_argument("repeats must be at least 1");
  if (row_bytes < 64 || bytes < row_bytes) throw std::invalid_argument("bytes must hold a row of 64 bytes or more");
  constexpr size_t kRowsPerTask = 2048, kTasks = 64, kMaxAhead = 64;
  const Buffer buffer = touched(bytes);
  // Every pass reads rows of its own: those of the last may still be in a cache.
  const size_t pass_rows = kTasks * kRowsPerTask + kMaxAhead;
  std::vector<uint32_t> rows(4 * static_cast<size_t>(repeats) * pass_rows);
  std::mt19937 random(0);
  for (uint32_t& row : rows) row = static_cast<uint32_t>(random() % (bytes / row_bytes));
  const uint32_t* next_pass = rows.data();
  std::atomic<uint64_t> sink{0};
  return median_rate(kTasks * kRowsPerTask * row_bytes, 4, repeats, [&](int mode) {
    const size_t ahead = size_t{8} << mode;  // rows; how far is best depends on the machine
    parallel_for(kTasks, [&](size_t task) {
      const uint32_t* row = next_pass + task * kRowsPerTask;
      uint64_t total = 0;
      for (size_t i = 0; i < kRowsPerTask; ++i) {
        const char* next = buffer.data() + row[i + ahead] * row_bytes;
        // To the second level: the first has too few miss buffers to keep memory busy.
        for (size_t byte = 0; byte < row_bytes; byte += 64) __builtin_prefetch(next + byte, 0, 2);
        total ^= touch_lines(buffer.data() + row[i] * row_bytes, row_bytes, 0);
      }
      sink ^= total;
    });
    next_pass += pass_rows;
  });
}

}  // namespace magicpig
