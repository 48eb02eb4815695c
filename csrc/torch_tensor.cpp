#include "torch_tensor.h"

#include <dlfcn.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "core/call.h"

namespace shardopt {
namespace {

namespace py = pybind11;

using Handle = const void*;  // points to a pointer to a tensor's implementation
template <class T>
using Getter = int32_t (*)(Handle, T*);

struct Libtorch {
  PyTypeObject* tensor_type;
  size_t implementation;  // offset in bytes, in a tensor's Python object, of the pointer to its implementation
  Getter<void*> data_ptr;
  Getter<int64_t> numel, dim, storage_size, storage_offset;
  Getter<int64_t*> sizes, strides;
  Getter<int32_t> dtype, device_type, device_index;
  Getter<int32_t> layout;  // nullptr before PyTorch 2.8, which complains on stderr of a sparse tensor's strides
  int32_t strided, float32, bfloat16, float16;
  bool (*is_neg)(Handle);  // at::is_neg(const Tensor&), without its dispatch; no C function tells it

  Handle handle(PyObject* tensor) const { return reinterpret_cast<const char*>(tensor) + implementation; }
};

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw std::runtime_error("no " + std::string(name));
}

int32_t constant(void* library, const char* name) {
  int32_t (*function)();
  find(library, name, function);
  return function();
}

// Where a tensor's Python object keeps the pointer that its attribute `_cdata` shows.
size_t implementation_offset(const py::object& tensor) {
  const auto wanted = tensor.attr("_cdata").cast<uint64_t>();
  const char* object = reinterpret_cast<const char*>(tensor.ptr());
  const auto size = static_cast<size_t>(Py_TYPE(tensor.ptr())->tp_basicsize);
  for (size_t offset = sizeof(PyObject); offset + sizeof(void*) <= size; offset += sizeof(void*)) {
    if (*reinterpret_cast<const uint64_t*>(object + offset) == wanted) return offset;
  }
  throw std::runtime_error("no pointer to the implementation in a tensor's Python object");
}

Libtorch load(const py::module_& torch) {
  void* library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) throw std::runtime_error("no libtorch_cpu.so");
  Libtorch found{};
  find(library, "aoti_torch_get_data_ptr", found.data_ptr);
  find(library, "aoti_torch_get_numel", found.numel);
  find(library, "aoti_torch_get_dim", found.dim);
  find(library, "aoti_torch_get_storage_size", found.storage_size);
  find(library, "aoti_torch_get_storage_offset", found.storage_offset);
  find(library, "aoti_torch_get_sizes", found.sizes);
  find(library, "aoti_torch_get_strides", found.strides);
  find(library, "aoti_torch_get_dtype", found.dtype);
  find(library, "aoti_torch_get_device_type", found.device_type);
  find(library, "aoti_torch_get_device_index", found.device_index);
  find(library, "_ZN2at25compositeimplicitautograd6is_negERKNS_6TensorE", found.is_neg);
  found.layout = reinterpret_cast<Getter<int32_t>>(dlsym(library, "aoti_torch_get_layout"));
  found.strided = constant(library, "aoti_torch_layout_strided");
  found.float32 = constant(library, "aoti_torch_dtype_float32");
  found.bfloat16 = constant(library, "aoti_torch_dtype_bfloat16");
  found.float16 = constant(library, "aoti_torch_dtype_float16");
  const py::object parameter = torch.attr("nn").attr("Parameter")(torch.attr("empty")(1, py::arg("device") = "cpu"));
  found.tensor_type = reinterpret_cast<PyTypeObject*>(py::object(torch.attr("Tensor")).release().ptr());
  found.implementation = implementation_offset(parameter);
  if (implementation_offset(torch.attr("empty")(1, py::arg("device") = "cpu")) != found.implementation)
    throw std::runtime_error("tensors and parameters that differ");
  void* data = nullptr;
  if (found.data_ptr(found.handle(parameter.ptr()), &data) != 0 ||
      reinterpret_cast<uint64_t>(data) != parameter.attr("data_ptr")().cast<uint64_t>())
    throw std::runtime_error("another data_ptr in C than in Python");
  const py::object negative = torch.attr("_neg_view")(parameter);
  if (found.is_neg(found.handle(parameter.ptr())) || !found.is_neg(found.handle(negative.ptr())))
    throw std::runtime_error("another is_neg in C than in Python");
  return found;
}

const Libtorch& libtorch() {
  static const Libtorch loaded = [] {
    const py::module_ torch = py::module_::import("torch");
    try {
      return load(torch);
    } catch (const std::runtime_error& error) {
      throw std::runtime_error("got PyTorch " + py::str(torch.attr("__version__")).cast<std::string>() + " with " +
                               error.what() + ", expected a build of PyTorch 2.6 to 2.15 for Linux; install one");
    }
  }();
  return loaded;
}

}  // namespace

bool TensorView::is_contiguous() const {
  int64_t inner = 1;
  for (int64_t i = ndim - 1; i >= 0; --i) {
    if (sizes[i] != 1 && strides[i] != inner) return numel == 0;
    inner *= sizes[i];
  }
  return true;
}

bool is_plain_tensor(PyObject* object) { return Py_TYPE(object) == libtorch().tensor_type; }

bool view_tensor(PyObject* tensor, TensorView& view) {
  const Libtorch& torch = libtorch();
  if (!PyObject_TypeCheck(tensor, torch.tensor_type)) return false;
  const Handle handle = torch.handle(tensor);
  int32_t layout = torch.strided;
  if (torch.layout != nullptr && (torch.layout(handle, &layout) != 0 || layout != torch.strided)) return false;
  void* data = nullptr;
  if (torch.strides(handle, &view.strides) != 0 || torch.data_ptr(handle, &data) != 0) return false;
  torch.numel(handle, &view.numel);
  torch.dim(handle, &view.ndim);
  torch.sizes(handle, &view.sizes);
  torch.dtype(handle, &view.dtype);
  view.address = reinterpret_cast<uint64_t>(data);
  return true;
}

bool is_negative_view(PyObject* tensor) {
  const Libtorch& torch = libtorch();
  return torch.is_neg(torch.handle(tensor));
}

int64_t device_of(PyObject* tensor) {
  const Libtorch& torch = libtorch();
  int32_t type = 0, index = 0;
  torch.device_type(torch.handle(tensor), &type);
  torch.device_index(torch.handle(tensor), &index);
  return (int64_t{type} << 32) | static_cast<uint32_t>(index);
}

bool lies_in_storage(PyObject* tensor, const TensorView& view) {
  if (view.numel == 0) return true;
  const Libtorch& torch = libtorch();
  int64_t last = 0, offset = 0, bytes = 0;
  for (int64_t i = 0; i < view.ndim; ++i) last += (view.sizes[i] - 1) * view.strides[i];
  torch.storage_offset(torch.handle(tensor), &offset);
  torch.storage_size(torch.handle(tensor), &bytes);
  return (offset + last + 1) * (view.dtype == torch.float32 ? 4 : 2) <= bytes;
}

uint8_t dtype_of(const TensorView& view) {
  const Libtorch& torch = libtorch();
  if (view.dtype == torch.float32) return static_cast<uint8_t>(DType::kFloat32);
  if (view.dtype == torch.bfloat16) return static_cast<uint8_t>(DType::kBFloat16);
  if (view.dtype == torch.float16) return static_cast<uint8_t>(DType::kFloat16);
  return kNoDType;
}

}  // namespace shardopt
