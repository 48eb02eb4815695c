// Reads torch tensors without torch's headers: through the C functions that libtorch exports for compiled models
// (`aoti_torch_get_*`), which take the address of a tensor's pointer to its implementation.
#pragma once

#include <Python.h>

#include <cstdint>

namespace shardopt {

// Where a dense tensor's elements lie. `sizes` and `strides` (in elements) are valid as long as the tensor is
// unchanged.
struct TensorView {
  uint64_t address = 0;
  int64_t numel = 0;
  int64_t ndim = 0;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  int32_t dtype = 0;  // torch's number of the dtype

  bool is_contiguous() const;
};

bool is_plain_tensor(PyObject* object);  // a torch.Tensor, no subclass

// Views a tensor; false for an object without dense memory, such as a sparse tensor.
bool view_tensor(PyObject* tensor, TensorView& view);

// Whether a tensor stands for its elements' opposites, as a view such as `z.conj().imag` does (torch's negative bit).
bool is_negative_view(PyObject* tensor);

// The type and the index of a tensor's device, as one number.
int64_t device_of(PyObject* tensor);

// Whether the elements of a viewed tensor lie within its storage: `resize_` of the storage may have freed or cut them.
bool lies_in_storage(PyObject* tensor, const TensorView& view);

// The number of a viewed tensor's dtype in the kernels (DType); kNoDType for a dtype that the kernels do not step.
constexpr uint8_t kNoDType = 255;
uint8_t dtype_of(const TensorView& view);

}  // namespace shardopt
