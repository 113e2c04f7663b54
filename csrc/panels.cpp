#include "panels.h"

#include <cstring>

#include "weight_memory.h"

namespace magicpig {

namespace {

float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

}  // namespace

Panels::Panels(const Matrix* matrices, size_t num_matrices)
    : in_(matrices[0].in),
      out_(matrices[0].out),
      outputs_per_group_(kGroup / num_matrices),
      num_pairs_((in_ + 1) / 2),
      num_groups_((out_ + outputs_per_group_ - 1) / outputs_per_group_),
      weights_(allocate_weights(num_groups_ * num_pairs_ * 2 * kGroup * sizeof(bf16))),
      bias_(num_groups_ * kGroup) {
  parallel_for(2 * num_groups_, [&](size_t panel) {
    if (num_matrices == 1) {
      pack(matrices[0], panel, panel * kPanel);
    } else {
      pack(matrices[panel % 2], panel, panel / 2 * kPanel);
    }
  });
}

Panels::Panels(const Matrix& matrix) : Panels(&matrix, 1) {}

Panels::Panels(const Matrix& first, const Matrix& second) : Panels(std::vector<Matrix>{first, second}.data(), 2) {}

void Panels::pack(const Matrix& matrix, size_t panel, size_t first_output) {
  const size_t first = std::min(first_output, out_), lanes = std::min<size_t>(kPanel, out_ - first);
  bf16* pairs = group(panel / 2) + panel % 2 * 2 * kPanel;
  for (size_t column = 0; column < in_; column += 2, pairs += 2 * kGroup) {
    for (size_t lane = 0; lane < lanes; ++lane) {
      const bf16* from = matrix.weight + (first + lane) * in_ + column;
      pairs[2 * lane] = from[0];
      pairs[2 * lane + 1] = column + 1 < in_ ? from[1] : bf16{0};
    }
    std::memset(static_cast<void*>(pairs + 2 * lanes), 0, (kPanel - lanes) * 2 * sizeof(bf16));
  }
  for (size_t lane = 0; matrix.bias && lane < lanes; ++lane)
    bias_[panel * kPanel + lane] = to_float(matrix.bias[first + lane]);
}

void Panels::unpack(size_t output, bf16* row) const {
  const size_t panel = output / kPanel;
  const bf16* pairs = group(panel / 2) + panel % 2 * 2 * kPanel + output % kPanel * 2;
  for (size_t column = 0; column < in_; ++column) row[column] = pairs[column / 2 * 2 * kGroup + column % 2];
}

LinearArgs Panels::args(size_t g, const Inputs& inputs, size_t first, size_t rows) const {
  return {inputs.at(first, 0),
          inputs.stride,
          rows,
          num_pairs_,
          group(g),
          bias_.data() + g * kGroup,
          std::min(outputs_per_group_, out_ - g * outputs_per_group_)};
}

void multiply(const Kernels& kernels, const Panels& panels, const Inputs& inputs, size_t rows, bf16* out) {
  for_each_group(panels, rows, [&](size_t group, size_t first, size_t count) {
    kernels.linear(panels.args(group, inputs, first, count), out + first * panels.out() + group * kGroup, panels.out());
  });
}

}  // namespace magicpig
