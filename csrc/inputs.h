// The tensors that a cached kernel table points to: notices their changes, and reads the gradients of the next step.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "core/call.h"
#include "torch_tensor.h"

namespace shardopt {

namespace py = pybind11;

// Whether an array is a contiguous column of T. py::array_t's own check compares the dtypes' fields and takes 1 us.
template <class T>
bool is_column(const py::array& array) {
  return array.dtype().is(py::dtype::of<T>()) && (array.flags() & py::array::c_style) != 0;
}

// Reads an attribute of objects of one type, without a search where the type keeps it in a slot or computes it in C.
class Attribute {
 public:
  Attribute() = default;
  Attribute(PyTypeObject* type, py::object name);
  explicit operator bool() const { return static_cast<bool>(name_); }
  py::object of(PyObject* object) const;

 private:
  PyTypeObject* type_ = nullptr;
  py::object name_;
  PyMemberDef* slot_ = nullptr;
  PyGetSetDef* computed_ = nullptr;
};

// Compares, in each step, everything that the table depends on: address and format of parameters and state; the
// parameters' shards; and options. Owns none of the tensors: their memory is the user's to free, and a tensor that
// takes another's place at the same address makes no difference to the table.
class Inputs {
 public:
  // `param_groups` and `state` are the optimizer's. Per parameter, in the groups' order:
  //   shards   its shard; of a parameter with rows in the table
  //   entries  names of the state entries that the table points to; None for a parameter without rows in the table
  // `shard_of(param)` gives the shard of a parameter whose layout may have changed, `read_gradient(index, gradient)`
  // this rank's part of a gradient that is sharded otherwise than its parameter, or has no memory.
  Inputs(const py::list& param_groups, const py::object& state, const py::list& shards, const py::list& entries,
         py::object shard_of, py::object read_gradient);

  // Reads the gradients. Returns this rank's part of each (None for a parameter without gradient) and the parameters to
  // be stepped, or None if the table must be made anew. Calls `read_gradient`, which may run collectives, unless
  // `parts` has this rank's parts, by the parameters' indices. If a parameter's `grad` is None, its entry in
  // `parts`, on any device, is its gradient, such as one held in host memory.
  py::object read(const py::object& param_groups, const py::object& state, const py::object& parts);

  // Per parameter the gradient's DType, with kStrided where a copy of it or of the parameter is to be stepped;
  // kNoDType for no gradient.
  py::bytes gradient_kinds() const;
  static constexpr uint8_t kStrided = 64;

  // The param groups whose options may differ from those at the last call, by index: the learning rate if only that
  // changed, to a float in its range, else None. None if groups were added or removed.
  py::object changed_groups(const py::object& param_groups);

  // Puts addresses and dtypes of gradients into table rows. Returns whether a row changed.
  //   tensors   per row, the index of the parameter
  //   elements  per row, the gradient's element where the row begins
  bool fill(py::array& rows, const py::array& tensors, const py::array& elements) const;

 private:
  // A tensor as the table knows it.
  struct Known {
    TensorFormat format;
    uint64_t address = 0;
    bool take(PyObject* tensor) { return format.take(tensor) && format.read(tensor, address); }
    bool is(PyObject* tensor) const {
      uint64_t now = address;
      return format.read(tensor, now) && now == address;
    }
  };
  struct StateEntry {
    py::object name;
    bool needed;
    Known known;
  };
  struct Input {
    PyObject* param = nullptr;  // borrowed: compared with the list that owns it before each use
    PyTypeObject* type = nullptr;
    py::object shard;
    bool fixed = false;                // an ordinary tensor whose shard cannot change
    Attribute grad, local, layout;     // local: of a DTensor; layout: while this object is the same, so is the shard
    int64_t known_type = 0;            // the parameter's; its local tensor's may differ
    py::object known_layout;           // the parameter's
    py::object known_gradient_layout;  // that of a gradient which is sharded as the parameter is
    Known known, gradient;             // this rank's parts of the parameter and of the last gradient
    bool in_table = false, has_gradient = false;
    size_t first_entry = 0, entry_count = 0;
  };
  struct Group {
    size_t count = 0;
    std::vector<std::pair<py::object, py::object>> options;  // without a value if it can change in place
  };

  void add_input(PyObject* param, const py::object& shard, bool in_table);
  void add_entries(Input& input, PyObject* state, const py::handle& needed);
  static py::object local_of(const Input& input, PyObject* tensor);
  bool same_groups(PyObject* param_groups) const;
  bool same_state(PyObject* state) const;
  bool same_entries(const Input& input, PyObject* state) const;
  bool same_parameter(Input& input) const;
  bool same_layout(Input& input) const;
  py::object part_of(const Input& input, const py::object& gradient) const;
  static bool accept(Input& input, PyObject* part, bool is_kept);

  std::vector<Group> groups_;
  std::vector<Input> inputs_;
  std::vector<std::pair<PyObject*, int64_t>> state_;  // keys, borrowed, and the inputs' indices, -1 for others
  std::vector<StateEntry> entries_;
  py::object shard_of_, read_gradient_;
};

void bind_inputs(py::module_& m);

}  // namespace shardopt
