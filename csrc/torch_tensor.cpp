#include "torch_tensor.h"

#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <utility>

#include "core/call.h"

namespace shardopt {
namespace {

namespace py = pybind11;

// The words that describe a tensor in its implementation: the number of dimensions, sizes, strides, storage offset,
// number of elements, dtype (16 bits), device (24) and flags, dispatch keys (which tell layout and negative bit).
enum Word { kDims = 0, kSizes = 1, kStrides = 6, kOffset = 11, kNumel = 12, kType = 13, kKeys = 14 };
constexpr int64_t kInline = 5;  // a tensor with more dimensions has sizes and strides elsewhere
constexpr int64_t kTypeBits = 0xffffffffff, kDeviceBits = kTypeBits & ~int64_t{0xffff};

using Handle = const void*;  // points to a pointer to a tensor's implementation
template <class T>
using Getter = int32_t (*)(Handle, T*);

struct Libtorch {
  size_t implementation;  // offset in bytes, in a tensor's Python object, of the pointer to its implementation
  size_t words;           // offset in bytes, in the implementation, of the words that describe the tensor
  size_t storage;         // offset in bytes, there, of the pointer to the storage's implementation
  size_t data, bytes;     // offsets in bytes, in the storage's implementation, of its address and its length
  // Bits of the last word, the dispatch keys.
  int64_t dense;     // set for strided tensors
  int64_t negative;  // set for negative views
  int64_t versions;  // some are set for all tensors with a version counter: not for tensors made in inference mode
  Getter<void*> data_ptr;
  Getter<int64_t*> sizes, strides;
  Getter<int32_t> dtype;
  int32_t float32, bfloat16, float16, int16;
  // torch::autograd::impl::bump_version(const at::Tensor&), for which there is no C function.
  void (*bump_version)(Handle);

  Handle handle(PyObject* tensor) const { return reinterpret_cast<const char*>(tensor) + implementation; }
  const int64_t* words_of(PyObject* tensor) const {
    return reinterpret_cast<const int64_t*>(*static_cast<const char* const*>(handle(tensor)) + words);
  }
  // nullptr for a tensor without storage, such as a sparse one.
  const char* storage_of(PyObject* tensor) const {
    return *reinterpret_cast<const char* const*>(*static_cast<const char* const*>(handle(tensor)) + storage);
  }
  static int64_t word_at(const char* object, size_t offset) {
    return *reinterpret_cast<const int64_t*>(object + offset);
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

// A context manager of Python, entered.
class Context {
 public:
  explicit Context(py::object manager) : manager_(std::move(manager)) { manager_.attr("__enter__")(); }
  ~Context() { manager_.attr("__exit__")(py::none(), py::none(), py::none()); }

 private:
  py::object manager_;
};

// Finds the words that describe a tensor in its implementation, which begin right before the sizes. Checks, with pairs
// of tensors that differ in one respect each, that the words show the difference.
void find_words(Libtorch& torch, const py::module_& module) {
  const auto empty = [&](const char* dtype, const char* device, auto... sizes) -> py::object {
    return module.attr("empty")(sizes..., py::arg("dtype") = module.attr(dtype), py::arg("device") = device);
  };
  const py::object tensor = empty("float32", "cpu", 3, 5), high = empty("float32", "cpu", 2, 2, 2, 2, 2, 2);
  int64_t* sizes = nullptr;
  torch.sizes(torch.handle(tensor.ptr()), &sizes);
  torch.words = reinterpret_cast<char*>(sizes - kSizes) - *static_cast<char* const*>(torch.handle(tensor.ptr()));
  const auto word = [&](const py::object& of, int index) { return torch.words_of(of.ptr())[index]; };
  const int64_t keys = word(tensor, kKeys);
  torch.negative = keys ^ word(module.attr("_neg_view")(tensor), kKeys);
  torch.dense = keys & ~word(tensor.attr("to_sparse")(), kKeys);
  {
    const Context inference(module.attr("inference_mode")(true));
    torch.versions = keys & ~word(empty("float32", "cpu", 1), kKeys);
  }
  const auto described = [&](const py::object& of, int64_t ndim, int64_t offset, int64_t numel, int64_t first_stride) {
    int64_t* strides = nullptr;
    torch.strides(torch.handle(of.ptr()), &strides);
    return word(of, kDims) == ndim && word(of, kOffset) == offset && word(of, kNumel) == numel &&
           strides[0] == first_stride && (ndim > kInline || strides == torch.words_of(of.ptr()) + kStrides);
  };
  const auto changed = [&](const py::object& other) { return (word(tensor, kType) ^ word(other, kType)) & kTypeBits; };
  if (!described(tensor, 2, 0, 15, 5) || !described(tensor[py::int_(1)], 1, 5, 5, 1) ||
      !described(tensor.attr("t")(), 2, 0, 15, 1) || !described(high, 6, 0, 64, 32) || changed(high) != 0 ||
      changed(empty("float16", "cpu", 1)) == 0 || (changed(empty("float32", "meta", 1)) & kDeviceBits) == 0 ||
      keys != word(high, kKeys) || torch.dense == 0 || torch.versions == 0 || torch.negative == 0 ||
      (keys & torch.negative) != 0)
    throw std::runtime_error("a tensor's implementation of another layout");
}

// The offset of a word in an object, searched for in the object's first `end` bytes.
size_t offset_of(uint64_t word, const char* object, size_t end) {
  for (size_t offset = 0; offset < end; offset += sizeof(word)) {
    if (*reinterpret_cast<const uint64_t*>(object + offset) == word) return offset;
  }
  throw std::runtime_error("a storage of another layout");
}

// Finds the pointer to a tensor's storage, which stands before the words that describe the tensor, and the words of the
// storage with its address and length. Checks, with storages of other lengths, that the words show the lengths.
void find_storage(Libtorch& torch, const py::module_& module) {
  constexpr size_t kLooked = 64;  // bytes to search of a storage's implementation, which is longer
  for (const int64_t numel : {997, 331, 1}) {
    const py::object tensor = module.attr("empty")(numel, py::arg("device") = "cpu");
    const py::object storage = tensor.attr("untyped_storage")();
    const auto implementation = storage.attr("_cdata").cast<uint64_t>();
    const char* object = reinterpret_cast<const char*>(implementation);
    const size_t pointer =
        offset_of(implementation, *static_cast<const char* const*>(torch.handle(tensor.ptr())), torch.words);
    const size_t data = offset_of(storage.attr("data_ptr")().cast<uint64_t>(), object, kLooked);
    const size_t bytes = offset_of(storage.attr("nbytes")().cast<uint64_t>(), object, kLooked);
    if (numel == 997) torch.storage = pointer, torch.data = data, torch.bytes = bytes;
    if (pointer != torch.storage || data != torch.data || bytes != torch.bytes)
      throw std::runtime_error("a storage of another layout");
  }
}

Libtorch load(const py::module_& torch) {
  void* library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) throw std::runtime_error("no libtorch_cpu.so");
  const Context usual(torch.attr("inference_mode")(false));  // even if the first step is taken in inference mode
  Libtorch found{};
  find(library, "aoti_torch_get_data_ptr", found.data_ptr);
  find(library, "aoti_torch_get_sizes", found.sizes);
  find(library, "aoti_torch_get_strides", found.strides);
  find(library, "aoti_torch_get_dtype", found.dtype);
  find(library, "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE", found.bump_version);
  found.float32 = constant(library, "aoti_torch_dtype_float32");
  found.bfloat16 = constant(library, "aoti_torch_dtype_bfloat16");
  found.float16 = constant(library, "aoti_torch_dtype_float16");
  found.int16 = constant(library, "aoti_torch_dtype_int16");
  const py::object parameter = torch.attr("nn").attr("Parameter")(torch.attr("empty")(1, py::arg("device") = "cpu"));
  found.implementation = implementation_offset(parameter);
  if (implementation_offset(torch.attr("empty")(1, py::arg("device") = "cpu")) != found.implementation)
    throw std::runtime_error("tensors and parameters that differ");
  void* data = nullptr;
  if (found.data_ptr(found.handle(parameter.ptr()), &data) != 0 ||
      reinterpret_cast<uint64_t>(data) != parameter.attr("data_ptr")().cast<uint64_t>())
    throw std::runtime_error("another data_ptr in C than in Python");
  find_words(found, torch);
  find_storage(found, torch);
  return found;
}

struct Access {
  py::module_ python;  // torch's Python functions, used if the words were not found
  PyTypeObject* tensor_type;
  Libtorch torch{};
  std::string fault;  // empty if the words were found

  bool is_tensor(PyObject* object) const { return PyObject_TypeCheck(object, tensor_type); }
  bool is_fast() const { return fault.empty(); }
};

const Access* new_access() {
  const py::module_ torch = py::module_::import("torch");
  auto* const result = new Access{torch, reinterpret_cast<PyTypeObject*>(torch.attr("Tensor").ptr())};
  try {
    result->torch = load(torch);
  } catch (const std::runtime_error& error) {
    result->fault = "got PyTorch " + py::str(torch.attr("__version__")).cast<std::string>() + " with " + error.what() +
                    ", expected a build of PyTorch 2.6 to 2.15 for Linux";
    const std::string text = result->fault + "; steps are slower, as they read tensors through Python: install one";
    if (PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) != 0) throw py::error_already_set();
  }
  return result;
}

// The object is never destroyed: its Python objects would outlive the interpreter. The GIL guards the pointer. The lock
// of a local static would be held while `new_access` releases the GIL, and another thread would wait for it with the
// GIL; here two threads may both make an object, of which one is kept.
const Access& access() {
  static const Access* made = nullptr;
  if (made == nullptr) {
    const Access* const own = new_access();
    if (made == nullptr) made = own;
  }
  return *made;
}

// A number for a dtype or a device. Below 65536, as there are fewer dtypes and devices.
int64_t number_of(const py::object& value) {
  static auto* const numbers = new py::dict;
  if (!numbers->contains(value)) (*numbers)[value] = numbers->size() + 1;
  return (*numbers)[value].cast<int64_t>();
}

int64_t type_by_python(const py::handle& tensor) {
  return number_of(tensor.attr("dtype")) | number_of(tensor.attr("device")) << 16;
}

// Calls a function; false if torch raises an error.
template <class Function>
bool succeeds(Function function) {
  try {
    return function();
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_RuntimeError)) throw;
    return false;
  }
}

// Calls a function that reads a strided tensor through Python, past a subclass's overrides. Returns false if the tensor
// cannot be read.
template <class Function>
bool by_python(PyObject* tensor, Function function) {
  const py::module_& torch = access().python;
  return succeeds([&] {
    std::optional<Context> context;
    if (Py_TYPE(tensor) != access().tensor_type)
      context.emplace(torch.attr("_C").attr("DisableTorchFunctionSubclass")());
    const py::handle handle(tensor);
    return handle.attr("layout").is(torch.attr("strided")) && function(handle);
  });
}

struct Memory {
  uint64_t address = 0;
  int64_t bytes = 0;
  // Reads address and length of a tensor's storage. torch raises an error for the address of a wrapper's storage, which
  // has no memory.
  explicit Memory(const py::handle& tensor) {
    const py::object storage = tensor.attr("untyped_storage")();
    bytes = storage.attr("nbytes")().cast<int64_t>();
    succeeds([&] { return address = storage.attr("data_ptr")().cast<uint64_t>(), true; });
  }
};

}  // namespace

std::string tensor_access_fault() { return access().fault; }

bool is_plain_tensor(PyObject* object) { return Py_TYPE(object) == access().tensor_type; }

int64_t type_number(PyObject* object) {
  const Access& tensors = access();
  if (!tensors.is_tensor(object)) return 0;
  return tensors.is_fast() ? tensors.torch.words_of(object)[kType] & kTypeBits : type_by_python(object);
}

bool TensorFormat::take(PyObject* tensor) {
  if (!access().is_tensor(tensor)) return false;
  if (!access().is_fast()) return take_by_python(tensor);
  const Libtorch& torch = access().torch;
  const Handle handle = torch.handle(tensor);
  const int64_t* words = words_ = torch.words_of(tensor);
  if ((words[kKeys] & torch.dense) == 0) return false;
  int64_t *sizes = nullptr, *strides = nullptr;
  if (torch.strides(handle, &strides) != 0 || torch.sizes(handle, &sizes) != 0) return false;
  ndim_ = words[kDims];
  if (ndim_ <= kInline && sizes != words + kSizes) return false;  // a subclass computes its sizes
  lengths_.assign(sizes, sizes + ndim_);
  lengths_.insert(lengths_.end(), strides, strides + ndim_);
  offset_ = words[kOffset];
  type_ = words[kType] & kTypeBits;
  keys_ = words[kKeys];
  int32_t number = 0;
  torch.dtype(handle, &number);
  dtype = number == torch.float32    ? static_cast<uint8_t>(DType::kFloat32)
          : number == torch.bfloat16 ? static_cast<uint8_t>(DType::kBFloat16)
          : number == torch.float16  ? static_cast<uint8_t>(DType::kFloat16)
                                     : kNoDType;
  const bool two_bytes = number == torch.bfloat16 || number == torch.float16 || number == torch.int16;
  // For dtypes that are not stepped, a lower bound.
  const int64_t itemsize = number == torch.float32 ? 4 : two_bytes ? 2 : 1;
  finish(itemsize, words[kNumel], (keys_ & torch.negative) != 0);
  return true;
}

void TensorFormat::finish(int64_t itemsize, int64_t numel, bool is_negative) {
  const int64_t *sizes = lengths_.data(), *strides = sizes + ndim_;
  int64_t inner = 1, last = 0;
  strided = is_negative;
  for (int64_t i = ndim_ - 1; i >= 0; --i) {
    strided = strided || (sizes[i] != 1 && strides[i] != inner && numel != 0);
    inner *= sizes[i];
    last += (sizes[i] - 1) * strides[i];
  }
  bytes_ = numel == 0 ? 0 : (offset_ + last + 1) * itemsize;
}

bool TensorFormat::take_by_python(PyObject* tensor) {
  return by_python(tensor, [this](const py::handle& handle) {
    const py::module_& torch = access().python;
    const auto sizes = handle.attr("shape").cast<std::vector<int64_t>>();
    const auto strides = handle.attr("stride")().cast<std::vector<int64_t>>();
    ndim_ = static_cast<int64_t>(sizes.size());
    lengths_ = sizes;
    lengths_.insert(lengths_.end(), strides.begin(), strides.end());
    offset_ = handle.attr("storage_offset")().cast<int64_t>();
    type_ = type_by_python(handle);
    keys_ = handle.attr("is_neg")().cast<bool>();
    const py::object kind = handle.attr("dtype");
    dtype = kind.is(torch.attr("float32"))    ? static_cast<uint8_t>(DType::kFloat32)
            : kind.is(torch.attr("bfloat16")) ? static_cast<uint8_t>(DType::kBFloat16)
            : kind.is(torch.attr("float16"))  ? static_cast<uint8_t>(DType::kFloat16)
                                              : kNoDType;
    finish(handle.attr("element_size")().cast<int64_t>(), handle.attr("numel")().cast<int64_t>(), keys_ != 0);
    return true;
  });
}

bool TensorFormat::read_by_python(PyObject* tensor, uint64_t& address) const {
  TensorFormat now;
  if (!now.take_by_python(tensor) || now.offset_ != offset_ || now.type_ != type_ || now.keys_ != keys_ ||
      now.lengths_ != lengths_)
    return false;
  return by_python(tensor, [&](const py::handle& handle) {
    const Memory storage(handle);
    if (bytes_ != 0 && (storage.address == 0 || storage.bytes < bytes_)) return false;
    address = handle.attr("data_ptr")().cast<uint64_t>();
    return true;
  });
}

bool TensorFormat::read(PyObject* tensor, uint64_t& address) const {
  if (!access().is_tensor(tensor)) return false;
  if (!access().is_fast()) return read_by_python(tensor, address);
  const Libtorch& torch = access().torch;
  const int64_t* words = torch.words_of(tensor);
  if (words[kDims] != ndim_ || words[kOffset] != offset_ || (words[kType] & kTypeBits) != type_ ||
      words[kKeys] != keys_)
    return false;
  const Handle handle = torch.handle(tensor);
  const int64_t *sizes = words + kSizes, *strides = words + kStrides;
  if (ndim_ > kInline) {
    int64_t *far_sizes = nullptr, *far_strides = nullptr;
    if (torch.sizes(handle, &far_sizes) != 0 || torch.strides(handle, &far_strides) != 0) return false;
    sizes = far_sizes, strides = far_strides;
  }
  for (int64_t i = 0; i < ndim_; ++i) {
    if (sizes[i] != lengths_[i] || strides[i] != lengths_[ndim_ + i]) return false;
  }
  const char* storage = torch.storage_of(tensor);
  if (storage == nullptr) return false;
  void* data = nullptr;
  if (torch.data_ptr(handle, &data) != 0) return false;  // lets a lazy clone have memory of its own
  if (bytes_ != 0 && (torch.word_at(storage, torch.data) == 0 || torch.word_at(storage, torch.bytes) < bytes_))
    return false;
  address = reinterpret_cast<uint64_t>(data);
  return true;
}

bool TensorFormat::is_without_memory(PyObject* tensor) {
  if (!access().is_tensor(tensor)) return false;
  if (!access().is_fast()) {
    return by_python(tensor, [](const py::handle& handle) {
      const Memory storage(handle);
      return storage.address == 0 && storage.bytes > 0;
    });
  }
  const Libtorch& torch = access().torch;
  if ((torch.words_of(tensor)[kKeys] & torch.dense) == 0) return false;
  const char* storage = torch.storage_of(tensor);
  return storage != nullptr && torch.word_at(storage, torch.data) == 0 && torch.word_at(storage, torch.bytes) > 0;
}

bool TensorFormat::has_shape_of(const TensorFormat& other) const {
  return ndim_ == other.ndim_ && std::equal(lengths_.begin(), lengths_.begin() + ndim_, other.lengths_.begin());
}

bool TensorFormat::has_device_of(const TensorFormat& other) const { return ((type_ ^ other.type_) & kDeviceBits) == 0; }

void bump_versions(PyObject* tensors) {
  const Libtorch& torch = access().torch;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    PyObject* tensor = PyList_GET_ITEM(tensors, i);
    if (!access().is_tensor(tensor)) throw std::invalid_argument("got a list of other objects than tensors");
    if (!access().is_fast()) {
      access().python.attr("autograd").attr("graph").attr("increment_version")(py::handle(tensor));
    } else if ((torch.words_of(tensor)[kKeys] & torch.versions) != 0) {
      torch.bump_version(torch.handle(tensor));
    }
  }
}

}  // namespace shardopt
