// Weights of linear layers as the kernels read them (kernels.h), and products with them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

#include "inputs.h"
#include "kernels.h"
#include "threads.h"

namespace magicpig {

struct Matrix {
  const bf16* weight;  // [out, in]
  const bf16* bias;    // [out], or null
  size_t out, in;
};

class Panels {
 public:
  explicit Panels(const Matrix& matrix);              // kGroup outputs a group
  Panels(const Matrix& first, const Matrix& second);  // kPanel outputs of either a group; both of one shape

  size_t in() const { return in_; }
  size_t out() const { return out_; }  // of one matrix
  size_t num_groups() const { return num_groups_; }
  size_t nbytes() const { return num_groups_ * (num_pairs_ * 2 * kGroup * sizeof(bf16) + kGroup * sizeof(float)); }

  // The kernels' arguments for `rows` rows of inputs from `first` on.
  LinearArgs args(size_t group, const Inputs& inputs, size_t first, size_t rows) const;

  // Row `output` of a single matrix.
  void unpack(size_t output, bf16* row) const;

 private:
  bf16* group(size_t g) const { return reinterpret_cast<bf16*>(weights_.get()) + g * num_pairs_ * 2 * kGroup; }
  Panels(const Matrix* matrices, size_t num_matrices);
  void pack(const Matrix& matrix, size_t panel, size_t first_output);

  size_t in_, out_, outputs_per_group_, num_pairs_, num_groups_;
  std::shared_ptr<char> weights_;  // [num_groups][num_pairs][2][16][2] of bf16
  std::vector<float> bias_;        // [num_groups][2][16]
};

// Calls work(group, first row, rows) for all groups and blocks of rows, in parallel.
template <class F>
void for_each_group(const Panels& panels, size_t rows, F&& work) {
  // Costs are in bytes of weights, read for a few rows. A call of some microseconds is over before another thread
  // wakes.
  constexpr size_t kTaskCost = size_t{1} << 16, kAloneCost = size_t{1} << 18;
  const size_t group_cost = panels.in() * kGroup * sizeof(bf16) * (1 + rows / 8);
  const bool alone = group_cost * panels.num_groups() <= kAloneCost;
  const size_t step = alone ? panels.num_groups() : std::max<size_t>(1, kTaskCost / group_cost);
  const size_t num_chunks = (panels.num_groups() + step - 1) / step;
  const size_t num_blocks = (rows + kLinearBlockRows - 1) / kLinearBlockRows;
  parallel_for(num_chunks * num_blocks, [&](size_t task) {
    const size_t block = task % num_blocks, chunk = task / num_blocks;
    const size_t first = block * rows / num_blocks, end = (block + 1) * rows / num_blocks;
    for (size_t g = chunk * step; g < std::min((chunk + 1) * step, panels.num_groups()); ++g)
      work(g, first, end - first);
  });
}

// out [rows, panels.out()] = inputs times a single matrix, plus its bias.
void multiply(const Kernels& kernels, const Panels& panels, const Inputs& inputs, size_t rows, bf16* out);

}  // namespace magicpig
