// The CUDA part of shardopt._C as nvcc compiles it, for Python, on the interpreter.
#include <c10/core/Allocator.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdlib>
#include <new>

#include "machine.h"

namespace py = pybind11;

namespace shardopt {
void bind_cuda(py::module_& m);
}

namespace {

// PyTorch's tensors on the CPU, each an allocation whose bounds kernels have to keep to.
class CheckedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    constexpr size_t kAlignment = 64;
    void* memory = nullptr;
    if (bytes > 0) {
      if (posix_memalign(&memory, kAlignment, bytes) != 0) throw std::bad_alloc();
      ptx::add_allocation(reinterpret_cast<uint64_t>(memory), bytes);
    }
    return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  static void release(void* memory) {
    ptx::remove_allocation(reinterpret_cast<uint64_t>(memory));
    std::free(memory);
  }
};

c10::Allocator* usual = nullptr;

// Sets whether kernels may read and write tensors that are allocated from now on. Tensors from before stay forbidden.
void check_allocations(bool on) {
  static auto* const checked = new CheckedAllocator;
  if (!usual) usual = c10::GetAllocator(c10::DeviceType::CPU);
  c10::SetAllocator(c10::DeviceType::CPU, on ? checked : usual);
}

}  // namespace

PYBIND11_MODULE(cuda_interpreted, m) {
  shardopt::bind_cuda(m);
  m.def("load", &ptx::load, "Runs these modules' PTX from now on.");
  m.def("check_allocations", &check_allocations, "Whether tensors made from now on may be given to kernels.");
  m.def(
      "set_options",
      [](const std::string& approximate, int turn, bool any_path, bool any_order, bool loads_for_copies, int seed) {
        ptx::options() = {approximate, turn, any_path, any_order, loads_for_copies, seed};
      },
      py::arg("approximate") = "nearest", py::arg("turn") = 0, py::arg("any_path") = false,
      py::arg("any_order") = false, py::arg("loads_for_copies") = false, py::arg("seed") = 1,
      "Sets these options, and the usual ones where none are given.");
  m.def("take_reports", &ptx::take_reports, "What kernels did since the last call that no kernel may do.");
  m.def("launches", [] { return ptx::counters().launches; });
  m.def(
      "quick_turns", [] { return ptx::counters().agreements; },
      "How many turns were taken by the kernels of usual blocks, aligned or staged.");
}
