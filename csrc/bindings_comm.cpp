// The messages of shardopt._C: gradients as bytes on the wire.
#include "bindings_comm.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "comm/cpu.h"

namespace py = pybind11;

namespace shardopt {

void bind_comm(py::module_& m) {
  m.attr("message_block") = kMessageBlock;
  m.def(
      "message_row_bytes", [](int64_t numel) { return generic::row_bytes(numel); }, py::arg("numel"),
      "Bytes of a coded row of so many elements.");
  m.def(
      "encode_message",
      [](const LayoutArguments& layout, uint64_t floats, DType dtype, uint64_t message, int64_t chunks, int threads,
         const std::string& target) {
        const EncodeCall call = encode_call(layout, floats, dtype, message, chunks);
        const py::gil_scoped_release release;
        encode_cpu(call, threads, target);
      },
      py::arg("layout"), py::arg("floats"), py::arg("dtype"), py::arg("message"), py::arg("chunks"), py::arg("threads"),
      py::arg("target"), "Codes floats into a message, chunk by chunk.");
  m.def(
      "sum_message",
      [](const LayoutArguments& layout, uint64_t message, DType raw, int64_t terms, int64_t first, int64_t begin,
         const std::vector<uint64_t>& in, const std::vector<uint64_t>& out, uint64_t mean, DType dtype, float divisor,
         int threads, const std::string& target) {
        const SumCall call = sum_call(layout, message, raw, terms, first, begin, in, out, mean, dtype, divisor);
        const py::gil_scoped_release release;
        sum_cpu(call, threads, target);
      },
      py::arg("layout"), py::arg("message"), py::arg("raw"), py::arg("terms"), py::arg("first"), py::arg("begin"),
      py::arg("sums"), py::arg("out"), py::arg("mean"), py::arg("dtype"), py::arg("divisor"), py::arg("threads"),
      py::arg("target"), "Adds a message's chunks, numbered terms, to sums, pairwise; or writes the mean of all.");
}

}  // namespace shardopt
