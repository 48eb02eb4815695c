// What a torch.Tensor is, without torch's headers: through its DLPack exchange interface (DLPack 1.3), whose layout
// every version of the same major number keeps. It allocates nothing and leaves the tensor as it is.
#pragma once

#include <Python.h>

#include <cstdint>

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

inline uint64_t address_of(const DLTensor& tensor) {
  return reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset;
}

// The number of elements of a contiguous tensor, -1 of another.
inline int64_t contiguous_numel(const DLTensor& tensor) {
  int64_t numel = 1;
  bool dense = true;
  for (int32_t i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.shape[i] == 0) return 0;
    dense = dense && (tensor.strides == nullptr || tensor.shape[i] == 1 || tensor.strides[i] == numel);
    numel *= tensor.shape[i];
  }
  return dense ? numel : -1;
}

// What the kernels' tables depend on of a tensor whose shape they do not know: address, device, dtype and, where it is
// contiguous, the number of elements.
class TensorView {
 public:
  TensorView() = default;
  explicit TensorView(const DLTensor& tensor)
      : data_(address_of(tensor)), numel_(contiguous_numel(tensor)), device_(tensor.device), dtype_(tensor.dtype) {}

  bool has_device_of(const DLTensor& tensor) const {
    return tensor.device.device_type == device_.device_type && tensor.device.device_id == device_.device_id;
  }
  bool is_contiguous() const { return numel_ >= 0; }
  bool operator==(const DLTensor& tensor) const {
    return address_of(tensor) == data_ && tensor.dtype.code == dtype_.code && tensor.dtype.bits == dtype_.bits &&
           has_device_of(tensor) && contiguous_numel(tensor) == numel_;
  }

 private:
  uint64_t data_ = 0;
  int64_t numel_ = 0;
  DLDevice device_{};
  DLDataType dtype_{};
};

}  // namespace shardopt
