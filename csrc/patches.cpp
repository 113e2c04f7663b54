#include "patches.h"

#include <cmath>

#include "queries.h"

namespace magicpig {

namespace {

constexpr double kByChance = 0.25;  // of the patches that are drawn

}  // namespace

Passed draw_patches(const Kernels& kernels, const std::vector<const Codes*>& segments, const Ask& ask, double share) {
  size_t padded = 0, there = 0;
  for (const Codes* segment : segments) {
    padded += segment->num_mean_blocks() * kCodeBlock;
    there += segment->num_patches();
  }
  std::vector<float> logs(ask.num_heads * padded), weights(padded, 1e-30f), scratch(2 * padded);
  size_t at = 0;
  for (const Codes* segment : segments) {
    segment->patch_logs(ask, padded, logs.data() + at);
    at += segment->num_mean_blocks() * kCodeBlock;
  }
  for (uint32_t h = 0; h < ask.num_heads; ++h)  // all heads count alike
    kernels.add_softmax(logs.data() + h * padded, padded, weights.data());
  kernels.log(weights.data(), padded, logs.data());
  const double number = (1 - kByChance) * share * static_cast<double>(there);
  const float log_threshold = kernels.log_threshold(logs.data(), padded, static_cast<float>(number), scratch.data());
  const uint32_t* key = ask.queries.scan().key(ask.query);
  PatchArgs args = {weights.data(),  0, 0, std::exp(log_threshold), static_cast<float>(kByChance * share),
                    {key[0], key[1]}};
  Passed passed = {false, std::vector<uint32_t>(padded), std::vector<float>(padded)};
  size_t count = 0;
  for (const Codes* segment : segments) {
    args.count = segment->num_patches();
    count += kernels.draw_patches(args, passed.patches.data() + count, passed.log_probability.data() + count);
    args.weights += segment->num_mean_blocks() * kCodeBlock;
    args.first += static_cast<uint32_t>(args.count);
  }
  passed.patches.resize(count);
  passed.log_probability.resize((count + kCodeBlock - 1) / kCodeBlock * kCodeBlock, 1.0f);
  std::fill(passed.log_probability.begin() + static_cast<std::ptrdiff_t>(count), passed.log_probability.end(), 1.0f);
  kernels.log(passed.log_probability.data(), passed.log_probability.size(), passed.log_probability.data());
  return passed;
}

}  // namespace magicpig
