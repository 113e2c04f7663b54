// A linear layer on packed bf16 weights, whose rows can be looked up as embeddings too.
#pragma once

#include "panels.h"

namespace magicpig {

class PackedLinear {
 public:
  explicit PackedLinear(const Matrix& matrix) : panels_(matrix) {}  // copies

  size_t in() const { return panels_.in(); }
  size_t out() const { return panels_.out(); }
  size_t nbytes() const { return panels_.nbytes(); }

  // out [rows, out] = x [rows, in] times the transposed weight, plus bias: summed in float32, rounded once.
  void forward(const bf16* x, size_t rows, bf16* out) const;

  // rows [count, in]: the weights of outputs ids; std::invalid_argument unless all are in [0, out).
  void lookup(const int64_t* ids, size_t count, bf16* rows) const;

 private:
  Panels panels_;
};

}  // namespace magicpig
