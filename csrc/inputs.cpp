#include "inputs.h"

#include <structmember.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <unordered_map>

namespace shardopt {
namespace {

constexpr size_t kAhead = 8;  // tensors that the processor fetches ahead

PyObject* interned_params() {
  static PyObject* const name = PyUnicode_InternFromString("params");
  return name;
}

PyObject* interned_lr() {
  static PyObject* const name = PyUnicode_InternFromString("lr");
  return name;
}

// Whether an object is a float that a learning rate may be.
bool is_rate(PyObject* value) {
  if (!PyFloat_CheckExact(value)) return false;
  const double rate = PyFloat_AS_DOUBLE(value);
  return 0.0 <= rate && rate <= std::numeric_limits<float>::max();
}

// Whether an option's object is immutable: the same object has the same value.
bool is_constant(PyObject* value) {
  if (value == Py_None || PyBool_Check(value)) return true;
  if (PyFloat_CheckExact(value) || PyLong_CheckExact(value) || PyUnicode_CheckExact(value)) return true;
  if (!PyTuple_CheckExact(value)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
    if (!PyFloat_CheckExact(PyTuple_GET_ITEM(value, i))) return false;
  }
  return true;
}

}  // namespace

Attribute::Attribute(PyTypeObject* type, py::object name) : type_(type), name_(std::move(name)) {
  PyObject* descriptor = _PyType_Lookup(type, name_.ptr());  // borrowed from the type
  if (descriptor == nullptr) return;
  if (Py_TYPE(descriptor) == &PyMemberDescr_Type) slot_ = reinterpret_cast<PyMemberDescrObject*>(descriptor)->d_member;
  if (Py_TYPE(descriptor) == &PyGetSetDescr_Type)
    computed_ = reinterpret_cast<PyGetSetDescrObject*>(descriptor)->d_getset;
  if (computed_ != nullptr && computed_->get == nullptr) computed_ = nullptr;  // write-only
}

py::object Attribute::of(PyObject* object) const {
  PyObject* value;
  if (Py_TYPE(object) != type_ || (slot_ == nullptr && computed_ == nullptr)) {
    value = PyObject_GetAttr(object, name_.ptr());
  } else if (slot_ != nullptr) {
    value = PyMember_GetOne(reinterpret_cast<const char*>(object), slot_);
  } else {
    value = computed_->get(object, computed_->closure);
  }
  if (value == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

Inputs::Inputs(const py::list& param_groups, const py::object& state, const py::list& shards, const py::list& entries,
               py::object shard_of, py::object read_gradient)
    : shard_of_(std::move(shard_of)), read_gradient_(std::move(read_gradient)) {
  std::unordered_map<PyObject*, size_t> indices;
  for (const py::handle group : param_groups) {
    const auto params = py::cast<py::list>(group["params"]);
    groups_.push_back({params.size(), {}});
    for (const py::handle param : params) {
      const size_t index = inputs_.size();
      indices[param.ptr()] = index;
      add_input(param.ptr(), shards[index], !entries[index].is_none());
    }
  }
  changed_groups(param_groups);
  if (!PyDict_Check(state.ptr()))
    throw std::invalid_argument("optimizer.state: got another type than dict, expected a dict");
  PyObject *key, *value;
  for (Py_ssize_t at = 0; PyDict_Next(state.ptr(), &at, &key, &value);) {
    const auto index = indices.find(key);
    const bool in_table = index != indices.end() && inputs_[index->second].in_table;
    state_.emplace_back(key, in_table ? static_cast<int64_t>(index->second) : -1);
    if (in_table) add_entries(inputs_[index->second], value, entries[index->second]);
  }
}

void Inputs::add_input(PyObject* param, const py::object& shard, bool in_table) {
  Input& input = inputs_.emplace_back();
  input.param = param;
  input.type = Py_TYPE(param);
  input.shard = shard;
  input.grad = Attribute(input.type, py::str("grad"));
  input.in_table = in_table;
  if (!in_table) return;
  const py::object local = shard.attr("local_attribute"), layout = shard.attr("layout_attribute");
  if (!local.is_none()) input.local = Attribute(input.type, local);
  if (!layout.is_none()) input.layout = Attribute(input.type, layout);
  if (input.layout) input.known_layout = input.layout.of(param);
  input.known_type = type_number(param);
  const bool is_plain = !input.layout && shard.attr("plain").cast<bool>();
  // A parameter that is its own local tensor does not wrap its elements.
  input.fixed = is_plain && shard.attr("local")(py::handle(param)).ptr() == param;
  if (!input.known.take(local_of(input, param).ptr()))
    throw std::invalid_argument("got a parameter that is not a dense tensor");
}

void Inputs::add_entries(Input& input, PyObject* state, const py::handle& needed) {
  if (!PyDict_Check(state))
    throw std::invalid_argument("got a parameter's state of another type than dict, expected a dict");
  input.first_entry = entries_.size();
  PyObject *name, *value;
  for (Py_ssize_t at = 0; PyDict_Next(state, &at, &name, &value);) {
    StateEntry entry{py::reinterpret_borrow<py::object>(name), needed.contains(py::handle(name)), {}};
    if (entry.needed && !entry.known.take(local_of(input, value).ptr()))
      throw std::invalid_argument("got state that is not a dense tensor");
    entries_.push_back(std::move(entry));
  }
  input.entry_count = entries_.size() - input.first_entry;
}

// Some state of a sharded parameter is plain, such as the step count.
py::object Inputs::local_of(const Input& input, PyObject* tensor) {
  if (input.fixed || (input.layout && !input.local) || is_plain_tensor(tensor))
    return py::reinterpret_borrow<py::object>(tensor);
  if (input.local && Py_TYPE(tensor) == input.type) {
    py::object local = input.local.of(tensor);
    if (is_plain_tensor(local.ptr())) return local;  // not a tensor that waits for a collective
  }
  return input.shard.attr("local")(py::handle(tensor));
}

bool Inputs::same_groups(PyObject* param_groups) const {
  if (!PyList_Check(param_groups) || static_cast<size_t>(PyList_GET_SIZE(param_groups)) != groups_.size()) return false;
  size_t index = 0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    PyObject* group = PyList_GET_ITEM(param_groups, g);
    PyObject* params = PyDict_Check(group) ? PyDict_GetItemWithError(group, interned_params()) : nullptr;
    if (params == nullptr || !PyList_Check(params)) return false;
    if (static_cast<size_t>(PyList_GET_SIZE(params)) != groups_[g].count) return false;
    for (size_t i = 0; i < groups_[g].count; ++i) {
      if (PyList_GET_ITEM(params, i) != inputs_[index++].param) return false;
    }
  }
  return true;
}

bool Inputs::same_state(PyObject* state) const {
  if (!PyDict_Check(state) || static_cast<size_t>(PyDict_GET_SIZE(state)) != state_.size()) return false;
  PyObject *key, *value;
  Py_ssize_t at = 0;
  for (const auto& [known_key, index] : state_) {
    if (!PyDict_Next(state, &at, &key, &value) || key != known_key) return false;
    if (index >= 0 && !same_entries(inputs_[index], value)) return false;
  }
  return true;
}

bool Inputs::same_entries(const Input& input, PyObject* state) const {
  if (!PyDict_Check(state) || static_cast<size_t>(PyDict_GET_SIZE(state)) != input.entry_count) return false;
  PyObject *name, *value;
  Py_ssize_t at = 0;
  for (size_t i = 0; i < input.entry_count; ++i) {
    const StateEntry& entry = entries_[input.first_entry + i];
    if (input.first_entry + i + kAhead < entries_.size()) (&entry)[kAhead].known.format.prefetch();
    if (!PyDict_Next(state, &at, &name, &value) || name != entry.name.ptr()) return false;
    if (entry.needed && !entry.known.is(local_of(input, value).ptr())) return false;
  }
  return true;
}

bool Inputs::same_parameter(Input& input) const {
  return Py_TYPE(input.param) == input.type && same_layout(input) && input.known.is(local_of(input, input.param).ptr());
}

bool Inputs::same_layout(Input& input) const {
  if (input.fixed) return true;
  if (type_number(input.param) != input.known_type) return false;
  py::object layout;
  if (input.layout) layout = input.layout.of(input.param);
  if (layout && layout.is(input.known_layout)) return true;
  if (!shard_of_(py::handle(input.param)).is(input.shard)) return false;
  input.known_layout = std::move(layout);
  return true;
}

// This rank's part of a gradient that is sharded as its parameter is, as far as the layouts tell; else an empty object.
py::object Inputs::part_of(const Input& input, const py::object& gradient) const {
  if (input.fixed || (input.layout && !input.local)) return gradient;
  if (!input.local || !input.layout || Py_TYPE(gradient.ptr()) != input.type) return {};
  const py::object layout = input.layout.of(gradient.ptr());
  if (!layout.is(input.known_layout) && !layout.is(input.known_gradient_layout)) return {};
  py::object local = input.local.of(gradient.ptr());
  return is_plain_tensor(local.ptr()) ? local : py::object();
}

bool Inputs::accept(Input& input, PyObject* part, bool is_kept) {
  if (input.gradient.format.read(part, input.gradient.address)) return true;
  Known gradient;
  if (!gradient.take(part) || !gradient.format.has_shape_of(input.known.format)) return false;
  if (!is_kept && !gradient.format.has_device_of(input.known.format)) return false;
  if (gradient.format.dtype == kNoDType) return false;
  input.gradient = std::move(gradient);
  return true;
}

py::object Inputs::read(const py::object& param_groups, const py::object& state, const py::object& parts) {
  if (!same_groups(param_groups.ptr()) || !same_state(state.ptr())) return py::none();
  py::list gradients(inputs_.size()), stepped;
  std::vector<size_t> read_by_shard;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    Input& input = inputs_[i];
    if (i + kAhead < inputs_.size()) {
      inputs_[i + kAhead].known.format.prefetch();
      inputs_[i + kAhead].gradient.format.prefetch();
    }
    py::object gradient = input.grad.of(input.param);
    const bool is_kept = gradient.is_none() && !parts.is_none() && !parts[py::int_(i)].is_none();
    if (is_kept) gradient = parts[py::int_(i)];
    input.has_gradient = !gradient.is_none();
    if (input.has_gradient) {
      if (!input.in_table || !same_parameter(input)) return py::none();
      stepped.append(py::handle(input.param));
      py::object part = is_kept ? gradient : part_of(input, gradient);
      if (part && accept(input, part.ptr(), is_kept)) {
        gradient = std::move(part);
      } else if (!part || TensorFormat::is_without_memory(part.ptr())) {
        read_by_shard.push_back(i);
      } else {
        return py::none();
      }
    }
    PyList_SET_ITEM(gradients.ptr(), i, gradient.release().ptr());
  }
  // Collectives come last: a rank that leaves this function before runs them when it makes its table anew.
  for (const size_t i : read_by_shard) {
    Input& input = inputs_[i];
    const py::object gradient = gradients[i];
    const py::object part = parts.is_none() ? read_gradient_(i, gradient) : py::object(parts[py::int_(i)]);
    if (!accept(input, part.ptr(), false)) return py::none();
    if (input.local && input.layout && Py_TYPE(gradient.ptr()) == input.type && input.local.of(gradient.ptr()).is(part))
      input.known_gradient_layout = input.layout.of(gradient.ptr());
    gradients[i] = part;
  }
  return py::make_tuple(gradients, stepped);
}

py::bytes Inputs::gradient_kinds() const {
  std::string kinds;
  for (const Input& input : inputs_) {
    const TensorFormat &param = input.known.format, &gradient = input.gradient.format;
    const bool strided = param.strided || gradient.strided;
    kinds.push_back(static_cast<char>(input.has_gradient ? gradient.dtype | (strided ? kStrided : 0) : kNoDType));
  }
  return kinds;
}

py::object Inputs::changed_groups(const py::object& param_groups) {
  py::dict found;
  if (!PyList_Check(param_groups.ptr())) return py::none();
  if (static_cast<size_t>(PyList_GET_SIZE(param_groups.ptr())) != groups_.size()) return py::none();
  for (size_t g = 0; g < groups_.size(); ++g) {
    PyObject* group = PyList_GET_ITEM(param_groups.ptr(), g);
    if (!PyDict_Check(group)) return py::none();
    auto& options = groups_[g].options;
    size_t count = 0;
    bool changed = false;
    py::object rate;
    PyObject *name, *value;
    for (Py_ssize_t at = 0; PyDict_Next(group, &at, &name, &value);) {
      if (name == interned_params()) continue;
      const bool constant = is_constant(value);
      if (count == options.size()) options.emplace_back();
      auto& [known_name, known] = options[count++];
      const bool is_known = name == known_name.ptr();
      if (constant && is_known && value == known.ptr()) continue;
      if (is_known && name == interned_lr() && is_rate(value)) {
        rate = py::reinterpret_borrow<py::object>(value);
      } else {
        changed = true;
      }
      known_name = py::reinterpret_borrow<py::object>(name);
      known = constant ? py::reinterpret_borrow<py::object>(value) : py::object();
    }
    changed = changed || count != options.size();
    options.resize(count);
    if (changed || rate) found[py::int_(g)] = changed ? py::object(py::none()) : rate;
  }
  return std::move(found);
}

bool Inputs::fill(py::array& rows, const py::array& tensors, const py::array& elements) const {
  if (!is_column<KernelRow>(rows) || !is_column<int64_t>(tensors) || !is_column<int64_t>(elements))
    throw py::type_error("got columns of other dtypes than the table's, or that are not contiguous");
  if (tensors.size() != rows.size() || elements.size() != rows.size())
    throw std::invalid_argument("got columns of other lengths than the table");
  const auto* tensor = static_cast<const int64_t*>(tensors.data());
  const auto* element = static_cast<const int64_t*>(elements.data());
  auto* kernel_rows = static_cast<KernelRow*>(rows.mutable_data());
  bool changed = false;
  for (py::ssize_t i = 0; i < rows.size(); ++i) {
    const Input& input = inputs_.at(tensor[i]);
    const uint8_t dtype = input.gradient.format.dtype;
    const int64_t bytes = dtype == static_cast<uint8_t>(DType::kFloat32) ? 4 : 2;
    const uint64_t address = input.gradient.address + element[i] * bytes;
    KernelRow& kernel_row = kernel_rows[i];
    if (kernel_row.gradient == address && kernel_row.gradient_dtype == dtype) continue;
    kernel_row.gradient = address;
    kernel_row.gradient_dtype = dtype;
    changed = true;
  }
  return changed;
}

void bind_inputs(py::module_& m) {
  py::class_<Inputs> inputs(m, "Inputs", "The tensors that a cached kernel table points to.");
  inputs
      .def(py::init<const py::list&, const py::object&, const py::list&, const py::list&, py::object, py::object>(),
           py::arg("param_groups"), py::arg("state"), py::arg("shards"), py::arg("entries"), py::arg("shard_of"),
           py::arg("read_gradient"))
      .def("read", &Inputs::read, py::arg("param_groups"), py::arg("state"), py::arg("parts"),
           "This rank's parts of the gradients and the parameters to be stepped; None if the table must be made anew.")
      .def("gradient_kinds", &Inputs::gradient_kinds,
           "Per parameter the gradient's DType, with the bit `strided` where it or the parameter is not contiguous, or "
           "the gradient is a negative view; `no_gradient` where there is none.")
      .def("changed_groups", &Inputs::changed_groups, py::arg("param_groups"),
           "The param groups whose options may differ from those at the last call, by index: the learning rate if only "
           "that changed, to a float in its range, else None. None if groups were added or removed.")
      .def("fill", &Inputs::fill, py::arg("rows"), py::arg("tensors"), py::arg("elements"),
           "Puts the gradients' addresses into table rows; returns whether a row changed.");
  m.def(
      "increment_versions", [](const py::list& tensors) { bump_versions(tensors.ptr()); }, py::arg("tensors"),
      "torch.autograd.graph.increment_version of each tensor.");
  inputs.attr("no_gradient") = kNoDType;
  inputs.attr("strided") = Inputs::kStrided;
}

}  // namespace shardopt
