// The CUDA part of shardopt._C.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <vector>

#include "kernel_rows.h"
#include "norm/cuda.h"
#include "step/cuda.h"

namespace py = pybind11;

namespace shardopt {
namespace {

template <class T>
using Table = py::array_t<T, py::array::c_style>;

template <class T>
T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

py::tuple make_tasks(const Table<KernelRow>& kernel_rows, const Table<GroupRow>& groups) {
  check_cut_blocks(kernel_rows.data(), kernel_rows.size());
  const CudaTasks made = make_cuda_tasks(kernel_rows.data(), kernel_rows.size(), groups.data());
  py::array_t<int64_t> batches({static_cast<py::ssize_t>(made.batches.size()), py::ssize_t{6}});
  int64_t* to = batches.mutable_data();
  for (const CudaBatch& b : made.batches)
    for (const int64_t x : {int64_t{b.rule}, int64_t{b.codec}, int64_t{b.format}, b.begin, b.staged, b.end}) *to++ = x;
  return py::make_tuple(py::array_t<CudaTask>(static_cast<py::ssize_t>(made.tasks.size()), made.tasks.data()), batches);
}

void step_on_cuda(int device, uint64_t kernel_rows, uint64_t gradients, uint64_t groups, uint64_t tasks, uint64_t steps,
                  uint64_t tables, uint64_t prepared, uint64_t grad_scale, uint64_t factor, uint64_t found_inf,
                  uint64_t nonfinite, int64_t row_count, int64_t step_count, Phase phase, const Table<int64_t>& batches,
                  uint64_t stream) {
  const CudaDeviceGuard guard(device);
  const CudaCall call{pointer<KernelRow>(kernel_rows),
                      pointer<GroupRow>(groups),
                      pointer<CudaTask>(tasks),
                      pointer<float* const>(steps),
                      pointer<const float* const>(tables),
                      pointer<void>(prepared),
                      pointer<float>(grad_scale),
                      pointer<float>(factor),
                      pointer<float>(found_inf),
                      pointer<unsigned long long>(nonfinite),
                      row_count,
                      step_count,
                      phase};
  if (phase == Phase::kStep || phase == Phase::kSums)
    prepare_cuda(call, pointer<const uint64_t>(gradients), pointer<void>(stream));
  for (const int64_t *b = batches.data(), *end = b + batches.size(); b < end; b += 6)
    step_cuda(call, {int(b[0]), int(b[1]), int(b[2]), b[3], b[4], b[5]}, pointer<void>(stream));
}

void copy_on_cuda(int device, const Table<uint64_t>& to, const Table<uint64_t>& from, const Table<int64_t>& nbytes,
                  uint64_t stream) {
  if (to.size() != from.size() || to.size() != nbytes.size())
    throw std::invalid_argument("copy_cuda: got arrays of different lengths, expected one range per row");
  const CudaDeviceGuard guard(device);
  copy_cuda(to.data(), from.data(), nbytes.data(), to.size(), pointer<void>(stream));
}

void norm_on_cuda(uint64_t kernel_rows, uint64_t tasks, int64_t task_count, NormPass pass, uint64_t factor, int device,
                  uint64_t stream) {
  const CudaDeviceGuard guard(device);
  norm_cuda({pointer<KernelRow>(kernel_rows), task_count, pass}, pointer<NormTask>(tasks), task_count,
            pointer<float>(factor), pointer<void>(stream));
}

void clip_on_cuda(uint64_t words, bool is_magnitude, float max_norm, uint64_t clip, int device, uint64_t stream) {
  const CudaDeviceGuard guard(device);
  clip_cuda(pointer<int64_t>(words), is_magnitude, max_norm, pointer<float>(clip), pointer<void>(stream));
}

}  // namespace

void bind_cuda(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> without_gil;
  PYBIND11_NUMPY_DTYPE(CudaTask, first_block, kernel_row, blocks);
  m.attr("cuda_prepared_bytes") = kPreparedBytes;
  m.attr("cuda_launched_gradients") = kLaunchedGradients;
  m.def("cuda_device_count", &cuda_device_count, "The number of usable devices; 0 without a driver.");
  m.def(
      "cuda_tasks", &make_tasks, py::arg("kernel_rows"), py::arg("groups"),
      "The kernel rows cut into the tasks of warps, and the tasks' batches: rule, codec, format, begin, staged, end.");
  m.def(
      "step_cuda", &step_on_cuda, py::arg("device"), py::arg("kernel_rows"), py::arg("gradients"), py::arg("groups"),
      py::arg("tasks"), py::arg("steps"), py::arg("tables"), py::arg("prepared"), py::arg("grad_scale"),
      py::arg("factor"), py::arg("found_inf"), py::arg("nonfinite"), py::arg("row_count"), py::arg("step_count"),
      py::arg("phase"), py::arg("batches"), py::arg("stream"), without_gil,
      "Steps the kernel rows in a stream, without synchronization. Arguments without an _C type are addresses on the "
      "device; of the gradients' addresses, too, on the host for up to cuda_launched_gradients kernel rows and steps.");
  m.def("copy_cuda", &copy_on_cuda, py::arg("device"), py::arg("to"), py::arg("source"), py::arg("nbytes"),
        py::arg("stream"), without_gil, "Copies ranges between host and device in a stream: addresses, and bytes.");
  m.attr("cuda_norm_task") = kNormTask;
  m.def("norm_cuda", &norm_on_cuda, py::arg("kernel_rows"), py::arg("tasks"), py::arg("task_count"),
        py::arg("norm_pass"), py::arg("factor"), py::arg("device"), py::arg("stream"), without_gil,
        "Takes one pass over gradients, in a stream. Tables and factor are addresses on the device.");
  m.def("clip_cuda", &clip_on_cuda, py::arg("words"), py::arg("is_magnitude"), py::arg("max_norm"), py::arg("clip"),
        py::arg("device"), py::arg("stream"), without_gil, "clip of addresses on the device, in a stream.");
  m.def("pin_cuda", &pin_cuda, py::arg("device"), py::arg("address"), py::arg("nbytes"), without_gil,
        "Page-locks memory of the host for all devices, in a device's context; CUDA's error, 0 for none.");
  m.def("unpin_cuda", &unpin_cuda, py::arg("device"), py::arg("address"), without_gil, "Undoes pin_cuda.");
}

}  // namespace shardopt
