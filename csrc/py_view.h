// From Python tensors to the plain views of tensor_view.h without the dispatcher, for eager calls.
//
// The dispatcher boxes, wraps and counts every tensor of a list several times over, about a microsecond each: more
// than copying a small tensor costs. torch publishes a C function that fills a DLTensor from a Python tensor in a few
// nanoseconds (attribute __dlpack_c_exchange_api__); the declarations below are the part of that interface used here.
// Whatever is not a plain strided tensor is left to the dispatcher: the functions then say "not handled".
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>
#include <vector>

#include "flat_copy.h"
#include "tensor_view.h"

namespace moe_zero {
namespace py {

struct DLTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t dtype_code;
  uint8_t dtype_bits;
  uint16_t dtype_lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct ExchangeApi {
  uint32_t major;
  uint32_t minor;
  void* previous;
  void* allocate;
  void* to_managed;
  void* from_managed;
  int (*to_tensor)(void* object, DLTensor* out);
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};

constexpr int32_t kCpu = 1, kCuda = 2;
constexpr uint8_t kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4;

// The interface and the two exact types that it is used for. Set once, by init().
inline const ExchangeApi* api = nullptr;
inline PyObject* tensor_type = nullptr;
inline PyObject* parameter_type = nullptr;

// init(torch.Tensor, torch.nn.Parameter) -> bool: whether this torch has the interface.
inline PyObject* init(PyObject*, PyObject* args) {
  PyObject *tensor = nullptr, *parameter = nullptr;
  if (!PyArg_ParseTuple(args, "OO", &tensor, &parameter)) return nullptr;
  PyObject* capsule = PyObject_GetAttrString(tensor, "__dlpack_c_exchange_api__");
  const void* pointer = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : nullptr;
  Py_XDECREF(capsule);
  PyErr_Clear();
  const auto* candidate = static_cast<const ExchangeApi*>(pointer);
  if (!candidate || candidate->major != 1) Py_RETURN_FALSE;
  Py_INCREF(tensor);
  Py_INCREF(parameter);
  tensor_type = tensor;
  parameter_type = parameter;
  api = candidate;
  Py_RETURN_TRUE;
}

inline bool read(PyObject* object, DLTensor* out) {
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (!api || (type != tensor_type && type != parameter_type)) return false;
  if (api->to_tensor(object, out) != 0) {
    PyErr_Clear();
    return false;
  }
  return out->dtype_lanes == 1;
}

inline bool read_dtype(const DLTensor& tensor, DType* out) {
  if (tensor.dtype_code == kFloat && tensor.dtype_bits == 32) return *out = DType::kFloat32, true;
  if (tensor.dtype_code == kBfloat && tensor.dtype_bits == 16) return *out = DType::kBFloat16, true;
  if (tensor.dtype_code == kFloat && tensor.dtype_bits == 16) return *out = DType::kFloat16, true;
  if (tensor.dtype_code == kFloat && tensor.dtype_bits == 64) return *out = DType::kFloat64, true;
  return false;
}

// A DLTensor does not show torch's lazy negation. Only the imaginary part of a conjugated complex tensor carries it, and
// the strides of such a view are even wherever they matter.
inline bool lazily_negated(PyObject* object, const DLTensor& tensor) {
  for (int d = 0; d < tensor.ndim; ++d) {
    if (tensor.shape[d] != 1 && tensor.strides[d] % 2 != 0) return false;
  }
  PyObject* answer = PyObject_CallMethod(object, "is_neg", nullptr);
  const bool negated = answer != Py_False;
  Py_XDECREF(answer);
  PyErr_Clear();
  return negated;
}

// Arguments of one call. `handled` is false when the dispatcher has to take it.
struct Call {
  bool handled = false;
  DLTensor flat{};
  int64_t flat_bytes = 0;
  std::vector<TensorView> views;
  Table table{};
  void* stats = nullptr;
  DType stats_dtype = DType::kFloat64;

  bool read_flat(PyObject* object, int32_t device_type) {
    if (!read(object, &flat) || flat.device_type != device_type) return false;
    TensorView geometry;
    geometry.set_geometry(flat.shape, flat.strides, flat.ndim);
    flat_bytes = geometry.numel * flat.dtype_bits / 8;
    return geometry.dense();
  }

  bool read_views(PyObject* sequence) {
    const bool list = PyList_Check(sequence);
    if (!list && !PyTuple_Check(sequence)) return false;
    const Py_ssize_t n = list ? PyList_Size(sequence) : PyTuple_Size(sequence);
    views.resize(n);
    for (Py_ssize_t i = 0; i < n; ++i) {
      PyObject* object = list ? PyList_GetItem(sequence, i) : PyTuple_GetItem(sequence, i);
      if (object == Py_None) continue;
      DLTensor tensor;
      TensorView& view = views[i];
      if (!read(object, &tensor) || !read_dtype(tensor, &view.dtype) || tensor.device_type != flat.device_type ||
          tensor.device_id != flat.device_id || lazily_negated(object, tensor)) {
        return false;
      }
      view.present = true;
      view.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
      view.set_geometry(tensor.shape, tensor.strides, tensor.ndim);
    }
    return true;
  }

  bool read_table(PyObject* object) {
    DLTensor words;
    return read(object, &words) && words.device_type == kCpu && words.dtype_code == kInt && words.dtype_bits == 64 &&
           words.ndim == 1 &&
           Table::parse(reinterpret_cast<const int64_t*>(static_cast<char*>(words.data) + words.byte_offset),
                        words.shape[0], &table);
  }

  bool read_stats(PyObject* object) {
    if (object == Py_None) return true;
    DLTensor tensor;
    if (!read(object, &tensor) || !read_dtype(tensor, &stats_dtype) || tensor.dtype_bits < 32 || tensor.ndim != 1 ||
        tensor.shape[0] != 2 || tensor.strides[0] != 1 || tensor.device_type != flat.device_type ||
        tensor.device_id != flat.device_id) {
      return false;
    }
    stats = static_cast<char*>(tensor.data) + tensor.byte_offset;
    return true;
  }

  void* flat_data() const { return static_cast<char*>(flat.data) + flat.byte_offset; }
};

inline PyObject* value_error(const std::string& problem) {
  PyErr_SetString(PyExc_ValueError, problem.c_str());
  return nullptr;
}

}  // namespace py
}  // namespace moe_zero
