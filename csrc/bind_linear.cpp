#include "bind_linear.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "linear.h"
#include "mlp.h"
#include "norm.h"
#include "tensor_ref.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace magicpig {
namespace {

using MaybeTensor = std::optional<TensorRef>;

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

bf16* out_data(const TensorRef& out, size_t rows, size_t columns) {
  if (out.num_rows(columns, "out") != rows) refuse("out must have as many rows as the input");
  return out.bf16_data("out");
}

Matrix matrix(const TensorRef& weight, const MaybeTensor& bias, const std::string& prefix) {
  if (weight.ndim() != 2 || weight.size() == 0) refuse(prefix + "weight must have shape [out, in], not empty");
  const size_t out = weight.shape(0), in = weight.shape(1);
  if (bias && (bias->ndim() != 1 || bias->shape(0) != out)) refuse(prefix + "bias must have shape [out]");
  return {weight.bf16_data(prefix + "weight"), bias ? bias->bf16_data(prefix + "bias") : nullptr, out, in};
}

template <class Layer>
void forward(const Layer& layer, const TensorRef& x, const TensorRef& out) {
  const size_t rows = x.num_rows(layer.in(), "x");
  const bf16* from = x.bf16_data("x");
  bf16* to = out_data(out, rows, layer.out());
  nb::gil_scoped_release release;
  layer.forward(from, rows, to);
}

void make_linear(PackedLinear* self, const TensorRef& weight, const MaybeTensor& bias) {
  const Matrix copied = matrix(weight, bias, "");
  nb::gil_scoped_release release;
  new (self) PackedLinear(copied);
}

void lookup(const PackedLinear& layer, const TensorRef& ids, const TensorRef& out) {
  const int64_t* id = ids.int64_data("ids");
  const size_t count = ids.size();
  bf16* to = out_data(out, count, layer.in());
  nb::gil_scoped_release release;
  layer.lookup(id, count, to);
}

Activation activation_named(const std::string& name) {
  if (name == "silu") return kSilu;
  if (name == "gelu_tanh") return kGeluTanh;
  refuse("activation must be silu or gelu_tanh, not " + name);
}

void make_mlp(GatedMLP* self, const TensorRef& gate_weight, const TensorRef& up_weight, const TensorRef& down_weight,
              const std::string& activation, const MaybeTensor& gate_bias, const MaybeTensor& up_bias,
              const MaybeTensor& down_bias) {
  const Matrix gate = matrix(gate_weight, gate_bias, "gate_"), up = matrix(up_weight, up_bias, "up_"),
               down = matrix(down_weight, down_bias, "down_");
  if (gate.out != up.out || gate.in != up.in) refuse("up_weight must have the shape of gate_weight");
  if (down.in != gate.out) refuse("down_weight must have as many columns as gate_weight has rows");
  const Activation chosen = activation_named(activation);
  nb::gil_scoped_release release;
  new (self) GatedMLP(gate, up, down, chosen);
}

void norm(const TensorRef& x, const TensorRef& weight, float eps, bool one_plus_weight, const TensorRef& out) {
  if (weight.ndim() != 1 || weight.size() == 0) refuse("weight must have shape [dim], not empty");
  if (!(eps >= 0)) refuse("eps must not be negative");
  const size_t dim = weight.shape(0), rows = x.num_rows(dim, "x");
  const bf16 *from = x.bf16_data("x"), *scale = weight.bf16_data("weight");
  bf16* to = out_data(out, rows, dim);
  nb::gil_scoped_release release;
  rms_norm(from, rows, dim, scale, one_plus_weight ? kTimesOnePlusWeight : kTimesWeight, eps, to);
}

}  // namespace

void bind_linear(nb::module_& m) {
  nb::class_<PackedLinear>(m, "PackedLinear")
      .def("__init__", &make_linear, "weight"_a.noconvert(), "bias"_a.noconvert().none() = nb::none())
      .def("forward", &forward<PackedLinear>, "x"_a.noconvert(), "out"_a.noconvert(),
           "out [..., out_features] of x [..., in_features], both bfloat16.")
      .def("lookup", &lookup, "ids"_a.noconvert(), "out"_a.noconvert(),
           "Rows of the weight, out [..., in_features], for ids (int64).")
      .def_prop_ro("in_features", &PackedLinear::in)
      .def_prop_ro("out_features", &PackedLinear::out)
      .def_prop_ro("nbytes", &PackedLinear::nbytes);

  nb::class_<GatedMLP>(m, "GatedMLP")
      .def("__init__", &make_mlp, "gate_weight"_a.noconvert(), "up_weight"_a.noconvert(), "down_weight"_a.noconvert(),
           "activation"_a, "gate_bias"_a.noconvert().none() = nb::none(), "up_bias"_a.noconvert().none() = nb::none(),
           "down_bias"_a.noconvert().none() = nb::none())
      .def("forward", &forward<GatedMLP>, "x"_a.noconvert(), "out"_a.noconvert(),
           "out [..., out_features] of x [..., in_features], both bfloat16.")
      .def_prop_ro("in_features", &GatedMLP::in)
      .def_prop_ro("out_features", &GatedMLP::out)
      .def_prop_ro("nbytes", &GatedMLP::nbytes);

  m.def("rms_norm", &norm, "x"_a.noconvert(), "weight"_a.noconvert(), "eps"_a, "one_plus_weight"_a, "out"_a.noconvert(),
        "out = x [..., dim] / sqrt(mean of squares + eps), times the weight or one plus the weight; all bfloat16.");
}

}  // namespace magicpig
