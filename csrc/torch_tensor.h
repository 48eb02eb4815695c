// Reads torch tensors without torch's headers, through the C functions that libtorch exports for compiled models
// (`aoti_torch_get_*`), which take the address of a tensor's pointer to its implementation. The first use of any
// function here throws std::runtime_error if PyTorch lacks one of them.
#pragma once

#include <Python.h>

#include <cstdint>
#include <vector>

namespace shardopt {

constexpr uint8_t kNoDType = 255;

bool is_plain_tensor(PyObject* object);  // a torch.Tensor, no subclass

// A number for a tensor's dtype and device; 0 for another object.
int64_t type_number(PyObject* object);

// Raises the version counters of the tensors in a list, as torch.autograd.graph.increment_version does.
void bump_versions(PyObject* tensors);

// Describes dense tensors: shape, strides, storage offset, dtype, device, layout and negative bit.
class TensorFormat {
 public:
  // Takes a tensor's format; false for an object without dense memory, such as a sparse tensor.
  bool take(PyObject* tensor);

  // Whether an object is a tensor of this format whose elements lie in memory, within its storage: `resize_` of the
  // storage may have freed or cut them, and a wrapper subclass or a zero tensor has none. Then `address` becomes that
  // of its first element; before, it is that of the tensor read last, whose device it shares.
  bool read(PyObject* tensor, uint64_t& address) const;

  // Whether an object is a tensor without memory that an ordinary tensor would have.
  static bool is_without_memory(PyObject* tensor);

  // Prefetches the memory that `read` is about to look at; without effect if the tensor that was taken is gone.
  void prefetch() const {
    __builtin_prefetch(implementation_);
    __builtin_prefetch(implementation_ + 64);
    __builtin_prefetch(implementation_ + 128);
    __builtin_prefetch(lengths_.data());
  }

  bool has_shape_of(const TensorFormat& other) const;
  bool has_device_of(const TensorFormat& other) const;

  uint8_t dtype = kNoDType;  // number in the kernels (DType); kNoDType for a dtype that they do not step
  bool strided = false;      // not contiguous, or a negative view: stands for its elements' opposites (`z.conj().imag`)

 private:
  int64_t ndim_ = -1, offset_ = 0;
  int64_t type_ = 0;                      // dtype and device
  bool negative_ = false;                 // the negative bit
  int64_t bytes_ = 0;                     // bytes that the storage has at least; 0 without elements
  uint64_t begin_ = 0;                    // bytes in the storage before the first element
  std::vector<int64_t> lengths_;          // sizes, then strides in elements
  const char* implementation_ = nullptr;  // of the tensor that was taken, which may be gone
};

}  // namespace shardopt
