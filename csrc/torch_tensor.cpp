#include "torch_tensor.h"

#include <dlfcn.h>
#include <pybind11/pybind11.h>

#include <algorithm>
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
  Getter<int64_t*> sizes, strides;
  Getter<int64_t> ndim, numel, offset, storage_bytes;
  Getter<int32_t> dtype, device_type, device_index, layout;
  int32_t strided, float32, bfloat16, float16, int16;
  // Functions of C++, of which there are none in C. Tensors made in inference mode refuse bump_version.
  void (*bump_version)(Handle);
  bool (*is_inference)(Handle);
  bool (*is_negative)(Handle);

  bool is_tensor(PyObject* object) const { return PyObject_TypeCheck(object, tensor_type); }
  Handle handle(PyObject* tensor) const { return reinterpret_cast<const char*>(tensor) + implementation; }
  int64_t type_of(Handle tensor) const {
    return get(dtype, tensor) | int64_t{get(device_type, tensor)} << 16 | int64_t{get(device_index, tensor) + 2} << 32;
  }
  bool is_strided(Handle tensor) const {
    int64_t* found = nullptr;
    return layout == nullptr ? strides(tensor, &found) == 0 : get(layout, tensor) == strided;
  }
  // The value that a function gives; 0 or nullptr where it fails.
  template <class T>
  static T get(Getter<T> getter, Handle tensor) {
    T value{};
    getter(tensor, &value);
    return value;
  }
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

// The offset, in a tensor's Python object, of the pointer that the attribute `_cdata` shows.
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
  found.tensor_type = reinterpret_cast<PyTypeObject*>(torch.attr("Tensor").ptr());
  find(library, "aoti_torch_get_data_ptr", found.data_ptr);
  find(library, "aoti_torch_get_sizes", found.sizes);
  find(library, "aoti_torch_get_strides", found.strides);
  find(library, "aoti_torch_get_dim", found.ndim);
  find(library, "aoti_torch_get_numel", found.numel);
  find(library, "aoti_torch_get_storage_offset", found.offset);
  find(library, "aoti_torch_get_storage_size", found.storage_bytes);
  find(library, "aoti_torch_get_dtype", found.dtype);
  find(library, "aoti_torch_get_device_type", found.device_type);
  find(library, "aoti_torch_get_device_index", found.device_index);
  found.layout = reinterpret_cast<Getter<int32_t>>(dlsym(library, "aoti_torch_get_layout"));  // PyTorch 2.6 has none
  find(library, "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE", found.bump_version);
  find(library, "_ZN2at6native12is_inferenceERKNS_6TensorE", found.is_inference);
  find(library, "_ZN2at6native6is_negERKNS_6TensorE", found.is_negative);
  found.strided = constant(library, "aoti_torch_layout_strided");
  found.float32 = constant(library, "aoti_torch_dtype_float32");
  found.bfloat16 = constant(library, "aoti_torch_dtype_bfloat16");
  found.float16 = constant(library, "aoti_torch_dtype_float16");
  found.int16 = constant(library, "aoti_torch_dtype_int16");
  const py::object parameter = torch.attr("nn").attr("Parameter")(torch.attr("empty")(1, py::arg("device") = "cpu"));
  found.implementation = implementation_offset(parameter);
  void* data = nullptr;
  if (found.data_ptr(found.handle(parameter.ptr()), &data) != 0 ||
      reinterpret_cast<uint64_t>(data) != parameter.attr("data_ptr")().cast<uint64_t>())
    throw std::runtime_error("another data_ptr in C than in Python");
  return found;
}

const Libtorch* new_libtorch() {
  const py::module_ torch = py::module_::import("torch");
  try {
    return new Libtorch(load(torch));
  } catch (const std::runtime_error& error) {
    throw std::runtime_error("got PyTorch " + py::str(torch.attr("__version__")).cast<std::string>() + " with " +
                             error.what() + ", expected a build of PyTorch 2.6 to 2.15 for Linux; install one");
  }
}

// The object is never destroyed. The GIL guards the pointer. The lock of a local static would be held while
// `new_libtorch` releases the GIL, and another thread would wait for it with the GIL; here two threads may both make an
// object, of which one is kept.
const Libtorch& libtorch() {
  static const Libtorch* made = nullptr;
  if (made == nullptr) {
    const Libtorch* const own = new_libtorch();
    if (made == nullptr) made = own;
  }
  return *made;
}

}  // namespace

bool is_plain_tensor(PyObject* object) { return Py_TYPE(object) == libtorch().tensor_type; }

int64_t type_number(PyObject* object) {
  const Libtorch& torch = libtorch();
  return torch.is_tensor(object) ? torch.type_of(torch.handle(object)) : 0;
}

bool TensorFormat::take(PyObject* tensor) {
  const Libtorch& torch = libtorch();
  if (!torch.is_tensor(tensor)) return false;
  const Handle handle = torch.handle(tensor);
  if (!torch.is_strided(handle)) return false;
  const int64_t *sizes = torch.get(torch.sizes, handle), *strides = torch.get(torch.strides, handle);
  if (sizes == nullptr || strides == nullptr) return false;
  ndim_ = torch.get(torch.ndim, handle);
  lengths_.assign(sizes, sizes + ndim_);
  lengths_.insert(lengths_.end(), strides, strides + ndim_);
  offset_ = torch.get(torch.offset, handle);
  type_ = torch.type_of(handle);
  implementation_ = *static_cast<const char* const*>(handle);
  negative_ = torch.is_negative(handle);
  const int32_t number = torch.get(torch.dtype, handle);
  dtype = number == torch.float32    ? static_cast<uint8_t>(DType::kFloat32)
          : number == torch.bfloat16 ? static_cast<uint8_t>(DType::kBFloat16)
          : number == torch.float16  ? static_cast<uint8_t>(DType::kFloat16)
                                     : kNoDType;
  const bool two_bytes = number == torch.bfloat16 || number == torch.float16 || number == torch.int16;
  const int64_t itemsize = number == torch.float32 ? 4 : two_bytes ? 2 : 1;  // a lower bound for other dtypes
  const int64_t numel = torch.get(torch.numel, handle);
  int64_t inner = 1, last = 0;
  strided = negative_;
  for (int64_t i = ndim_ - 1; i >= 0; --i) {
    strided = strided || (sizes[i] != 1 && strides[i] != inner && numel != 0);
    inner *= sizes[i];
    last += (sizes[i] - 1) * strides[i];
  }
  bytes_ = numel == 0 ? 0 : (offset_ + last + 1) * itemsize;
  begin_ = static_cast<uint64_t>(offset_ * itemsize);
  return true;
}

bool TensorFormat::read(PyObject* tensor, uint64_t& address) const {
  const Libtorch& torch = libtorch();
  if (!torch.is_tensor(tensor)) return false;
  const Handle handle = torch.handle(tensor);
  // The layout of an implementation does not change: that of the tensor that was taken is strided.
  if (*static_cast<const char* const*>(handle) != implementation_ && !torch.is_strided(handle)) return false;
  if (torch.get(torch.ndim, handle) != ndim_ || torch.get(torch.offset, handle) != offset_ ||
      torch.get(torch.dtype, handle) != (type_ & 0xffff) || torch.is_negative(handle) != negative_)
    return false;
  const int64_t *sizes = torch.get(torch.sizes, handle), *strides = torch.get(torch.strides, handle);
  if (sizes == nullptr || strides == nullptr || !std::equal(sizes, sizes + ndim_, lengths_.begin()) ||
      !std::equal(strides, strides + ndim_, lengths_.begin() + ndim_))
    return false;
  void* data = nullptr;
  if (torch.data_ptr(handle, &data) != 0) return false;  // lets a lazy clone have memory of its own
  const auto found = reinterpret_cast<uint64_t>(data);
  if (bytes_ != 0 && (found == begin_ || torch.get(torch.storage_bytes, handle) < bytes_)) return false;
  if (found != address && torch.type_of(handle) != type_) return false;  // devices have no address in common
  address = found;
  return true;
}

bool TensorFormat::is_without_memory(PyObject* tensor) {
  const Libtorch& torch = libtorch();
  TensorFormat format;
  if (!format.take(tensor)) return false;
  const Handle handle = torch.handle(tensor);
  return reinterpret_cast<uint64_t>(torch.get(torch.data_ptr, handle)) == format.begin_ &&
         torch.get(torch.storage_bytes, handle) > 0;
}

bool TensorFormat::has_shape_of(const TensorFormat& other) const {
  return ndim_ == other.ndim_ && std::equal(lengths_.begin(), lengths_.begin() + ndim_, other.lengths_.begin());
}

bool TensorFormat::has_device_of(const TensorFormat& other) const { return (type_ ^ other.type_) >> 16 == 0; }

void bump_versions(PyObject* tensors) {
  const Libtorch& torch = libtorch();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    PyObject* tensor = PyList_GET_ITEM(tensors, i);
    if (!torch.is_tensor(tensor)) throw std::invalid_argument("got a list of other objects than tensors");
    if (!torch.is_inference(torch.handle(tensor))) torch.bump_version(torch.handle(tensor));
  }
}

}  // namespace shardopt
