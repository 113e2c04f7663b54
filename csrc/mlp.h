// down(activation(gate(x)) * up(x)), with gate and up packed side by side.
#pragma once

#include "panels.h"

namespace magicpig {

class GatedMLP {
 public:
  // gate and up: [hidden, in], down: [out, hidden]. All are copied.
  GatedMLP(const Matrix& gate, const Matrix& up, const Matrix& down, Activation activation)
      : gate_up_(gate, up), down_(down), activation_(activation) {}

  size_t in() const { return gate_up_.in(); }
  size_t hidden() const { return gate_up_.out(); }
  size_t out() const { return down_.out(); }
  size_t nbytes() const { return gate_up_.nbytes() + down_.nbytes(); }

  // out [rows, out] of x [rows, in]: float32 inside, rounded to bf16 before and after the last product.
  void forward(const bf16* x, size_t rows, bf16* out) const;

 private:
  Panels gate_up_, down_;
  Activation activation_;
};

}  // namespace magicpig
