// A tensor argument, borrowed for the length of a call. Crossing the border through DLPack's table of C functions takes
// a tenth of the two microseconds that tensor.__dlpack__() does, which matters for layers that run in twenty.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>

#include "kernels.h"

namespace magicpig {

class TensorRef {
 public:
  TensorRef() = default;
  // Whether `source` is a tensor; its memory stays its own.
  bool borrow(PyObject* source) noexcept;

  size_t ndim() const { return static_cast<size_t>(tensor_.ndim); }
  size_t shape(size_t i) const { return static_cast<size_t>(tensor_.shape[i]); }
  size_t size() const;
  // Rows of a tensor whose last dimension must have `columns` elements.
  size_t num_rows(size_t columns, const std::string& name) const;

  int64_t stride(size_t i) const;  // in elements

  // The memory of a tensor on the CPU of one of the types that rows have, dense or not. Errors name the argument.
  RowType row_type(const std::string& name) const;
  char* bytes(const std::string& name) const;
  bool dense() const;

  // The memory, if it is dense, on the CPU and of this type. Errors name the argument.
  bf16* bf16_data(const std::string& name) const;
  const int64_t* int64_data(const std::string& name) const;

 private:
  void* data(const std::string& name, nanobind::dlpack::dtype_code code, unsigned bits, const char* dtype) const;

  nanobind::dlpack::dltensor tensor_ = {};
  nanobind::ndarray<nanobind::pytorch> owner_;  // for libraries that have no such table
};

}  // namespace magicpig

namespace nanobind::detail {

template <>
struct type_caster<magicpig::TensorRef> {
  NB_TYPE_CASTER(magicpig::TensorRef, const_name("torch.Tensor"))
  bool from_python(handle source, uint32_t, cleanup_list*) noexcept { return value.borrow(source.ptr()); }
};

}  // namespace nanobind::detail
