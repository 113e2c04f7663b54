// Memory of segments: aligned, on huge pages where large, and refused before the machine runs dry.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace magicpig {

// Says how much was wanted, and how much there is.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(size_t bytes) noexcept;
  const char* what() const noexcept override { return text_; }

 private:
  char text_[160];
};

// OutOfMemory unless the machine has this much left. A Buffer asks for itself; who needs several asks for all at
// once.
void require_memory(size_t bytes);

// Bytes that the machine, and the limit of the process's control group, have left; the largest number when unknown.
unsigned long long available_memory();

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes);  // aligned to 64 bytes at least; contents undefined
  // Someone else's memory, such as a file's, read only, for as long as the owner is held.
  Buffer(const char* data, size_t bytes, std::shared_ptr<const void> owner);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  char* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
  size_t mapped_ = 0;  // bytes from mmap, 0 when from the heap
  std::shared_ptr<const void> owner_;
};

}  // namespace magicpig
