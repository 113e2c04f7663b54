#include "roofs.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

#include "memory.h"
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

template <class F>
double best_rate(size_t bytes, int repeats, F&& pass) {
  double best = 0;
  for (int i = 0; i < repeats; ++i) {
    auto start = std::chrono::steady_clock::now();
    pass(i);
    std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(bytes) / seconds.count());
  }
  return best;
}

}  // namespace

double stream_read_roof(size_t bytes, int repeats) {
  const Buffer buffer = touched(bytes);
  std::atomic<uint64_t> sink{0};
  return best_rate(bytes, repeats, [&](int repeat) {
    const size_t ahead = repeat % 2 ? 0 : 16384;
    parallel_for((bytes + kStep - 1) / kStep, [&](size_t i) {
      sink ^= touch_lines(buffer.data() + i * kStep, std::min(kStep, bytes - i * kStep), ahead);
    });
  });
}

double gather_read_roof(size_t bytes, size_t row_bytes, int repeats) {
  if (row_bytes == 0 || bytes < row_bytes) throw std::invalid_argument("bytes must hold at least one row");
  constexpr size_t kRowsPerTask = 2048, kTasks = 64, kMaxAhead = 64;
  const Buffer buffer = touched(bytes);
  std::vector<uint32_t> rows(kTasks * kRowsPerTask + kMaxAhead);
  std::mt19937 random(0);
  std::atomic<uint64_t> sink{0};
  double best = 0;
  for (int i = 0; i < repeats; ++i) {
    const size_t ahead = size_t{8} << i % 4;  // rows; how far is best depends on the machine
    for (uint32_t& row : rows) row = static_cast<uint32_t>(random() % (bytes / row_bytes));
    best = std::max(best, best_rate(kTasks * kRowsPerTask * row_bytes, 1, [&](int) {
                      parallel_for(kTasks, [&](size_t task) {
                        uint64_t total = 0;
                        for (size_t r = task * kRowsPerTask; r < (task + 1) * kRowsPerTask; ++r) {
                          const char* next = buffer.data() + rows[r + ahead] * row_bytes;
                          // To the second level: the first has too few miss buffers to keep memory busy.
                          for (size_t byte = 0; byte < row_bytes; byte += 64) __builtin_prefetch(next + byte, 0, 2);
                          total ^= touch_lines(buffer.data() + rows[r] * row_bytes, row_bytes, 0);
                        }
                        sink ^= total;
                      });
                    }));
  }
  return best;
}

}  // namespace magicpig
