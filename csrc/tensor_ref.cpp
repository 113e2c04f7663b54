#include "tensor_ref.h"

namespace nb = nanobind;

namespace magicpig {

namespace {

// The published layout of DLPack's exchange table, version 1.
struct ExchangeTable {
  uint32_t major, minor;
  const ExchangeTable* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object;
  void* managed_tensor_to_py_object;
  int (*tensor_from_py_object)(void* object, nb::dlpack::dltensor* out);
};

const ExchangeTable* look_up_table(PyTypeObject* type) {
  PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  const void* found = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : nullptr;
  Py_XDECREF(capsule);
  PyErr_Clear();
  const auto* table = static_cast<const ExchangeTable*>(found);
  while (table && table->major != 1) table = table->previous;
  return table && table->tensor_from_py_object ? table : nullptr;
}

// The table of a type, or null; the last two types are remembered (tensor and parameter). With the interpreter's lock
// held.
const ExchangeTable* table_of(PyTypeObject* type) {
  static struct {
    PyTypeObject* type;  // kept alive
    const ExchangeTable* table;
  } known[2];
  static int oldest = 0;
  for (const auto& entry : known)
    if (entry.type == type) return entry.table;
  auto& entry = known[oldest];
  oldest = 1 - oldest;
  Py_INCREF(type);
  Py_XDECREF(entry.type);
  entry = {type, look_up_table(type)};
  return entry.table;
}

}  // namespace

bool TensorRef::borrow(PyObject* source) noexcept {
  if (const ExchangeTable* table = table_of(Py_TYPE(source))) {
    if (table->tensor_from_py_object(source, &tensor_) == 0) return true;
    PyErr_Clear();
    return false;
  }
  nb::detail::make_caster<decltype(owner_)> caster;
  if (!caster.from_python(source, 0, nullptr)) return false;
  owner_ = std::move(caster.value);
  tensor_.data = owner_.data();
  tensor_.device = {owner_.device_type(), owner_.device_id()};
  tensor_.ndim = static_cast<int32_t>(owner_.ndim());
  tensor_.dtype = owner_.dtype();
  tensor_.shape = const_cast<int64_t*>(owner_.shape_ptr());
  tensor_.strides = const_cast<int64_t*>(owner_.stride_ptr());
  return true;
}

size_t TensorRef::size() const {
  size_t total = 1;
  for (size_t i = 0; i < ndim(); ++i) total *= shape(i);
  return total;
}

size_t TensorRef::num_rows(size_t columns, const std::string& name) const {
  if (ndim() == 0 || shape(ndim() - 1) != columns) {
    throw std::invalid_argument(name + " must have " + std::to_string(columns) + " elements in its last dimension");
  }
  return size() / columns;
}

void* TensorRef::data(const std::string& name, nb::dlpack::dtype_code code, unsigned bits, const char* dtype) const {
  char* memory = bytes(name);
  if (tensor_.dtype.code != static_cast<uint8_t>(code) || tensor_.dtype.bits != bits || tensor_.dtype.lanes != 1) {
    throw nb::type_error((name + " must be " + dtype).c_str());
  }
  if (!dense()) throw std::invalid_argument(name + " must be contiguous");
  return memory;
}

bool TensorRef::dense() const {
  if (!tensor_.strides || size() == 0) return true;
  int64_t expected = 1;
  for (size_t i = ndim(); i-- > 0; expected *= tensor_.shape[i])
    if (tensor_.shape[i] != 1 && tensor_.strides[i] != expected) return false;
  return true;
}

int64_t TensorRef::stride(size_t i) const {
  if (tensor_.strides) return tensor_.strides[i];
  int64_t elements = 1;
  for (size_t j = ndim(); j-- > i + 1;) elements *= tensor_.shape[j];
  return elements;
}

char* TensorRef::bytes(const std::string& name) const {
  if (tensor_.device.device_type != nb::device::cpu::value) throw std::invalid_argument(name + " must be on the CPU");
  return static_cast<char*>(tensor_.data) + tensor_.byte_offset;
}

RowType TensorRef::row_type(const std::string& name) const {
  const auto code = static_cast<nb::dlpack::dtype_code>(tensor_.dtype.code);
  if (code == nb::dlpack::dtype_code::Bfloat && tensor_.dtype.bits == 16) return kBF16;
  if (code == nb::dlpack::dtype_code::Float && tensor_.dtype.bits == 16) return kF16;
  if (code == nb::dlpack::dtype_code::Float && tensor_.dtype.bits == 32) return kF32;
  throw nb::type_error((name + " must be bfloat16, float16 or float32").c_str());
}

bf16* TensorRef::bf16_data(const std::string& name) const {
  return static_cast<bf16*>(data(name, nb::dlpack::dtype_code::Bfloat, 16, "bfloat16"));
}

const int64_t* TensorRef::int64_data(const std::string& name) const {
  return static_cast<const int64_t*>(data(name, nb::dlpack::dtype_code::Int, 64, "int64"));
}

}  // namespace magicpig
