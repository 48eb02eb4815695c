// What a torch.Tensor is, without torch's headers: through its DLPack exchange interface (DLPack 1.3), whose layout
// every version of the same major number keeps. It allocates nothing and leaves the tensor as it is.
#pragma once

#include <Python.h>

#include <cstdint>
#include <vector>

namespace shardopt {

// Of dlpack.h, by its names and in its order.
enum : uint8_t { kDLFloat = 2, kDLBfloat = 4 };

struct DLDevice {
  int32_t device_type;
  int32_t device_id;
};

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DLPackExchangeAPI {
  struct {
    uint32_t major, minor;
  } version;
  DLPackExchangeAPI* prev_api;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  int (*dltensor_from_py_object_no_sync)(void* object, DLTensor* out);
  void* current_work_stream;
};

// A tensor's address, device, dtype and shape: all that the kernels' tables depend on.
class TensorView {
 public:
  TensorView() = default;
  explicit TensorView(const DLTensor& tensor)
      : data_(address_of(tensor)),
        device_(tensor.device),
        dtype_(tensor.dtype),
        shape_(tensor.shape, tensor.shape + tensor.ndim) {}

  bool has_shape_of(const DLTensor& tensor) const {
    if (static_cast<size_t>(tensor.ndim) != shape_.size()) return false;
    for (size_t i = 0; i < shape_.size(); ++i) {
      if (tensor.shape[i] != shape_[i]) return false;
    }
    return true;
  }
  bool has_device_of(const DLTensor& tensor) const {
    return tensor.device.device_type == device_.device_type && tensor.device.device_id == device_.device_id;
  }
  bool has_dtype_of(const DLTensor& tensor) const {
    return tensor.dtype.code == dtype_.code && tensor.dtype.bits == dtype_.bits;
  }
  bool operator==(const DLTensor& tensor) const {
    return address_of(tensor) == data_ && has_dtype_of(tensor) && has_device_of(tensor) && has_shape_of(tensor) &&
           is_contiguous(tensor);
  }

  static uint64_t address_of(const DLTensor& tensor) {
    return reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset;
  }

  static bool is_contiguous(const DLTensor& tensor) {
    if (tensor.strides == nullptr) return true;
    int64_t expected = 1;
    bool dense = true;
    for (int32_t i = tensor.ndim - 1; i >= 0; --i) {
      if (tensor.shape[i] == 0) return true;
      dense = dense && (tensor.shape[i] == 1 || tensor.strides[i] == expected);
      expected *= tensor.shape[i];
    }
    return dense;
  }

 private:
  uint64_t data_ = 0;
  DLDevice device_{};
  DLDataType dtype_{};
  std::vector<int64_t> shape_;
};

}  // namespace shardopt
