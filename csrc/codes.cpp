#include "codes.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>
#include <vector>

#include "dispatch.h"
#include "dot.h"
#include "queries.h"
#include "stopwatch.h"
#include "threads.h"

namespace magicpig {

namespace {

constexpr uint32_t kBlocksAtOnce = 16;  // of a piece, coded by one task
constexpr size_t kBlocksAhead = 4;      // asked for from memory where single ones are read

// What is added to a value's squared distance from the mean value, in mean squares of the values: a key whose value is
// ordinary can still be a heavy one, and a segment whose values are all alike can differ from others.
constexpr double kOrdinary = 0.1;

}  // namespace

Codes::Codes(std::shared_ptr<const Scan> scan, RowType type, uint32_t num_tokens)
    : scan_(std::move(scan)),
      num_tokens_(num_tokens),
      num_blocks_((num_tokens + kCodeBlock - 1) / kCodeBlock),
      row_bytes_(size_t{2} * scan_->dim * element_bytes(type)),
      mean_at_(num_blocks_ * scan_->block_bytes()),
      head_bytes_(mean_at_ + 2 * scan_->dim * sizeof(float)) {}

Codes::Codes(std::shared_ptr<const Scan> scan, RowType type, uint32_t num_kv_heads, uint32_t num_tokens, Buffer memory)
    : Codes(std::move(scan), type, num_tokens) {
  if (memory.size() != num_kv_heads * head_bytes_) throw std::invalid_argument("codes have the wrong size");
  memory_ = std::move(memory);
}

Codes::Codes(const Kernels& kernels, std::shared_ptr<const Scan> scan, RowType type, uint32_t num_kv_heads,
             uint32_t num_tokens, const char* rows)
    : Codes(std::move(scan), type, num_tokens) {
  const Stopwatch watch;
  memory_ = Buffer(num_kv_heads * head_bytes_);
  for (uint32_t head = 0; head < num_kv_heads; ++head)
    encode(kernels, type, head, rows + size_t{head} * num_tokens * row_bytes_);
  code_seconds_ = watch.seconds();
}

void Codes::encode(const Kernels& kernels, RowType type, uint32_t kv_head, const char* rows) const {
  const uint32_t dim = scan_->dim;
  const char* values = rows + row_bytes_ / 2;
  mean_of(kernels, type, rows, num_tokens_, dim, 2 * dim, mean(kv_head));
  const double norm = std::sqrt(dot(mean(kv_head), mean(kv_head), dim));
  const float tolerance = std::max(kMinNorm, kAtMean * static_cast<float>(norm));
  const size_t parts = (num_blocks_ + kBlocksAtOnce - 1) / kBlocksAtOnce;
  std::vector<double> sums(parts);
  parallel_for(parts, [&](size_t part) {
    constexpr size_t kKeys = kBlocksAtOnce * kCodeBlock;
    static thread_local std::vector<float> scratch;
    scratch.resize(kKeys * dim + kCodeBlock * kChunk + kBlocksAtOnce * dim + kCodeBlock * (dim + 32) + kKeys);
    float *centred = scratch.data(), *unused = centred + kKeys * dim + kCodeBlock * kChunk,
          *rotated = unused + kBlocksAtOnce * dim, *inverse = rotated + kCodeBlock * (dim + 32);
    const size_t first = part * kBlocksAtOnce, first_token = first / kPieceBlocks * kPieceTokens;
    const CodePiece piece = CodePiece::at(first / kPieceBlocks, num_tokens_);
    const auto begin = static_cast<uint32_t>(first % kPieceBlocks);
    const uint32_t count = std::min(kBlocksAtOnce, piece.blocks - begin);
    // Keys of these blocks, less their mean, are [16, count, dim], and inverse distances of values [16, count]; both
    // are 0 for padding. Strides that are powers of two would get into each other's way in caches.
    const size_t stride = size_t{count} * dim + kChunk;
    for (uint32_t k = 0; k < kCodeBlock; ++k) {
      const uint32_t at = k * piece.blocks + begin, there = at < piece.tokens ? std::min(count, piece.tokens - at) : 0;
      float *keys = centred + k * stride, *distances = inverse + k * count;
      if (there) {
        const size_t from = (first_token + at) * row_bytes_;
        kernels.centre[type](rows + from, there, dim, mean(kv_head), tolerance, keys, distances);
        kernels.centre[type](values + from, there, dim, mean_value(kv_head), 0.0f, unused, distances);
      }
      std::fill(keys + there * dim, keys + count * dim, 0.0f);
      std::fill(distances + there, distances + count, 0.0f);
    }
    for (uint32_t i = 0; i < count; ++i) {
      kernels.encode({centred + i * dim, stride, dim, scan_->bits, scan_->step(), scan_->signs.data(),
                      scan_->num_rounds, scan_->span, blocks(kv_head) + (first + i) * scan_->block_bytes(), rotated});
    }
    double squares = 0;
    for (uint32_t i = 0; i < count; ++i) {
      for (uint32_t k = 0; k < kCodeBlock; ++k) {
        const float close = inverse[k * count + i], distance = close > 0 ? 1 / close : 0;
        biases(kv_head, first + i)[k] = distance;
        squares += double{distance} * distance;
      }
    }
    sums[part] = squares;
  });
  double ordinary = dot(mean_value(kv_head), mean_value(kv_head), dim);
  for (double sum : sums) ordinary += sum / num_tokens_;
  const auto added = static_cast<float>(ordinary * kOrdinary);
  parallel_for(parts, [&](size_t part) {
    for (size_t block = part * kBlocksAtOnce; block < std::min((part + 1) * kBlocksAtOnce, num_blocks_); ++block) {
      float* bias = biases(kv_head, block);
      for (uint32_t k = 0; k < kCodeBlock; ++k) bias[k] = added > 0 ? std::sqrt(bias[k] * bias[k] + added) : 1;
      kernels.log(bias, kCodeBlock, bias);
    }
  });
}

ScanArgs Codes::scan_args(const Ask& ask, float* bases) const {
  const ScanQueries& queries = ask.queries.scan();
  for (uint32_t h = 0; h < ask.num_heads; ++h) {
    const double product = dot(ask.queries.values(ask.query + h), mean(ask.kv_head), scan_->dim);
    bases[h] = static_cast<float>(queries.scale() * product);
  }
  return {nullptr,
          0,
          scan_->num_lines,
          ask.num_heads,
          queries.codes(ask.query),
          queries.slopes(ask.query),
          queries.offsets(ask.query),
          bases};
}

size_t Codes::logs(const Ask& ask, const std::vector<size_t>& which, size_t stride, float* logs, float* biases) const {
  std::vector<float> bases(ask.num_heads), own(ask.num_heads * kCodeBlock);
  ScanArgs args = scan_args(ask, bases.data());
  args.num_blocks = 1;
  size_t absent = 0;
  const auto scan_logs = kernels().scan_logs[scan_->level()];
  for (size_t i = 0; i < which.size(); ++i) {
    args.blocks = blocks(ask.kv_head) + which[i] * scan_->block_bytes();
    if (i + kBlocksAhead < which.size()) {
      const char* later = blocks(ask.kv_head) + which[i + kBlocksAhead] * scan_->block_bytes();
      for (size_t byte = 0; byte < scan_->block_bytes(); byte += 64) __builtin_prefetch(later + byte);
    }
    scan_logs(args, own.data());
    const CodePiece piece = CodePiece::at(which[i] / kPieceBlocks, num_tokens_);
    const uint32_t there = piece.keys_of(static_cast<uint32_t>(which[i] % kPieceBlocks));
    for (uint32_t h = 0; h < ask.num_heads; ++h) {
      float* to = logs + h * stride + i * kCodeBlock;
      std::copy_n(own.data() + h * kCodeBlock, there, to);
      std::fill(to + there, to + kCodeBlock, -1e38f);
    }
    if (biases) std::copy_n(this->biases(ask.kv_head, which[i]), kCodeBlock, biases + i * kCodeBlock);
    absent += kCodeBlock - there;
  }
  return absent;
}

void Codes::draw(const Ask& ask, Drawn* drawn) const {
  static thread_local std::vector<uint16_t> ids;
  static thread_local std::vector<float> log_probability;
  static thread_local std::vector<size_t> counts;
  static thread_local std::vector<float> bases;
  const ScanQueries& queries = ask.queries.scan();
  const size_t num_blocks = (ask.count + kCodeBlock - 1) / kCodeBlock, stride = num_blocks * kCodeBlock + 2 * kChunk;
  ids.resize(stride * ask.num_heads);
  log_probability.resize(stride * ask.num_heads);
  counts.resize(ask.num_heads);
  bases.resize(ask.num_heads);
  ScanArgs args = scan_args(ask, bases.data());
  args.blocks = blocks(ask.kv_head) + ask.first / kCodeBlock * scan_->block_bytes();
  args.num_blocks = num_blocks;
  uint32_t key[2] = {queries.key(ask.query)[0], queries.key(ask.query)[1]};
  stir(mean(ask.kv_head), scan_->dim, key);  // segments number their rows alike, and must not draw alike
  kernels().scan_draw[scan_->level()](args, {&queries.log_thresholds[ask.query],
                                             {key[0], key[1]},
                                             static_cast<uint16_t>(ask.first),
                                             ask.count,
                                             ask.rows,
                                             row_bytes_,
                                             stride,
                                             ids.data(),
                                             log_probability.data(),
                                             counts.data()});
  for (uint32_t h = 0; h < ask.num_heads; ++h)
    drawn[h] = {ids.data() + h * stride, counts[h], {}, log_probability.data() + h * stride, 0};
}

}  // namespace magicpig
