#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

namespace magicpig {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;

#ifdef MAGICPIG_SANITIZE
constexpr bool kMapLarge = false;  // from the heap, where the sanitizer sees both ends of a buffer
#else
constexpr bool kMapLarge = true;
#endif

// The number after `label` in a file, or `otherwise`.
unsigned long long read_number(const char* path, const char* label, unsigned long long otherwise) {
  std::FILE* file = std::fopen(path, "r");
  if (file == nullptr) return otherwise;
  char line[128];
  const size_t length = std::strlen(label);
  while (std::fgets(line, sizeof line, file)) {
    unsigned long long number;
    if (std::strncmp(line, label, length) == 0 && std::sscanf(line + length, "%llu", &number) == 1) otherwise = number;
  }
  std::fclose(file);
  return otherwise;
}

}  // namespace

// Linux hands out more memory than it has and kills the process when it is touched; so requests are compared with what
// the kernel, and the limit of the process's control group (version 2), say is left. Elsewhere only the allocation can
// fail.
unsigned long long available_memory() {
  constexpr unsigned long long kUnknown = ~0ull;
  const auto free_kb = read_number("/proc/meminfo", "MemAvailable:", kUnknown);
  unsigned long long left = free_kb == kUnknown ? kUnknown : free_kb * 1024;
  const auto limit = read_number("/sys/fs/cgroup/memory.max", "", kUnknown);
  if (limit == kUnknown) return left;
  const auto used = read_number("/sys/fs/cgroup/memory.current", "", 0);
  const auto files = read_number("/sys/fs/cgroup/memory.stat", "inactive_file ", 0);  // given back when needed
  return std::min(left, limit + files > used ? limit + files - used : 0);
}

OutOfMemory::OutOfMemory(size_t bytes) noexcept {
  const auto left = available_memory();
  const double wanted = 1e-9 * static_cast<double>(bytes);
  if (left > bytes) {
    std::snprintf(text_, sizeof text_, "the system refused %.2f GB more: look at the limits of the process", wanted);
  } else {
    std::snprintf(text_, sizeof text_, "%.2f GB more were needed and %.2f are left: take fewer or shorter sequences",
                  wanted, 1e-9 * static_cast<double>(left));
  }
}

void require_memory(size_t bytes) {
  if (bytes >= kHugePage && bytes >= available_memory()) throw OutOfMemory(bytes);
}

Buffer::Buffer(size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  require_memory(bytes);
  if (!kMapLarge || bytes < kHugePage) {
    data_ = static_cast<char*>(::operator new(bytes, std::align_val_t{64}));
    return;
  }
  // Map enough to cut a piece that starts on a huge page's border out of it.
  size_t length = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* raw = mmap(nullptr, length + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) throw OutOfMemory(bytes);
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

Buffer::Buffer(const char* data, size_t bytes, std::shared_ptr<const void> owner)
    : data_(const_cast<char*>(data)), size_(bytes), owner_(std::move(owner)) {}

Buffer::~Buffer() {
  if (owner_) return;
  if (mapped_) {
    munmap(data_, mapped_);
  } else if (data_) {
    ::operator delete(data_, std::align_val_t{64});
  }
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      mapped_(std::exchange(other.mapped_, 0)),
      owner_(std::move(other.owner_)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(mapped_, other.mapped_);
  std::swap(owner_, other.owner_);
  return *this;
}

}  // namespace magicpig
