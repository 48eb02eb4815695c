// Notices whether what a step's tables were made of is still as it was, and reads the gradients' addresses.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <utility>
#include <vector>

#include "core/call.h"
#include "tensor_view.h"

namespace shardopt {

namespace py = pybind11;

template <class T>
using Column = py::array_t<T, py::array::c_style>;

// Of each parameter, state entry and gradient it compares in every step what the tables depend on: address, device,
// dtype and size. It holds none of them, since their memory is the optimizer's to free: a tensor that takes the place
// of another and agrees in all of these makes no difference to the tables. All that it compares with lies in a few
// arrays, in the order in which it is needed.
class Watch {
 public:
  // `param_groups` and `state` are the optimizer's. Per parameter, in the groups' order:
  //   shards   None for a plain tensor, else `shard_of(param)`: an object with `local(tensor)`, and with `attributes`,
  //            None or the names of the attributes in which a tensor keeps its local tensor and its layout
  //   entries  the names of the state entries that the tables point to, or None for a parameter that is in no table
  Watch(const py::list& param_groups, const py::object& state, const py::list& shards, const py::list& entries,
        py::object shard_of);

  // Returns the gradients, None for a parameter without one; the parameters that have one; and the indices of those
  // whose gradient the caller has to hand to `take`. Of other sharded parameters the gradients are this rank's parts.
  // Returns None if anything the tables depend on has changed, or if the kernels cannot step a gradient.
  py::object refresh(const py::object& param_groups, const py::object& state);

  // Takes the gradient of a parameter and this rank's part of it; false if the kernels cannot step that.
  bool take(size_t index, const py::object& gradient, const py::object& part);

  // In the place of a gradient's dtype (`DType`) where there is no gradient: all bits.
  static constexpr uint8_t kNoGradient = 255;

  // A bit beside a gradient's dtype: the gradient or its parameter is not contiguous.
  static constexpr uint8_t kStrided = 64;

  // The dtype of each parameter's gradient, and `kStrided`.
  py::bytes gradient_dtypes() const;

  // Whether options of a param group may differ from those at the last call.
  bool options_changed(const py::object& param_groups);

  // Puts addresses and dtypes of the gradients into a table. `parameters` and `first_elements` say of each row whose
  // gradient it steps, from which element on. Returns whether a row changed.
  bool fill(Column<TensorEntry>& table, const Column<int64_t>& parameters, const Column<int64_t>& first_elements) const;

 private:
  struct Entry {
    py::object name;
    bool needed = false;
    TensorView view;
  };
  struct Parameter {
    PyObject* param = nullptr;  // borrowed: alive as long as it stands in the optimizer's groups
    PyTypeObject* type = nullptr;
    py::object shard, local;             // none for a plain tensor
    py::object local_name, layout_name;  // the shard's `attributes`, if it has any
    py::object layout;                   // of the parameter: as long as it is the same object, so is the shard
    py::object gradient_layout;          // of a gradient whose local tensor was this rank's part
    getter grad = nullptr;               // of torch.Tensor; nullptr for a type that has its own
    TensorView view;
    size_t first_size = 0;  // its shape's place in sizes_; the strides of one that is not contiguous follow
    int32_t ndim = 0;
    bool planned = false;  // whether it is in a table
    uint8_t dtype = 0;
    uint8_t gradient_dtype = kNoGradient;
    bool strided = false;                     // whether it or its gradient is not contiguous
    uint64_t gradient = 0;                    // its address in the last step; 0 where there was none
    size_t first_entry = 0, entry_count = 0;  // its state's place in entries_
  };
  struct Group {
    size_t count = 0;                                        // of parameters
    std::vector<std::pair<py::object, py::object>> options;  // values that cannot change; others are not held
  };
  struct StateItem {
    PyObject* key;
    int64_t parameter;  // -1: not watched
  };

  void add_parameter(const py::handle& param, const py::object& shard, bool planned);
  void add_state(Parameter& parameter, const py::handle& entries, const py::handle& needed);
  static py::object local_of(const Parameter& parameter, PyObject* tensor);
  bool same_groups(const py::object& param_groups) const;
  bool same_state(const py::object& state) const;
  bool same_parameter(Parameter& parameter) const;
  bool same_shard(Parameter& parameter) const;
  bool same_entries(const Parameter& parameter, PyObject* entries) const;
  bool has_shape_of(const Parameter& parameter, const DLTensor& tensor) const;
  bool has_strides_of(const Parameter& parameter, const DLTensor& tensor) const;
  py::object gradient_of(const Parameter& parameter) const;
  py::object part_of(const Parameter& parameter, PyObject* gradient) const;
  bool accept(Parameter& parameter, PyObject* gradient) const;

  std::vector<Group> groups_;
  std::vector<Parameter> parameters_;
  std::vector<int64_t> sizes_;  // of the parameters' dimensions, and strides
  std::vector<StateItem> state_;
  std::vector<Entry> entries_;
  py::object shard_of_;
};

void bind_watch(py::module_& m);

}  // namespace shardopt
