// The messages of shardopt._C: gradients as bytes on the wire.
#include "bindings_comm.h"

#include <pybind11/pybind11.h>

#include <string>

#include "comm/cpu.h"

namespace py = pybind11;

namespace shardopt {

void bind_comm(py::module_& m) {
  m.attr("message_block") = kMessageBlock;
  m.def(
      "message_chunk_bytes", [](int64_t numel) { return generic::chunk_bytes(numel); }, py::arg("numel"),
      "Bytes of a message's chunk of so many elements.");
  m.def(
      "encode_message",
      [](uint64_t floats, DType dtype, int64_t numel, uint64_t message, int64_t chunks, int64_t chunk_numel,
         int threads, const std::string& target) {
        const MessageCall call = message_call(floats, dtype, numel, message, chunks, chunk_numel, 1, 1.0f);
        const py::gil_scoped_release release;
        encode_cpu(call, threads, target);
      },
      py::arg("floats"), py::arg("dtype"), py::arg("numel"), py::arg("message"), py::arg("chunks"),
      py::arg("chunk_numel"), py::arg("threads"), py::arg("target"), "Codes floats into a message, chunk by chunk.");
  m.def(
      "decode_message",
      [](uint64_t floats, DType dtype, int64_t numel, uint64_t message, int64_t chunks, int64_t chunk_numel,
         int64_t terms, float factor, int threads, const std::string& target) {
        const MessageCall call = message_call(floats, dtype, numel, message, chunks, chunk_numel, terms, factor);
        const py::gil_scoped_release release;
        decode_cpu(call, threads, target);
      },
      py::arg("floats"), py::arg("dtype"), py::arg("numel"), py::arg("message"), py::arg("chunks"),
      py::arg("chunk_numel"), py::arg("terms"), py::arg("factor"), py::arg("threads"), py::arg("target"),
      "Decodes a message: each chunk is the sum of `terms` successive ones, times `factor`.");
}

}  // namespace shardopt
