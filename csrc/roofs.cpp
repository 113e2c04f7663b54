#include "roofs.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

#include "memory.h"
#include "threads.h"

namespace magicpig {

namespace {

constexpr size_t kStep = size_t{1} << 20;

// Xor of 64-byte lines, plain enough for any machine and far quicker than memory.
uint64_t fold(const char* data, size_t bytes) {
  uint64_t a = 0, b = 0, c = 0, d = 0;
  for (size_t i = 0; i + 64 <= bytes; i += 64) {
    uint64_t line[8];
    std::memcpy(line, data + i, 64);
    a ^= line[0] ^ line[4];
    b ^= line[1] ^ line[5];
    c ^= line[2] ^ line[6];
    d ^= line[3] ^ line[7];
  }
  return a ^ b ^ c ^ d;
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
  return best_rate(bytes, repeats, [&](int) {
    parallel_for((bytes + kStep - 1) / kStep,
                 [&](size_t i) { sink ^= fold(buffer.data() + i * kStep, std::min(kStep, bytes - i * kStep)); });
  });
}

double gather_read_roof(size_t bytes, size_t row_bytes, int repeats) {
  constexpr size_t kRowsPerTask = 2048, kAhead = 12, kTasks = 64;
  const Buffer buffer = touched(bytes);
  const size_t num_rows = bytes / row_bytes;
  std::atomic<uint64_t> sink{0};
  return best_rate(kTasks * kRowsPerTask * row_bytes, repeats, [&](int repeat) {
    parallel_for(kTasks, [&](size_t task) {
      std::vector<uint32_t> rows(kRowsPerTask + kAhead);
      uint64_t state = (task + 1) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(repeat);
      for (uint32_t& row : rows) {  // xorshift
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        row = static_cast<uint32_t>(state % num_rows);
      }
      uint64_t total = 0;
      for (size_t i = 0; i < kRowsPerTask; ++i) {
        const char* ahead = buffer.data() + rows[i + kAhead] * row_bytes;
        for (size_t byte = 0; byte < row_bytes; byte += 64) __builtin_prefetch(ahead + byte, 0, 2);  // to the second level: the first has too few miss buffers
        total ^= fold(buffer.data() + rows[i] * row_bytes, row_bytes);
      }
      sink ^= total;
    });
  });
}

}  // namespace magicpig
