// Coded keys of one segment: the index that a pass over all codes draws from.
#pragma once

#include <memory>
#include <vector>

#include "index.h"
#include "scan.h"

namespace magicpig {

class Codes : public Index {
 public:
  // rows: [num_kv_heads, num_tokens, 2 * dim].
  Codes(const Kernels& kernels, std::shared_ptr<const Scan> scan, RowType type, uint32_t num_kv_heads,
        uint32_t num_tokens, const char* rows);

  // The codes of a segment that was saved: `memory` as another's memory() had it. std::invalid_argument unless its size
  // is right; whatever is in it, nothing outside the segment is read.
  Codes(std::shared_ptr<const Scan> scan, RowType type, uint32_t num_kv_heads, uint32_t num_tokens, Buffer memory);

  uint32_t tokens_at_once() const override { return 8192; }
  uint32_t heads_at_once(uint32_t group) const override { return group; }
  void draw(const Ask& ask, Drawn* drawn) const override;

  // Logs of the weights of the keys of some blocks, without the threshold, for the heads of an Ask whose tokens do not
  // matter: of head h into logs[h * stride + i * 16 ...], and, unless null, the keys' biases. Returns how many keys of
  // them are padding: theirs are lower than any.
  size_t logs(const Ask& ask, const std::vector<size_t>& blocks, size_t stride, float* logs, float* biases) const;
  const float* mean_value(uint32_t kv_head) const { return mean(kv_head) + scan_->dim; }
  size_t num_blocks() const { return num_blocks_; }

 private:
  Codes(std::shared_ptr<const Scan> scan, RowType type, uint32_t num_tokens);
  char* blocks(uint32_t kv_head) const { return memory_.data() + kv_head * head_bytes_; }
  float* mean(uint32_t kv_head) const { return reinterpret_cast<float*>(blocks(kv_head) + mean_at_); }
  float* biases(uint32_t kv_head, size_t block) const {
    return reinterpret_cast<float*>(blocks(kv_head) + (block + 1) * scan_->block_bytes()) - kCodeBlock;
  }
  void encode(const Kernels& kernels, RowType type, uint32_t kv_head, const char* rows) const;
  // The arguments of a kernel but for the blocks; bases are filled in.
  ScanArgs scan_args(const Ask& ask, float* bases) const;

  std::shared_ptr<const Scan> scan_;
  uint32_t num_tokens_;
  size_t num_blocks_, row_bytes_;
  // Per head: blocks, then the mean key and the mean value [dim].
  size_t mean_at_, head_bytes_;
};

}  // namespace magicpig
