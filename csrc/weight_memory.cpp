#include "weight_memory.h"

#include <mutex>

#include "memory.h"

namespace magicpig {

namespace {

#ifdef MAGICPIG_SANITIZE
constexpr size_t kLargestPiece = 0;  // every matrix on its own, where the sanitizer sees both ends
#else
constexpr size_t kLargestPiece = size_t{8} << 20;
#endif
constexpr size_t kChunkBytes = size_t{32} << 20;  // pages that are never touched cost nothing

struct Chunk {
  std::mutex mutex;
  std::weak_ptr<Buffer> buffer;  // alive as long as a piece is
  size_t used = 0;
};
Chunk* chunk = new Chunk;  // never destroyed: layers may outlive static objects

}  // namespace

std::shared_ptr<char> allocate_weights(size_t bytes) {
  if (bytes > kLargestPiece) {
    auto own = std::make_shared<Buffer>(bytes);
    return {own, own->data()};
  }
  std::lock_guard<std::mutex> lock(chunk->mutex);
  std::shared_ptr<Buffer> buffer = chunk->buffer.lock();
  if (!buffer || chunk->used + bytes > kChunkBytes) {
    buffer = std::make_shared<Buffer>(kChunkBytes);
    chunk->buffer = buffer;
    chunk->used = 0;
  }
  char* piece = buffer->data() + chunk->used;
  chunk->used += (bytes + 63) / 64 * 64;
  return {buffer, piece};
}

}  // namespace magicpig
