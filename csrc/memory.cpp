#include "memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <utility>

namespace magicpig {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kLarge = size_t{64} << 20;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kMapLarge = false;  // from the heap, where the sanitizer sees both ends of a buffer
#else
constexpr bool kMapLarge = true;
#endif

// Linux hands out more memory than it has and kills the process when it is touched; so large requests are compared with
// what the kernel says is left. Where that is not known (other systems), only the allocation itself can fail.
bool available(size_t bytes) {
  std::FILE* file = std::fopen("/proc/meminfo", "r");
  if (file == nullptr) return true;
  char line[128];
  unsigned long long kilobytes;
  bool enough = true;
  while (std::fgets(line, sizeof line, file)) {
    if (std::sscanf(line, "MemAvailable: %llu kB", &kilobytes) == 1) enough = bytes / 1024 < kilobytes;
  }
  std::fclose(file);
  return enough;
}

}  // namespace

Buffer::Buffer(size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  if (bytes >= kLarge && !available(bytes)) throw std::bad_alloc();
  if (!kMapLarge || bytes < kHugePage) {
    data_ = static_cast<char*>(::operator new(bytes, std::align_val_t{64}));
    return;
  }
  // Map enough to cut a piece that starts on a huge page's border out of it.
  size_t length = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* raw = mmap(nullptr, length + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) throw std::bad_alloc();
  char* start = static_cast<char*>(raw);
  size_t skip = (kHugePage - reinterpret_cast<uintptr_t>(start) % kHugePage) % kHugePage;
  if (skip) munmap(start, skip);
  if (skip < kHugePage) munmap(start + skip + length, kHugePage - skip);
  data_ = start + skip;
  mapped_ = length;
#ifdef MADV_HUGEPAGE
  madvise(data_, length, MADV_HUGEPAGE);  // advice: without it the buffer still works, with more TLB misses
#endif
}

Buffer::~Buffer() {
  if (mapped_) {
    munmap(data_, mapped_);
  } else if (data_) {
    ::operator delete(data_, std::align_val_t{64});
  }
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      mapped_(std::exchange(other.mapped_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(mapped_, other.mapped_);
  return *this;
}

}  // namespace magicpig
