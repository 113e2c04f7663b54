// What the binding files share: tensors from Python, checked as far as memory safety needs it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "segment.h"

namespace magicpig {

namespace nb = nanobind;

using Array = nb::ndarray<nb::pytorch, nb::ro, nb::device::cpu>;
template <class T, size_t N>
using Out = nb::ndarray<nb::pytorch, T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T, size_t N>
using In = nb::ndarray<nb::pytorch, const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

// A tensor that owns the values.
template <size_t N, class T>
nb::ndarray<nb::pytorch, T, nb::ndim<N>> owned(std::vector<T> values, std::initializer_list<size_t> shape) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::pytorch, T, nb::ndim<N>>(kept->data(), shape, owner);
}

[[noreturn]] inline void refuse(const std::string& message) { throw std::invalid_argument(message); }

template <class Tensor>
RowType type_of(const Tensor& array, const char* name) {
  const nb::dlpack::dtype type = array.dtype();
  const auto code = static_cast<nb::dlpack::dtype_code>(type.code);
  if (code == nb::dlpack::dtype_code::Bfloat && type.bits == 16) return kBF16;
  if (code == nb::dlpack::dtype_code::Float && type.bits == 16) return kF16;
  if (code == nb::dlpack::dtype_code::Float && type.bits == 32) return kF32;
  throw nb::type_error((std::string(name) + " must be bfloat16, float16 or float32").c_str());
}

inline TensorView view(const Array& array, const Geometry& geometry, const char* name) {
  if (array.ndim() != 3 || array.shape(0) != geometry.num_kv_heads || array.shape(2) != geometry.head_dim) {
    refuse(std::string(name) + " must have shape [num_kv_heads, tokens, head_dim]");
  }
  if (array.size() && (array.stride(2) != 1 || array.stride(0) < 0 || array.stride(1) < 0)) {
    refuse(std::string(name) + " must be contiguous in its last dimension");
  }
  return {static_cast<const char*>(array.data()), type_of(array, name), static_cast<size_t>(array.stride(0)),
          static_cast<size_t>(array.stride(1)), name};
}

// Dense queries [batch, num_heads, head_dim].
inline const char* query_data(const Array& queries, size_t batch, const Geometry& geometry) {
  if (queries.ndim() != 3 || queries.shape(0) != batch || queries.shape(1) != geometry.num_heads ||
      queries.shape(2) != geometry.head_dim) {
    refuse("queries must have shape [batch, num_heads, head_dim]");
  }
  int64_t expected = 1;
  for (size_t i = 3; i-- > 0; expected *= static_cast<int64_t>(queries.shape(i))) {
    if (queries.shape(i) > 1 && queries.stride(i) != expected) refuse("queries must be contiguous");
  }
  return static_cast<const char*>(queries.data());
}

inline RowType type_named(const std::string& name) {
  if (name == "bfloat16") return kBF16;
  if (name == "float16") return kF16;
  if (name == "float32") return kF32;
  refuse("dtype must be bfloat16, float16 or float32, not " + name);
}

inline bool same(const Geometry& a, const Geometry& b) {
  return a.num_heads == b.num_heads && a.num_kv_heads == b.num_kv_heads && a.head_dim == b.head_dim &&
         a.type == b.type && (a.lsh == b.lsh || (a.lsh && b.lsh && *a.lsh == *b.lsh)) &&
         (a.scan == b.scan || (a.scan && b.scan && *a.scan == *b.scan));
}

using Rows = nb::ndarray<nb::pytorch, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

// Copies tokens from `first` on into keys and values, as many as they hold.
inline void read_checked(const Geometry& geometry, const std::vector<Run>& runs, size_t first, const Rows& keys,
                         const Rows& values) {
  size_t tokens = 0;
  for (const Run& run : runs) tokens += run.num_tokens;
  for (const Rows* array : {&keys, &values}) {
    if (array->shape(0) != geometry.num_kv_heads || array->shape(2) != geometry.head_dim ||
        array->shape(1) != keys.shape(1) || type_of(*array, "keys and values") != geometry.type)
      refuse("keys and values must have shape [num_kv_heads, tokens, head_dim] and the stored dtype");
  }
  if (first > tokens || keys.shape(1) > tokens - first) refuse("keys and values reach past the last token");
  nb::gil_scoped_release release;
  read_tokens(geometry, runs, first, keys.shape(1), static_cast<char*>(keys.data()), static_cast<char*>(values.data()));
}

// Each adds its part to the module.
void bind_attend(nb::module_& module);
void bind_window(nb::module_& module);
void bind_prompt(nb::module_& module);

}  // namespace magicpig
