#include "watch.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <unordered_map>

namespace shardopt {
namespace {

struct Torch {
  PyTypeObject* tensor;
  const DLPackExchangeAPI* exchange;
  PyObject* grad;
  PyObject* grad_of_tensor;  // the attribute of the class
  PyObject* params;
  PyObject* storage_offset;  // the methods of the class
  PyObject* untyped_storage;
};

const Torch& torch() {
  static const Torch found = [] {
    const py::module_ module = py::module_::import("torch");
    const py::object tensor = module.attr("Tensor");
    const py::object capsule = py::getattr(tensor, "__dlpack_c_exchange_api__", py::none());
    const auto* api =
        capsule.is_none()
            ? nullptr
            : static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api == nullptr || api->version.major != 1 || api->dltensor_from_py_object_no_sync == nullptr) {
      throw std::runtime_error("got PyTorch " + py::str(module.attr("__version__")).cast<std::string>() +
                               " without DLPack's exchange interface of version 1, expected PyTorch 2.11 or newer");
    }
    const auto type = [](const py::object& object) { return reinterpret_cast<PyTypeObject*>(object.inc_ref().ptr()); };
    return Torch{type(tensor),
                 api,
                 PyUnicode_InternFromString("grad"),
                 py::object(tensor.attr("grad")).release().ptr(),
                 PyUnicode_InternFromString("params"),
                 py::object(tensor.attr("storage_offset")).release().ptr(),
                 py::object(tensor.attr("untyped_storage")).release().ptr()};
  }();
  return found;
}

// False for what is not in memory as a dense array: sparse, meta, and wrapping tensors.
bool read(PyObject* tensor, DLTensor& out) {
  if (torch().exchange->dltensor_from_py_object_no_sync(tensor, &out) == 0) return true;
  PyErr_Clear();
  return false;
}

py::object call(PyObject* method, PyObject* object) {
  auto result = py::reinterpret_steal<py::object>(PyObject_CallOneArg(method, object));
  if (!result) throw py::error_already_set();
  return result;
}

// Whether a tensor's storage was freed by resize_: the tensor's address is then its offset in the storage. Addresses of
// memory are mostly above all offsets, so that hardly ever one is asked for.
bool is_freed(PyObject* tensor, uint64_t address, uint64_t element_bytes) {
  constexpr uint64_t kAboveOffsets = uint64_t{1} << 40;
  if (address >= kAboveOffsets) return false;
  return address == call(torch().storage_offset, tensor).cast<uint64_t>() * element_bytes;
}

// Whether a tensor's elements reach beyond its storage, as they do after resize_ cut it. Costs about 0.3 us.
bool is_cut(PyObject* tensor, const DLTensor& view) {
  int64_t last = 0, inner = 1;
  for (int32_t i = view.ndim - 1; i >= 0; --i) {
    last += (view.shape[i] - 1) * (view.strides == nullptr ? inner : view.strides[i]);
    inner *= view.shape[i];
  }
  const py::object storage = call(torch().untyped_storage, tensor);
  const Py_ssize_t bytes = PyMapping_Size(storage.ptr());
  if (bytes < 0) throw py::error_already_set();
  const int64_t offset = call(torch().storage_offset, tensor).cast<int64_t>();
  return bytes < (offset + last + 1) * (view.dtype.bits / 8);
}

py::object attribute(PyObject* object, const py::object& name) {
  auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, name.ptr()));
  if (!found) throw py::error_already_set();
  return found;
}

// How `grad` is read from tensors of a type, without the search for the attribute: nullptr where that is not known.
getter grad_getter(PyTypeObject* type) {
  const py::object found = py::handle(reinterpret_cast<PyObject*>(type)).attr("grad");
  if (!found.is(py::handle(torch().grad_of_tensor)) || Py_TYPE(found.ptr()) != &PyGetSetDescr_Type) return nullptr;
  const PyGetSetDef* definition = reinterpret_cast<PyGetSetDescrObject*>(found.ptr())->d_getset;
  return definition->closure == nullptr ? definition->get : nullptr;
}

// As DType, Watch::kNoGradient if it is none of them.
uint8_t dtype_of(const DLTensor& tensor) {
  const DLDataType& dtype = tensor.dtype;
  if (dtype.lanes != 1) return Watch::kNoGradient;
  if (dtype.code == kDLFloat && dtype.bits == 32) return static_cast<uint8_t>(DType::kFloat32);
  if (dtype.code == kDLFloat && dtype.bits == 16) return static_cast<uint8_t>(DType::kFloat16);
  if (dtype.code == kDLBfloat && dtype.bits == 16) return static_cast<uint8_t>(DType::kBFloat16);
  return Watch::kNoGradient;
}

// Whether an option is what it was as long as it is the same object.
bool is_constant(PyObject* value) {
  if (value == Py_None || PyBool_Check(value)) return true;
  if (PyFloat_CheckExact(value) || PyLong_CheckExact(value) || PyUnicode_CheckExact(value)) return true;
  if (!PyTuple_CheckExact(value)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
    if (!PyFloat_CheckExact(PyTuple_GET_ITEM(value, i))) return false;
  }
  return true;
}

PyObject* params_of(PyObject* group) {  // borrowed; nullptr if there are none
  if (!PyDict_Check(group)) return nullptr;
  PyObject* params = PyDict_GetItemWithError(group, torch().params);
  return params != nullptr && PyList_Check(params) ? params : nullptr;
}

}  // namespace

Watch::Watch(const py::list& param_groups, const py::object& state, const py::list& shards, const py::list& entries,
             py::object shard_of)
    : shard_of_(std::move(shard_of)) {
  std::unordered_map<PyObject*, size_t> places;
  for (const py::handle group : param_groups) {
    const auto params = py::cast<py::list>(group["params"]);
    groups_.push_back({params.size(), {}});
    for (const py::handle param : params) {
      const size_t place = parameters_.size();
      places[param.ptr()] = place;
      add_parameter(param, shards[place], !entries[place].is_none());
    }
  }
  options_changed(param_groups);
  if (!PyDict_Check(state.ptr())) throw std::invalid_argument("optimizer.state: got no dict, expected one");
  PyObject *key, *value;
  for (Py_ssize_t at = 0; PyDict_Next(state.ptr(), &at, &key, &value);) {
    const auto found = places.find(key);
    const bool watched = found != places.end() && parameters_[found->second].planned;
    state_.push_back({key, watched ? static_cast<int64_t>(found->second) : -1});
    if (watched) add_state(parameters_[found->second], value, entries[found->second]);
  }
}

void Watch::add_parameter(const py::handle& param, const py::object& shard, bool planned) {
  Parameter& parameter = parameters_.emplace_back();
  parameter.param = param.ptr();
  parameter.type = Py_TYPE(param.ptr());
  parameter.shard = shard;
  parameter.local = shard.is_none() ? py::none() : py::object(shard.attr("local"));
  const py::object attributes = shard.is_none() ? py::none() : py::object(shard.attr("attributes"));
  if (!attributes.is_none()) {
    parameter.local_name = attributes[py::int_(0)];
    parameter.layout_name = attributes[py::int_(1)];
    parameter.layout = attribute(param.ptr(), parameter.layout_name);
  }
  parameter.grad = grad_getter(parameter.type);
  parameter.planned = planned;
  if (!planned) return;
  DLTensor tensor;
  const py::object local = local_of(parameter, param.ptr());
  if (!read(local.ptr(), tensor)) throw std::invalid_argument("got a parameter that is not a dense tensor");
  parameter.dtype = dtype_of(tensor);
  parameter.view = TensorView(tensor);
  parameter.first_size = sizes_.size();
  parameter.ndim = tensor.ndim;
  sizes_.insert(sizes_.end(), tensor.shape, tensor.shape + tensor.ndim);
  if (!parameter.view.is_contiguous()) sizes_.insert(sizes_.end(), tensor.strides, tensor.strides + tensor.ndim);
}

void Watch::add_state(Parameter& parameter, const py::handle& entries, const py::handle& needed) {
  if (!PyDict_Check(entries.ptr())) {
    throw std::invalid_argument("got a parameter's state that is no dict, expected one");
  }
  parameter.first_entry = entries_.size();
  PyObject *name, *item;
  for (Py_ssize_t at = 0; PyDict_Next(entries.ptr(), &at, &name, &item);) {
    Entry entry{py::reinterpret_borrow<py::object>(name), needed.contains(py::handle(name)), {}};
    if (entry.needed) {
      DLTensor tensor;
      const py::object local = local_of(parameter, item);
      if (!read(local.ptr(), tensor)) throw std::invalid_argument("got state that is not a dense tensor");
      entry.view = TensorView(tensor);
    }
    entries_.push_back(std::move(entry));
  }
  parameter.entry_count = entries_.size() - parameter.first_entry;
}

// Of a DTensor parameter some state is plain, such as its step count.
py::object Watch::local_of(const Parameter& parameter, PyObject* tensor) {
  const bool is_plain = parameter.local.is_none() || Py_TYPE(tensor) == torch().tensor;
  if (is_plain) return py::reinterpret_borrow<py::object>(tensor);
  if (parameter.local_name && Py_TYPE(tensor) == parameter.type) {
    py::object local = attribute(tensor, parameter.local_name);
    if (Py_TYPE(local.ptr()) == torch().tensor) return local;  // and not one that waits for a collective
  }
  return parameter.local(py::handle(tensor));
}

bool Watch::same_groups(const py::object& param_groups) const {
  if (!PyList_Check(param_groups.ptr())) return false;
  if (static_cast<size_t>(PyList_GET_SIZE(param_groups.ptr())) != groups_.size()) return false;
  size_t place = 0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    PyObject* params = params_of(PyList_GET_ITEM(param_groups.ptr(), g));
    if (params == nullptr || static_cast<size_t>(PyList_GET_SIZE(params)) != groups_[g].count) return false;
    for (size_t i = 0; i < groups_[g].count; ++i) {
      if (PyList_GET_ITEM(params, i) != parameters_[place++].param) return false;
    }
  }
  return true;
}

bool Watch::same_parameter(Parameter& parameter) const {
  if (Py_TYPE(parameter.param) != parameter.type) return false;
  if (!parameter.shard.is_none() && !same_shard(parameter)) return false;
  const py::object local = local_of(parameter, parameter.param);
  DLTensor tensor;
  return read(local.ptr(), tensor) && parameter.view == tensor && has_shape_of(parameter, tensor) &&
         (parameter.view.is_contiguous() || has_strides_of(parameter, tensor));
}

bool Watch::same_shard(Parameter& parameter) const {
  py::object layout;
  if (parameter.layout_name) layout = attribute(parameter.param, parameter.layout_name);
  if (layout && layout.is(parameter.layout)) return true;
  if (!shard_of_(py::handle(parameter.param)).is(parameter.shard)) return false;
  parameter.layout = std::move(layout);
  return true;
}

bool Watch::has_shape_of(const Parameter& parameter, const DLTensor& tensor) const {
  return tensor.ndim == parameter.ndim &&
         std::equal(tensor.shape, tensor.shape + tensor.ndim, sizes_.data() + parameter.first_size);
}

bool Watch::has_strides_of(const Parameter& parameter, const DLTensor& tensor) const {
  return std::equal(tensor.strides, tensor.strides + tensor.ndim,
                    sizes_.data() + parameter.first_size + parameter.ndim);
}

bool Watch::same_entries(const Parameter& parameter, PyObject* entries) const {
  if (!PyDict_Check(entries) || static_cast<size_t>(PyDict_GET_SIZE(entries)) != parameter.entry_count) return false;
  PyObject *name, *value;
  Py_ssize_t at = 0;
  for (size_t i = 0; i < parameter.entry_count; ++i) {
    const Entry& entry = entries_[parameter.first_entry + i];
    if (!PyDict_Next(entries, &at, &name, &value) || name != entry.name.ptr()) return false;
    if (!entry.needed) continue;
    const py::object local = local_of(parameter, value);
    DLTensor tensor;
    if (!read(local.ptr(), tensor) || !(entry.view == tensor)) return false;
  }
  return true;
}

bool Watch::same_state(const py::object& state) const {
  if (!PyDict_Check(state.ptr()) || static_cast<size_t>(PyDict_GET_SIZE(state.ptr())) != state_.size()) return false;
  PyObject *key, *value;
  Py_ssize_t at = 0;
  for (const StateItem& item : state_) {
    if (!PyDict_Next(state.ptr(), &at, &key, &value) || key != item.key) return false;
    if (item.parameter >= 0 && !same_entries(parameters_[item.parameter], value)) return false;
  }
  return true;
}

bool Watch::accept(Parameter& parameter, PyObject* gradient) const {
  DLTensor tensor;
  if (!read(gradient, tensor)) return false;
  const uint8_t dtype = dtype_of(tensor);
  if (dtype != parameter.dtype && dtype != static_cast<uint8_t>(DType::kFloat32)) return false;
  if (!has_shape_of(parameter, tensor) || !parameter.view.has_device_of(tensor)) return false;
  const int64_t numel = contiguous_numel(tensor);  // below 0 where it is strided
  const uint64_t address = address_of(tensor);
  if (numel != 0 && is_freed(gradient, address, tensor.dtype.bits / 8)) return false;
  // resize_ moves what it keeps to new memory: where the address is that of the last step, nothing was cut.
  if (numel != 0 && address != parameter.gradient && is_cut(gradient, tensor)) return false;
  parameter.strided = !parameter.view.is_contiguous() || numel < 0;
  parameter.gradient = address;
  parameter.gradient_dtype = dtype;
  return true;
}

py::object Watch::gradient_of(const Parameter& parameter) const {
  PyObject* gradient = parameter.grad != nullptr && Py_TYPE(parameter.param) == parameter.type
                           ? parameter.grad(parameter.param, nullptr)
                           : PyObject_GetAttr(parameter.param, torch().grad);
  if (gradient == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(gradient);
}

// The local tensor of a gradient that is sharded as its parameter is, as far as the layouts tell; else None.
py::object Watch::part_of(const Parameter& parameter, PyObject* gradient) const {
  if (!parameter.layout_name || Py_TYPE(gradient) != parameter.type) return py::none();
  const py::object layout = attribute(gradient, parameter.layout_name);
  if (!layout.is(parameter.layout) && !layout.is(parameter.gradient_layout)) return py::none();
  py::object local = attribute(gradient, parameter.local_name);
  return Py_TYPE(local.ptr()) == torch().tensor ? local : py::none();
}

py::object Watch::refresh(const py::object& param_groups, const py::object& state) {
  if (!same_groups(param_groups) || !same_state(state)) return py::none();
  py::list gradients(parameters_.size()), stepped, left;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    PyObject* gradient = gradient_of(parameter).release().ptr();
    PyList_SET_ITEM(gradients.ptr(), i, gradient);
    parameter.gradient_dtype = Watch::kNoGradient;
    if (gradient == Py_None) {
      parameter.gradient = 0;
      continue;
    }
    if (!parameter.planned || !same_parameter(parameter)) return py::none();
    stepped.append(py::handle(parameter.param));
    if (!parameter.shard.is_none()) {
      py::object part = part_of(parameter, gradient);
      if (part.is_none()) {
        left.append(i);
        continue;
      }
      gradients[i] = part;
      gradient = part.ptr();
    }
    if (!accept(parameter, gradient)) return py::none();
  }
  return py::make_tuple(gradients, stepped, left);
}

bool Watch::take(size_t index, const py::object& gradient, const py::object& part) {
  Parameter& parameter = parameters_.at(index);
  if (!accept(parameter, part.ptr())) return false;
  const bool has_layout = parameter.layout_name && Py_TYPE(gradient.ptr()) == parameter.type;
  if (has_layout && attribute(gradient.ptr(), parameter.local_name).is(part))
    parameter.gradient_layout = attribute(gradient.ptr(), parameter.layout_name);
  return true;
}

py::bytes Watch::gradient_dtypes() const {
  std::string dtypes;
  for (const Parameter& parameter : parameters_) {
    dtypes.push_back(static_cast<char>(parameter.gradient_dtype | (parameter.strided ? kStrided : 0)));
  }
  return dtypes;
}

bool Watch::options_changed(const py::object& param_groups) {
  if (!PyList_Check(param_groups.ptr())) return true;
  if (static_cast<size_t>(PyList_GET_SIZE(param_groups.ptr())) != groups_.size()) return true;
  bool changed = false;
  for (size_t g = 0; g < groups_.size(); ++g) {
    auto& options = groups_[g].options;
    size_t count = 0;
    PyObject *name, *value;
    PyObject* group = PyList_GET_ITEM(param_groups.ptr(), g);
    if (!PyDict_Check(group)) return true;
    for (Py_ssize_t at = 0; PyDict_Next(group, &at, &name, &value);) {
      if (name == torch().params) continue;
      const bool constant = is_constant(value);
      if (count == options.size()) options.emplace_back();
      auto& [known_name, known] = options[count++];
      if (constant && name == known_name.ptr() && value == known.ptr()) continue;
      changed = true;
      known_name = py::reinterpret_borrow<py::object>(name);
      known = constant ? py::reinterpret_borrow<py::object>(value) : py::object();
    }
    changed = changed || count != options.size();
    options.resize(count);
  }
  return changed;
}

bool Watch::fill(Column<TensorEntry>& table, const Column<int64_t>& parameters,
                 const Column<int64_t>& first_elements) const {
  if (parameters.size() != table.size() || first_elements.size() != table.size()) {
    throw std::invalid_argument("got columns of other lengths than the table");
  }
  TensorEntry* entries = table.mutable_data();
  const int64_t* parameter_of = parameters.data();
  const int64_t* first_element = first_elements.data();
  bool changed = false;
  for (py::ssize_t i = 0; i < table.size(); ++i) {
    const Parameter& parameter = parameters_.at(parameter_of[i]);
    const bool wide = parameter.gradient_dtype == static_cast<uint8_t>(DType::kFloat32);
    const uint64_t address = parameter.gradient + first_element[i] * (wide ? 4 : 2);
    TensorEntry& entry = entries[i];
    if (entry.gradient == address && entry.gradient_dtype == parameter.gradient_dtype) continue;
    entry.gradient = address;
    entry.gradient_dtype = parameter.gradient_dtype;
    changed = true;
  }
  return changed;
}

void bind_watch(py::module_& m) {
  py::class_<Watch>(m, "Watch", "Notices whether what a step's tables were made of is still as it was.")
      .def(py::init<const py::list&, const py::object&, const py::list&, const py::list&, py::object>(),
           py::arg("param_groups"), py::arg("state"), py::arg("shards"), py::arg("entries"), py::arg("shard_of"))
      .def(
          "refresh", &Watch::refresh, py::arg("param_groups"), py::arg("state"),
          "The gradients, the parameters that have one, and whose gradient is still to be taken; or None if the tables "
          "must be made anew.")
      .def("take", &Watch::take, py::arg("parameter"), py::arg("gradient"), py::arg("part"),
           "Takes this rank's part of a gradient; False if the tables must be made anew.")
      .def("gradient_dtypes", &Watch::gradient_dtypes,
           "Per parameter the gradient's DType, with the bit `strided` where it or the parameter is not contiguous; "
           "`no_gradient` where there is none.")
      .def("options_changed", &Watch::options_changed, py::arg("param_groups"),
           "Whether options of a param group may differ from those at the last call.")
      .def("fill", &Watch::fill, py::arg("table").noconvert(), py::arg("parameters"), py::arg("first_elements"),
           "Puts the gradients' addresses into a table; returns whether a row changed.")
      .attr("no_gradient") = Watch::kNoGradient;
  m.attr("Watch").attr("strided") = Watch::kStrided;
}

}  // namespace shardopt
