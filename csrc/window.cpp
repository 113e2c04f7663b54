#include "window.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "dispatch.h"

namespace magicpig {

namespace {
constexpr size_t kGrain = 64;  // capacities are multiples of this many tokens
}

void Window::reserve(size_t tokens) {
  if (tokens <= capacity_) return;
  const size_t wanted = std::max(tokens, capacity_ + capacity_ / 2), capacity = (wanted + kGrain - 1) / kGrain * kGrain;
  const size_t row_bytes = geometry_.row_bytes();
  Buffer larger(geometry_.num_kv_heads * capacity * row_bytes);
  for (size_t head = 0; num_tokens_ && head < geometry_.num_kv_heads; ++head) {
    std::memcpy(larger.data() + head * capacity * row_bytes, rows_.data() + head * capacity_ * row_bytes,
                num_tokens_ * row_bytes);
  }
  rows_ = std::move(larger);
  capacity_ = capacity;
}

bool Window::append(const TensorView& keys, const TensorView& values, size_t count) {
  if (num_tokens_ + count > UINT32_MAX) throw std::invalid_argument("the window would exceed 4,294,967,295 tokens");
  reserve(num_tokens_ + count);
  const size_t row_bytes = geometry_.row_bytes();
  const uint32_t dim = geometry_.dim();
  bool fine = true;
  for (size_t head = 0; head < geometry_.num_kv_heads; ++head) {
    char* out = rows_.data() + (head * capacity_ + num_tokens_) * row_bytes;
    for (const TensorView* tensor : {&keys, &values}) {
      const char* in = tensor->data + head * tensor->head_stride * element_bytes(tensor->type);
      const auto pack = kernels().pack[tensor->type][geometry_.type];
      fine &= pack(in, tensor->token_stride, count, geometry_.head_dim, out, size_t{2} * dim, dim) == count;
      out += row_bytes / 2;
    }
  }
  num_tokens_ += count;
  spoiled_ |= !fine;
  return fine;
}

void Window::drop(size_t first, size_t count) {
  if (first > num_tokens_ || count > num_tokens_ - first) {
    throw std::invalid_argument("tokens " + std::to_string(first) + " to " + std::to_string(first + count) +
                                " are not all in the window of " + std::to_string(num_tokens_));
  }
  const size_t row_bytes = geometry_.row_bytes(), behind = num_tokens_ - first - count;
  for (size_t head = 0; behind && head < geometry_.num_kv_heads; ++head) {
    char* rows = rows_.data() + (head * capacity_ + first) * row_bytes;
    std::memmove(rows, rows + count * row_bytes, behind * row_bytes);
  }
  num_tokens_ -= count;
  if (num_tokens_ == 0) spoiled_ = false;
}

std::unique_ptr<Window> Window::fork() const {
  auto copy = std::make_unique<Window>(geometry_);
  copy->reserve(num_tokens_);
  const size_t row_bytes = geometry_.row_bytes();
  for (size_t head = 0; num_tokens_ && head < geometry_.num_kv_heads; ++head) {
    std::memcpy(copy->rows_.data() + head * copy->capacity_ * row_bytes, rows_.data() + head * capacity_ * row_bytes,
                num_tokens_ * row_bytes);
  }
  copy->num_tokens_ = num_tokens_;
  copy->spoiled_ = spoiled_;
  return copy;
}

Run Window::newest(size_t count) const {
  const size_t n = std::min(count, num_tokens_), row_bytes = geometry_.row_bytes();
  return {rows_.data() + (num_tokens_ - n) * row_bytes, capacity_ * row_bytes, static_cast<uint32_t>(n), nullptr};
}

}  // namespace magicpig
