// shardopt._C: the step and the facts that Python needs to call it. No torch headers: kernels get addresses
// in tables, and torch_tensor.h reads tensors.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "core/exact_sum.h"
#include "inputs.h"
#include "kernel_rows.h"
#include "norm/clip.h"
#include "norm/norm.h"
#include "step/cpu.h"
#include "step/instances.h"

namespace py = pybind11;

namespace shardopt {
namespace {

template <class T>
using Table = py::array_t<T, py::array::c_style>;

template <generic::MomentKind... kinds>
py::tuple moment_kinds(generic::Moments<kinds...>) {
  const char* const names[] = {"signed", "unsigned", "magnitude", "own_units", "wide", "exact"};
  return py::make_tuple(names[static_cast<int>(kinds)]...);
}

template <class Rule>
py::tuple hyper_names() {
  py::list names;
  for (const char* name : Rule::kHyper) names.append(name);
  return py::tuple(names);
}

template <class... Rule>
py::dict describe_rules(generic::List<Rule...>) {
  py::dict rules;
  int index = 0;
  ((rules[Rule::kName] =
        py::dict(py::arg("index") = index++, py::arg("hyper") = hyper_names<Rule>(),
                 py::arg("moments") = moment_kinds(typename Rule::Kept{}), py::arg("sums") = generic::kSumsOf<Rule>,
                 py::arg("totals") = generic::kHasTotals<Rule>, py::arg("repays") = generic::kRepaysOf<Rule>,
                 py::arg("shares_codes") = generic::may_share_codes<Rule>())),
   ...);
  return rules;
}

template <class... Codec>
py::dict describe_codecs(generic::List<Codec...>) {
  py::dict codecs;
  int index = 0;
  ((codecs[Codec::kName] = py::dict(
        py::arg("index") = index++, py::arg("code_bytes") = sizeof(typename Codec::Code),
        py::arg("signed_scales") = Codec::Signed::kScales, py::arg("unsigned_scales") = Codec::Unsigned::kScales,
        py::arg("relative") = Codec::kRelative, py::arg("shared") = generic::kSharesCodes<Codec>)),
   ...);
  return codecs;
}

// CpuStep with its tables.
class CpuStepOfTables {
 public:
  CpuStepOfTables(Table<KernelRow> kernel_rows, Table<uint64_t> steps, Table<uint64_t> tables)
      : kernel_rows_(std::move(kernel_rows)),
        steps_(std::move(steps)),
        tables_(std::move(tables)),
        step_(kernel_rows_.data(), kernel_rows_.size()) {
    if (tables_.size() != generic::Codecs::kCount) {
      throw std::invalid_argument("got " + std::to_string(tables_.size()) + " codec tables, expected " +
                                  std::to_string(generic::Codecs::kCount));
    }
    check_cut_blocks(kernel_rows_.data(), kernel_rows_.size());
  }

  void prepare(py::array groups, int threads, const std::string& target) {
    if (!is_column<GroupRow>(groups)) throw py::type_error("got groups of another dtype than group_row");
    step_.prepare(threads, target);
    groups_ = std::move(groups);
  }

  int64_t run(Phase phase) {
    if (!groups_) throw std::logic_error("CpuStep.run: got a step that was not prepared");
    if (phase == Phase::kStep) count_steps();  // nothing below can fail
    const auto tables = reinterpret_cast<const float* const*>(tables_.data());
    py::gil_scoped_release release;
    return step_.run(static_cast<const GroupRow*>(groups_->data()), tables, phase);
  }

 private:
  void count_steps() {
    const uint64_t* steps = steps_.data();
    for (py::ssize_t i = 0; i < steps_.size(); ++i) *reinterpret_cast<float*>(steps[i]) += 1.0f;
  }

  const Table<KernelRow> kernel_rows_;
  const Table<uint64_t> steps_, tables_;
  std::optional<py::array> groups_;
  CpuStep step_;
};

double sum_value(const Table<int64_t>& words) {
  if (words.size() * sizeof(int64_t) != sizeof(ExactSum)) {
    throw std::invalid_argument("got a sum of " + std::to_string(words.size()) + " words, expected " +
                                std::to_string(sizeof(ExactSum) / sizeof(int64_t)));
  }
  ExactSum sum;
  __builtin_memcpy(&sum, words.data(), sizeof sum);
  return generic::value_of(sum);
}

}  // namespace

#if defined(SHARDOPT_WITH_CUDA)
void bind_cuda(py::module_& m);  // bindings_cuda.cpp
#endif
}  // namespace shardopt

PYBIND11_MODULE(_C, m) {
  using namespace shardopt;
  m.doc() = "The compiled step of shardopt.";
  PYBIND11_NUMPY_DTYPE(KernelRow, param, gradient, step, low_bits, codes, scales, extremes, sums, numel, rows, cols,
                       row_stride, scales_row_stride, first_element, global_row_numel, noise_key, block_size,
                       weight_format, gradient_dtype, codec, group, cut);
  PYBIND11_NUMPY_DTYPE(GroupRow, hyper, lr, gradient_scale, rule, nonfinite);
  m.attr("kernel_row") = py::dtype::of<KernelRow>();
  m.attr("group_row") = py::dtype::of<GroupRow>();
  m.attr("rules") = describe_rules(generic::Rules{});
  m.attr("codecs") = describe_codecs(generic::Codecs{});
  m.attr("max_block_size") = kMaxBlock;
  m.attr("max_moments") = kMaxMoments;
  m.attr("max_hyper") = kMaxHyper;
  m.attr("sum_lowest_bit") = generic::kLowestBit;
  m.attr("sum_words") = sizeof(ExactSum) / sizeof(int64_t);
  m.def("sum_value", &sum_value, py::arg("words"), "An exact sum, rounded once; NaN if a term was NaN or infinite.");
  py::enum_<NormPass>(m, "NormPass")
      .value("squares", NormPass::kSquares)
      .value("largest", NormPass::kLargest)
      .value("scale", NormPass::kScale);
  m.def(
      "norm",
      [](const py::array& kernel_rows, NormPass pass, float factor, int threads, const std::string& target) {
        if (!is_column<KernelRow>(kernel_rows))
          throw py::type_error("got kernel rows of another dtype than kernel_row");
        const NormCall call{static_cast<const KernelRow*>(kernel_rows.data()), kernel_rows.size(), pass};
        const py::gil_scoped_release release;
        norm_cpu(call, factor, threads, target);
      },
      py::arg("kernel_rows"), py::arg("norm_pass"), py::arg("factor"), py::arg("threads"), py::arg("target"),
      "Takes one pass over gradients.");
  m.def(
      "clip",
      [](uint64_t words, bool is_magnitude, float max_norm, uint64_t clip) {
        *reinterpret_cast<generic::Clip*>(clip) =
            generic::clip_of(reinterpret_cast<const int64_t*>(words), is_magnitude, max_norm);
      },
      py::arg("words"), py::arg("is_magnitude"), py::arg("max_norm"), py::arg("clip"),
      "Norm and coefficient, two float32, from an exact sum of squares or the bits of a magnitude; by addresses.");
  m.def("power", &generic::power, py::arg("base"), py::arg("exponent"),
        "A power for a whole exponent, which all machines round alike.");
  py::enum_<DType>(m, "DType")
      .value("float32", DType::kFloat32)
      .value("bfloat16", DType::kBFloat16)
      .value("float16", DType::kFloat16);
  py::enum_<WeightFormat>(m, "WeightFormat")
      .value("float32", WeightFormat::kFloat32)
      .value("bfloat16", WeightFormat::kBFloat16)
      .value("float16", WeightFormat::kFloat16)
      .value("bfloat16_plus8", WeightFormat::kBFloat16Plus8)
      .value("bfloat16_plus16", WeightFormat::kBFloat16Plus16)
      .value("bfloat16_stochastic", WeightFormat::kBFloat16Stochastic)
      .value("float16_plus8", WeightFormat::kFloat16Plus8)
      .value("float16_plus16", WeightFormat::kFloat16Plus16);
  py::enum_<Phase>(m, "Phase")
      .value("sums", Phase::kSums)
      .value("step", Phase::kStep)
      .value("relative", Phase::kRelative)
      .value("finish", Phase::kFinish);
  py::enum_<NonFinite>(m, "NonFinite").value("skip", NonFinite::kSkip).value("propagate", NonFinite::kPropagate);
  m.def(
      "cpu_targets",
      [] {
        py::list names;
        for (const CpuTarget& target : cpu_targets()) names.append(target.name);
        return names;
      },
      "The instruction sets that this machine runs, best first.");
  py::class_<CpuStepOfTables>(m, "CpuStep", "Steps of the same kernel rows on the CPU.")
      .def(py::init<Table<KernelRow>, Table<uint64_t>, Table<uint64_t>>(), py::arg("kernel_rows").noconvert(),
           py::arg("steps"), py::arg("tables"))
      .def("prepare", &CpuStepOfTables::prepare, py::arg("groups"), py::arg("threads"), py::arg("target"),
           "Takes the param groups of the next step, and on how many threads and with which kernels it runs.")
      .def("run", &CpuStepOfTables::run, py::arg("phase"),
           "Steps the kernel rows; returns the number of elements that were skipped.");
  bind_inputs(m);
#if defined(SHARDOPT_WITH_CUDA)
  m.attr("with_cuda") = true;
  bind_cuda(m);
#else
  m.attr("with_cuda") = false;
#endif
}
