// The border between portable code and the code that is compiled once per instruction set.
//
// Only plain structs and function pointers here: a kernel translation unit must not emit a symbol that another could
// pick up at link time, so nothing in this header may instantiate a template or an inline function with external
// linkage.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace magicpig {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

enum RowType { kBF16 = 0, kF16 = 1, kF32 = 2, kNumRowTypes = 3 };

// Rows are stored with both halves padded by zeros to a multiple of this many elements.
constexpr uint32_t kChunk = 16;
constexpr uint32_t kMaxDim = 256;

// A squared norm above this is refused. With a scale of kMaxScale at most, no score of two accepted vectors can then
// leave the range of float32. Vectors shorter than kMinNorm have no direction: their products may be lost to underflow.
constexpr float kMaxScale = 100;
constexpr float kMinNorm = 1e-12f;
constexpr float kMaxSquaredNorm = 1e36f;

// Intervals of the table of log u over angle / pi in [0, 1]; it has one entry more, and a copy of the last behind it.
constexpr uint32_t kLogUIntervals = 1024;

// The queries of consecutive heads, each `dim` elements, zero-padded. hi + lo is the query in two bf16 parts (to
// 2^-17); `lo` is null when the high parts say it all.
struct Queries {
  const float* values;
  const bf16* hi;
  const bf16* lo;
};

// How a sampled row's logit is corrected: logit = scale q.k - log u(angle(q, k - mean)), with log u = 0 for a key at
// the mean. Null log_u: rows are exact.
struct Inclusion {
  const float* log_u;      // [kLogUIntervals + 2]
  const float* inv_norms;  // 1 / |k - mean| per row of the segment, 0 for a key at the mean
  float query_dot_mean;    // q.mean
  float inv_query_norm;    // 1 / |q|, 0 for a zero query
};

struct RowsArgs {
  const void* rows;     // [*, 2 * dim] of the row type: a token's key, then its value
  const uint16_t* ids;  // rows to read, or null for rows 0 .. count-1
  size_t count;
  uint32_t dim;
  uint32_t num_heads;  // query heads served together; 1 when rows are sampled
  Queries queries;
  float scale;
  float softcap;  // scores s become softcap tanh(s / softcap); 0 leaves them as they are
  Inclusion inclusion;
  const float* log_probability;  // of each id, where the index knows it: in place of `inclusion`; null: it does not.
                                 // Readable to the next multiple of 32.
};

// Attention over some rows, not normalised: sum_i exp(logit_i - max) and the same weights times the values.
struct PartialState {
  float max;
  float sum;
  float* out;       // [dim rounded up to a multiple of 32]
  float lanes[16];  // the kernel's own: the sum in parts
};

// Weights of linear layers lie in groups of two panels of sixteen outputs: [num_pairs][2][16][2], one stream per group.
constexpr uint32_t kPanel = 16;
constexpr uint32_t kGroup = 2 * kPanel;
constexpr uint32_t kLinearBlockRows = 192;  // the most rows a call of a linear kernel takes

// One group of outputs for some rows. Sums over the inputs run in one order, whatever the number of rows.
struct LinearArgs {
  const void* inputs;   // [rows, input_stride], as prepare_inputs leaves them
  size_t input_stride;  // in elements
  size_t rows;
  size_t num_pairs;    // of inputs
  const bf16* group;   // [num_pairs][2][16][2]
  const float* bias;   // [2][16]
  size_t num_outputs;  // of the group: the rest is padding and is not written
};

// Rows of queries that exact attention takes together: the register tiles of all instruction sets divide it.
constexpr uint32_t kPromptRows = 12;

// Rows of queries against some tokens, packed as weights of linear layers are: keys in groups of kGroup tokens,
// [head_dim / 2][2][16][2], values in groups of kGroup elements, [tokens / 2][2][16][2]. Tokens are padded to kGroup,
// with zeros.
struct PromptArgs {
  const void* queries;     // [num_rows, query_stride], as prepare_inputs leaves them
  size_t query_stride;     // in elements
  size_t num_rows;         // a multiple of kPromptRows
  uint32_t head_dim;       // even
  const bf16* keys;        // [groups of tokens][head_dim / 2][2][16][2]
  const bf16* values;      // [groups of elements][tokens / 2][2][16][2]
  size_t value_stride;     // from one group of values to the next
  const uint32_t* begins;  // row r sees tokens begins[r] .. ends[r] - 1; neither decreases with the row
  const uint32_t* ends;
  float scale;
  float softcap;  // as in RowsArgs
};

// What rows have seen so far, not normalised. Before the first tokens: -kLargest, zeros, zeros.
struct PromptState {
  float* max;   // [num_rows], of the scores times log2(e)
  float* sums;  // [num_rows, 16], of the weights 2^(x - max), in parts
  float* out;   // [num_rows, head_dim rounded up to 16]
};
constexpr float kLargest = 3.402823466e38f;

// Codes of keys lie in blocks of sixteen keys: lines of 64 bytes, then the keys' factors and biases, sixteen floats
// each. A line holds 32 / bits dimensions; bits [8 j + bits g, + bits) of its word k are dimension 4 g + j of key k.
constexpr uint32_t kCodeBlock = 16;
constexpr uint32_t kMaxRounds = 4;

// Keys of a block are no neighbours, whose weights go together: some blocks then stand for all keys. A piece of up to
// 64 blocks has the keys of so many tokens in a row; its block b has key k * blocks + b in its place k.
constexpr uint32_t kPieceBlocks = 64, kPieceTokens = kPieceBlocks * kCodeBlock;
struct CodePiece {
  uint32_t tokens, blocks;

  // Piece number i of so many tokens.
  static CodePiece at(size_t i, size_t tokens) {
    const size_t left = tokens - i * kPieceTokens;
    const uint32_t own = left < kPieceTokens ? static_cast<uint32_t>(left) : kPieceTokens;
    return {own, (own + kCodeBlock - 1) / kCodeBlock};
  }
  // Keys that a block has; behind them is padding.
  uint32_t keys_of(uint32_t block) const {
    const uint32_t keys = (tokens - block + blocks - 1) / blocks;
    return keys < kCodeBlock ? keys : kCodeBlock;
  }
};

struct EncodeArgs {
  const float* centred;  // [16, dim]
  size_t stride;         // from one key to the next
  uint32_t dim;
  uint32_t bits;       // per dimension: 1, 2 or 4
  float step;          // between levels, for elements of unit variance
  const float* signs;  // [num_rounds, dim], scaled so that each round keeps norms
  uint32_t
      num_rounds;  // a round: signs, then a Hadamard transform of `span` dimensions, the first or the last by turns
  uint32_t span;
  char* block;
  float* scratch;  // [dim rounded up to a line, 16]
};

// Logs of the weights by which keys are drawn: factor (slope x.q + offset) + bias + base, x the codes.
struct ScanArgs {
  const char* blocks;
  size_t num_blocks;
  uint32_t num_lines;  // of a block
  uint32_t num_heads;
  const int8_t* queries;  // [num_heads, num_lines * 32 / bits], rotated
  const float *slopes, *offsets, *bases;
};

// Rows are drawn each by itself: with probability p = its weight, as read off the linear interpolation of 2^n, at most
// 1 and at least kLeastProbability. A row is drawn where the number that (its place among the codes, key) gives is at
// most p.
constexpr float kLeastProbability = 1.0f / 65536;
struct DrawArgs {
  const float* log_thresholds;  // [num_heads], of weight 1
  uint32_t key[2];
  uint16_t first_id;  // of the first piece's first key
  size_t count;       // keys
  const char* rows;   // of the segment's first token, to be asked for from memory
  size_t row_bytes;
  size_t stride;  // between heads in ids and log_probability: count, rounded up to 16, or more
  uint16_t* ids;
  float* log_probability;
  size_t* num_drawn;  // [num_heads]
};

// Keys whose weights are known in part; see error_terms.
struct TermArgs {
  const float *logs, *biases;  // log weight = temper * score + bias
  size_t count;                // a multiple of 16
  float temper;
  float peak;  // taken off the scores
};

enum Activation { kSilu = 0, kGeluTanh = 1 };
enum NormScale { kTimesWeight = 0, kTimesOnePlusWeight = 1 };

struct Kernels {
  const char* name;
  // By row type. `states`: one per head, overwritten. An empty row set gives max = -inf, sum = 0, out = 0.
  void (*attend[kNumRowTypes])(const RowsArgs& args, PartialState* states);
  // log inclusion probability of each row in args.ids for the one query.
  void (*log_inclusion[kNumRowTypes])(const RowsArgs& args, float* log_u);
  // Converts `count` vectors of `head_dim` elements and pads them to `dim`; returns the first whose squared norm, as
  // stored, is not in [0, kMaxSquaredNorm] (NaN and infinity are not), or count. Indexed by source type, then stored
  // type.
  size_t (*pack[kNumRowTypes][kNumRowTypes])(const void* source, size_t source_stride, size_t count, uint32_t head_dim,
                                             void* out, size_t out_stride, uint32_t dim);
  // sums[size] += the first `size` elements, a multiple of 16, of each row.
  void (*add_rows[kNumRowTypes])(const void* rows, size_t count, uint32_t dim, uint32_t size, float* sums);
  // centred = key - mean, and 1 / its norm. A key within `tolerance` (absolute) of the mean counts as the mean: zeros.
  void (*centre[kNumRowTypes])(const void* rows, size_t count, uint32_t dim, const float* mean, float tolerance,
                               float* centred, float* inv_norms);
  // Signs of the projections of bf16(x): bits[group * bits_stride + row] has a bit per column of the group, 1 for >= 0.
  // panels: [groups][dim / 2][16][2]. scratch: (count + 8) * dim floats.
  void (*hash)(const float* x, size_t count, uint32_t dim, const bf16* panels, uint32_t num_groups, uint16_t* bits,
               size_t bits_stride, float* scratch);
  // A block of codes of centred keys, and their factors |c|^2 / c.x; biases are not touched.
  void (*encode)(const EncodeArgs& args);
  // By log2 of the bits. All logs [num_heads, num_blocks * 16]; or rows drawn by them.
  void (*scan_logs[3])(const ScanArgs& args, float* logs);
  // The log of the threshold t for which sum_i min(1, exp(logs[i]) / t) = rows. count: a multiple of 16, above rows.
  // scratch: 2 * `count` floats.
  float (*log_threshold)(const float* logs, size_t count, float rows, float* scratch);
  // The highest of the scores (logs[i] - biases[i]) / temper.
  float (*highest_score)(const float* logs, const float* biases, size_t count, float temper);
  // terms[0][i] = exp(score - peak); terms[1][i] = its square times exp(2 bias); terms[2][i] = that over exp(temper *
  // (score - peak) + bias). Sums of the latter two over keys whose log is below the threshold: the third, the second.
  void (*error_terms)(const TermArgs& args, float* terms);
  void (*light_sums)(const float* logs, const float* terms, size_t count, float log_threshold, float* sums);
  void (*scan_draw[3])(const ScanArgs& args, const DrawArgs& draw);
  void (*exp)(const float* x, size_t count, float* out);  // count: a multiple of 16; for tests
  void (*log)(const float* x, size_t count, float* out);  // the same, of normal numbers above 0
  size_t input_bytes;                                     // of an element of prepared inputs
  // Brings `in` columns of bf16 rows into the form the linear kernels read, and fills an odd last pair with zero.
  void (*prepare_inputs)(const bf16* x, size_t rows, size_t in, void* inputs, size_t input_stride);
  void (*linear)(const LinearArgs& args, bf16* out, size_t out_stride);
  // The first panel is the gate, the second what it gates: activation(gate) * up, rounded to bf16, as prepared inputs.
  void (*gated)(const LinearArgs& args, Activation activation, void* out, size_t out_stride);
  void (*attend_prompt)(const PromptArgs& args, const PromptState& state);
  void (*finish_prompt_row)(const float* out, const float* sums, uint32_t head_dim, bf16* result);
  // x / sqrt(mean of squares + eps), rounded to bf16 and then scaled by the weight, or scaled by 1 + weight and rounded
  // once.
  void (*rms_norm)(const bf16* x, size_t rows, size_t dim, const bf16* weight, NormScale scale, float eps, bf16* out);
};

// One object file per instruction set exports exactly one of these.
#if defined(MAGICPIG_X86)
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace avx512_bf16 {
extern const Kernels kernels;
}
#elif defined(MAGICPIG_ARM64)
namespace neon {
extern const Kernels kernels;
}
#endif
namespace scalar {
extern const Kernels kernels;
}

}  // namespace magicpig
