// Codes of keys: making them, and drawing rows by a pass over all of them. Included by kernels.cpp only.
#pragma once

namespace magicpig {
namespace {

// log of sixteen normal numbers above 0; error below 3e-6 of it, or absolute where it is less than 1.
inline vec log(vec x) {
  ivec bits = bits_of_float(x);
  vec exponent = sub(to_float(shift_right<23>(bits)), set1(127.0f));
  vec m = float_of_bits(ior(iand(bits, iset1(0x7fffff)), iset1(0x3f800000)));
  vec s = div(sub(m, set1(1.0f)), add(m, set1(1.0f))), s2 = mul(s, s);
  vec p = fma(set1(2.0f / 11), s2, set1(2.0f / 9));
  p = fma(p, s2, set1(2.0f / 7));
  p = fma(p, s2, set1(2.0f / 5));
  p = fma(p, s2, set1(2.0f / 3));
  p = fma(p, s2, set1(2.0f));
  return fma(exponent, set1(0.693147181f), mul(p, s));
}

// STAGES stages of the Hadamard transform of `span` elements, each of which is sixteen numbers; the first of them adds
// and subtracts elements `half` apart.
template <int STAGES>
inline void transform(float* x, uint32_t span, uint32_t half) {
  constexpr uint32_t kElements = 1 << STAGES;
  for (uint32_t first = 0; first < span; first += kElements * half) {
    for (uint32_t d = first; d < first + half; ++d) {
      vec e[kElements];
      for (uint32_t i = 0; i < kElements; ++i) e[i] = load(x + (d + i * half) * kChunk);
      for (uint32_t apart = 1; apart < kElements; apart *= 2) {
        for (uint32_t i = 0; i < kElements; ++i) {
          if (i & apart) continue;
          vec a = e[i], b = e[i | apart];
          e[i] = add(a, b);
          e[i | apart] = sub(a, b);
        }
      }
      for (uint32_t i = 0; i < kElements; ++i) store(x + (d + i * half) * kChunk, e[i]);
    }
  }
}

// Sixteen vectors at once, [dim, 16].
inline void rotate(const EncodeArgs& args) {
  float* x = args.scratch;
  for (uint32_t round = 0; round < args.num_rounds; ++round) {
    const float* signs = args.signs + static_cast<size_t>(round) * args.dim;
    for (uint32_t d = 0; d < args.dim; ++d) store(x + d * kChunk, mul(load(x + d * kChunk), set1(signs[d])));
    float* part = x + (round % 2 ? args.dim - args.span : 0) * kChunk;
    uint32_t half = 1;
    for (; half * 8 <= args.span; half *= 8) transform<3>(part, args.span, half);
    for (; half < args.span; half *= 2) transform<1>(part, args.span, half);
  }
}

void encode(const EncodeArgs& args) {
  const uint32_t dims_of_line = 32 / args.bits, lines = (args.dim + dims_of_line - 1) / dims_of_line;
  const float half = static_cast<float>(1 << (args.bits - 1)), top = 2 * half - 1;
  float* x = args.scratch;
  for (uint32_t d = 0; d < args.dim; d += kChunk) transpose(args.centred + d, args.stride, x + d * kChunk);
  for (uint32_t d = args.dim; d < lines * dims_of_line; ++d) store(x + d * kChunk, zero());
  rotate(args);
  vec energy = zero();
  for (uint32_t d = 0; d < args.dim; ++d) energy = fma(load(x + d * kChunk), load(x + d * kChunk), energy);
  vec width = mul(sqrt(energy), set1(args.step / __builtin_sqrtf(static_cast<float>(args.dim))));
  vec inverse = select_less(zero(), width, div(set1(1.0f), max(width, set1(1e-30f))), zero());
  vec product = zero();
  for (uint32_t line = 0; line < lines; ++line) {
    vec words[2] = {zero(), zero()};  // their lower and upper halves: floats hold sixteen bits exactly
    for (uint32_t d = 0; d < dims_of_line; ++d) {
      const uint32_t dim = line * dims_of_line + d, byte = d % 4;
      vec value = load(x + dim * kChunk);
      vec code = floor(min(max(fma(value, inverse, set1(half)), zero()), set1(top)));
      product = fma(fma(code, set1(2.0f), set1(-top)), value, product);  // values beyond `dim` are 0
      const float weight = static_cast<float>(1u << (8 * (byte % 2) + args.bits * (d / 4)));
      words[byte / 2] = fma(code, set1(weight), words[byte / 2]);
    }
    istore(args.block + line * 64, ior(to_int(words[0]), imul(to_int(words[1]), iset1(65536))));
  }
  vec factor = select_less(zero(), product, div(energy, max(product, set1(1e-30f))), zero());
  store(reinterpret_cast<float*>(args.block + lines * 64), factor);
}

constexpr size_t kTilesAhead = 4;  // of blocks, asked for from memory

// Logs of the weights of B blocks for H heads.
template <int BITS, int H, int B>
inline void weigh(const ScanArgs& args, uint32_t head, const char* block, size_t block_bytes, vec (&logs)[B][H]) {
  constexpr int kGroups = 8 / BITS;
  const ivec mask = iset1(0x01010101u * ((1u << BITS) - 1));
  const size_t query_bytes = static_cast<size_t>(args.num_lines) * 4 * kGroups;
  const int8_t* queries = args.queries + head * query_bytes;
  ivec acc[B][H];
  for (int b = 0; b < B; ++b)
    for (int h = 0; h < H; ++h) acc[b][h] = iset1(0);
  for (uint32_t line = 0; line < args.num_lines; ++line) {
    ivec codes[B];
    for (int b = 0; b < B; ++b) codes[b] = iload(block + b * block_bytes + line * 64);
    const int8_t* query = queries + line * 4 * kGroups;
    auto group = [&](auto shifted, int g) {
      ivec part[B];
      for (int b = 0; b < B; ++b) part[b] = iand(shift_right<decltype(shifted)::value>(codes[b]), mask);
      for (int h = 0; h < H; ++h) {
        uint32_t four;
        memcpy(&four, query + h * query_bytes + 4 * g, 4);
        const ivec q = iset1(four);
        for (int b = 0; b < B; ++b) acc[b][h] = dot4(acc[b][h], part[b], q);
      }
    };
    if constexpr (BITS == 4) {
      group(Constant<0>(), 0), group(Constant<4>(), 1);
    } else if constexpr (BITS == 2) {
      group(Constant<0>(), 0), group(Constant<2>(), 1), group(Constant<4>(), 2), group(Constant<6>(), 3);
    } else {
      group(Constant<0>(), 0), group(Constant<1>(), 1), group(Constant<2>(), 2), group(Constant<3>(), 3);
      group(Constant<4>(), 4), group(Constant<5>(), 5), group(Constant<6>(), 6), group(Constant<7>(), 7);
    }
  }
  for (int b = 0; b < B; ++b) {
    const float* behind = reinterpret_cast<const float*>(block + b * block_bytes + args.num_lines * 64);
    const vec factor = load(behind), bias = load(behind + kChunk);
    for (int h = 0; h < H; ++h) {
      vec x = fma(to_float(acc[b][h]), set1(args.slopes[head + h]), set1(args.offsets[head + h]));
      logs[b][h] = fma(factor, x, add(bias, set1(args.bases[head + h])));
    }
  }
}

inline size_t block_bytes_of(const ScanArgs& args) { return static_cast<size_t>(args.num_lines) * 64 + 128; }

template <int BITS, int H>
void logs_of_heads(const ScanArgs& args, uint32_t head, float* out) {
  const size_t bytes = block_bytes_of(args), stride = args.num_blocks * kCodeBlock;
  for (size_t i = 0; i < args.num_blocks; ++i) {
    vec logs[1][H];
    weigh<BITS, H, 1>(args, head, args.blocks + i * bytes, bytes, logs);
    for (int h = 0; h < H; ++h) store(out + (head + h) * stride + i * kCodeBlock, logs[0][h]);
  }
}

void log_of(const float* x, size_t count, float* out) {
  for (size_t i = 0; i < count; i += kChunk) store(out + i, log(load(x + i)));
}

// Splits weights at a border: those from it on become a list, whose end is returned; the others are added up.
inline const float* split(const float* weights, size_t count, float border, float* list, float& rest) {
  vec below = zero();
  for (size_t i = 0; i < count; i += kChunk) {
    const vec weight = load(weights + i);
    below = add(below, select_less(weight, set1(border), weight, zero()));
    for (uint32_t above = sign_bits(sub(weight, set1(border))); above; above &= above - 1)
      *list++ = weights[i + __builtin_ctz(above)];
  }
  rest = sum(below);
  return list;
}

constexpr float kFaintest = 1e-37f;  // of the weights that a float tells from nothing

// The threshold for so many rows among weights, the highest of which is 1, and in `rows` how many more are wanted than
// there are above it: some, where it is as low as it can be.
inline float threshold_of(const float* weights, size_t count, float* list, float all, float& rows) {
  // Weights above the threshold count as one each: with them out of the sum it falls, until none joins. Only those that
  // may join soon are looked at every time.
  const float* end = list;
  const float wanted = rows;
  float threshold = all / wanted, border = __builtin_inff(), rest = 0, number = 0;
  for (;;) {
    if (threshold < kFaintest) threshold = kFaintest;
    if (threshold < border) {
      border = threshold / 16;
      end = split(weights, count, border, list, rest);
    }
    float above = 0, light = rest;
    for (const float* x = list; x < end; ++x) {
      above += *x > threshold ? 1 : 0;
      light += *x > threshold ? 0 : *x;
    }
    if (!(above > number)) return threshold;
    number = above;
    rows = wanted - number;
    threshold = light / (rows > 1e-3f ? rows : 1e-3f);
  }
}

float log_threshold(const float* logs, size_t count, float rows, float* scratch) {
  float limit = __builtin_inff(), found = 0;  // what is not below the limit was counted: one row each
  for (;;) {
    vec highest = set1(-kLargest);
    for (size_t i = 0; i < count; i += kChunk) {
      const vec x = load(logs + i);
      highest = max(select_less(x, set1(limit), x, set1(-kLargest)), highest);
    }
    const float peak = largest(highest);
    if (limit < kLargest && !(peak > -1e37f)) return found;  // padding alone is left
    vec all = zero();
    for (size_t i = 0; i < count; i += kChunk) {
      const vec x = load(logs + i), weight = select_less(x, set1(limit), exp(sub(x, set1(peak))), zero());
      store(scratch + i, weight);
      all = add(all, weight);
    }
    const float threshold = threshold_of(scratch, count, scratch + count, sum(all), rows);
    alignas(64) float out[kChunk];
    store(out, log(set1(threshold)));
    found = peak + out[0];
    if (threshold > kFaintest || !(rows > 1e-3f)) return found;
    limit = found;  // scores that differ by more than floats can tell: on with the lower ones
  }
}

inline vec score_of(const float* logs, const float* biases, size_t i, float inverse_temper) {
  return mul(sub(load(logs + i), load(biases + i)), set1(inverse_temper));
}

float highest_score(const float* logs, const float* biases, size_t count, float temper) {
  vec highest = score_of(logs, biases, 0, 1 / temper);
  for (size_t i = kChunk; i < count; i += kChunk) highest = max(score_of(logs, biases, i, 1 / temper), highest);
  return largest(highest);
}

void error_terms(const TermArgs& args, float* terms) {
  for (size_t i = 0; i < args.count; i += kChunk) {
    const vec score = sub(score_of(args.logs, args.biases, i, 1 / args.temper), set1(args.peak)),
              bias = load(args.biases + i);
    store(terms + i, exp(score));
    store(terms + args.count + i, exp(mul(add(score, bias), set1(2.0f))));
    store(terms + 2 * args.count + i, exp(fma(score, set1(2.0f - args.temper), bias)));
  }
}

void light_sums(const float* logs, const float* terms, size_t count, float log_threshold, float* sums) {
  vec squares = zero(), slope = zero();
  for (size_t i = 0; i < count; i += kChunk) {
    const vec log_weight = load(logs + i);
    squares = add(squares, select_less(log_weight, set1(log_threshold), load(terms + i), zero()));
    slope = add(slope, select_less(log_weight, set1(log_threshold), load(terms + count + i), zero()));
  }
  sums[0] = sum(slope);
  sums[1] = sum(squares);
}

// Uniform numbers in (0, 1), one per lane, from sixteen row ids and a key.
inline vec uniform(uint32_t first, const uint32_t (&key)[2]) {
  ivec x = ixor(iadd(iota(), iset1(first)), iset1(key[0]));
  x = imul(x, iset1(0x9e3779b1u));
  x = iadd(ixor(x, shift_right<15>(x)), iset1(key[1]));
  x = imul(x, iset1(0x85ebca6bu));
  x = ixor(x, shift_right<13>(x));
  x = imul(x, iset1(0xc2b2ae35u));
  const float less = 1 - 1.0f / (1 << 24);  // numbers in the middle of their intervals
  return sub(float_of_bits(ior(shift_right<9>(x), iset1(0x3f800000))), set1(less));
}

// Probabilities are weights as the bits of a float tell them: 2^n, linear between whole n, without a power or a log.
constexpr float kBitsOfOne = 127 * 8388608.0f, kBitsPerNat = 8388608.0f * 1.44269504f;

inline vec probability(vec log_weight) {
  vec x = max(min(log_weight, zero()), set1(-11.0903549f));  // log 2^-16
  return float_of_bits(to_int(fma(x, set1(kBitsPerNat), set1(kBitsOfOne))));
}

// The least log of a weight whose probability is u, so that a row is drawn; numbers up to kLeastProbability draw any.
inline vec least_drawn(vec u) {
  vec log_weight = mul(sub(to_float(bits_of_float(u)), set1(kBitsOfOne)), set1(1 / kBitsPerNat));
  return select_less(set1(kLeastProbability), u, log_weight, set1(-kLargest));
}

// Rows that are drawn for a head: of a block whose first key is number `first` and whose others are `apart` from each
// other.
inline void keep_drawn(const DrawArgs& draw, uint32_t head, uint32_t first, uint32_t apart, uint32_t chosen, vec logs) {
  alignas(64) float of_lanes[kCodeBlock];
  store(of_lanes, logs);
  size_t& count = draw.num_drawn[head];
  uint16_t* ids = draw.ids + head * draw.stride;
  float* kept = draw.log_probability + head * draw.stride;
  for (; chosen; chosen &= chosen - 1) {
    const int lane = __builtin_ctz(chosen);
    const uint32_t id = first + static_cast<uint32_t>(lane) * apart;
    ids[count] = static_cast<uint16_t>(id);
    kept[count++] = of_lanes[lane];
    const char* row = draw.rows + id * draw.row_bytes;
    for (size_t byte = 0; byte < draw.row_bytes; byte += 64) __builtin_prefetch(row + byte, 0, 2);
  }
}

// Rows of B blocks of a piece, from `block` on, for H heads. id: of the piece's first key.
template <int H, int B>
inline void draw_blocks(const DrawArgs& draw, uint32_t head, const CodePiece& piece, uint32_t id, uint32_t block,
                        const vec (&logs)[B][H]) {
  for (int b = 0; b < B; ++b, ++block) {
    const vec least = least_drawn(uniform(id + block * kCodeBlock, draw.key));
    uint32_t there = 0xffff;
    if (__builtin_expect(piece.tokens < kPieceTokens, 0)) there = (1u << piece.keys_of(block)) - 1;
    for (int h = 0; h < H; ++h) {
      const vec weight = sub(logs[b][h], set1(draw.log_thresholds[head + h]));
      const uint32_t chosen = sign_bits(sub(weight, least)) & there;
      if (__builtin_expect(chosen != 0, 0)) keep_drawn(draw, head + h, id + block, piece.blocks, chosen, weight);
    }
  }
}

template <int BITS, int H>
void draw_for_heads(const ScanArgs& args, const DrawArgs& draw, uint32_t head) {
  constexpr int kBlocks = H == 1 ? 4 : 2;
  const size_t bytes = block_bytes_of(args);
  const char* block = args.blocks;
  for (uint32_t first = 0; first < draw.count; first += kPieceTokens) {
    const CodePiece piece = CodePiece::at(first / kPieceTokens, draw.count);
    const uint32_t id = draw.first_id + first;
    uint32_t i = 0;
    for (; i + kBlocks <= piece.blocks; i += kBlocks, block += kBlocks * bytes) {
      vec logs[kBlocks][H];
      const char* ahead = block + kTilesAhead * kBlocks * bytes;  // beyond the end at times: harmless
      for (size_t byte = 0; byte < kBlocks * bytes; byte += 64) __builtin_prefetch(ahead + byte, 0, 2);
      weigh<BITS, H, kBlocks>(args, head, block, bytes, logs);
      draw_blocks<H, kBlocks>(draw, head, piece, id, i, logs);
    }
    for (; i < piece.blocks; ++i, block += bytes) {
      vec logs[1][H];
      weigh<BITS, H, 1>(args, head, block, bytes, logs);
      draw_blocks<H, 1>(draw, head, piece, id, i, logs);
    }
  }
  for (int h = 0; h < H; ++h) {
    float* p = draw.log_probability + (head + h) * draw.stride;
    const size_t count = draw.num_drawn[head + h];
    for (size_t k = count; k % kChunk; ++k) p[k] = 0;
    for (size_t k = 0; k < count; k += kChunk) store(p + k, log(probability(load(p + k))));
  }
}

// Calls f(Constant<H>(), head) for tiles of up to four heads.
template <class F>
inline void by_heads(uint32_t num_heads, const F& f) {
  uint32_t head = 0;
  for (; head + 4 <= num_heads; head += 4) f(Constant<4>(), head);
  if (num_heads - head == 3) f(Constant<3>(), head);
  if (num_heads - head == 2) f(Constant<2>(), head);
  if (num_heads - head == 1) f(Constant<1>(), head);
}

template <int BITS>
void scan_logs(const ScanArgs& args, float* logs) {
  by_heads(args.num_heads,
           [&](auto tile, uint32_t head) { logs_of_heads<BITS, decltype(tile)::value>(args, head, logs); });
}

template <int BITS>
void scan_draw(const ScanArgs& args, const DrawArgs& draw) {
  for (uint32_t h = 0; h < args.num_heads; ++h) draw.num_drawn[h] = 0;
  by_heads(args.num_heads,
           [&](auto tile, uint32_t head) { draw_for_heads<BITS, decltype(tile)::value>(args, draw, head); });
}

}  // namespace
}  // namespace magicpig
