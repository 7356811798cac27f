// The tensors of a call that is made again and again (TensorList of moe_zero/ops/flat.py), read without Python.
//
// Only references are kept: every call reads addresses and sizes anew, on all cores, because storages may be freed,
// resized or replaced in between.
#pragma once

#include <Python.h>

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "py_view.h"
#include "torch_view.h"

namespace moe_zero {

struct HeldTensors {
  std::vector<std::optional<Tensor>> tensors;

  // False if a tensor is not, or not any more, dense, of a known dtype and on the device of the flat buffer.
  bool read(const py::DLTensor& flat, std::vector<TensorView>* views) const {
    views->resize(tensors.size());
    std::atomic<bool> plain{true};
    torch::stable::parallel_for(0, static_cast<int64_t>(tensors.size()), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (tensors[i] && !read_dense(*tensors[i], flat, &(*views)[i])) plain = false;
      }
    });
    return plain;
  }

 private:
  static constexpr int64_t kGrain = 256;  // about 10 microseconds

  static bool read_dense(const Tensor& tensor, const py::DLTensor& flat, TensorView* out) {
    static const int32_t cpu = aoti_torch_device_type_cpu(), cuda = aoti_torch_device_type_cuda();
    AtenTensorHandle handle = tensor.get();
    int32_t device_type = -1, device_index = -1;
    bool contiguous = false;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &device_type));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(handle, &contiguous));
    if (!contiguous || !view_dtype(tensor, &out->dtype)) return false;
    if (flat.device_type == py::kCpu) {
      if (device_type != cpu) return false;
    } else {
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &device_index));
      if (device_type != cuda || device_index != flat.device_id) return false;
    }
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(handle, &out->numel));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &out->data));
    return out->present = true;
  }
};

constexpr const char* kHeldName = "moe_zero.HeldTensors";

// moe_zero::hold: an operator, because only operators are handed references to tensors. Owned by own() at once.
inline int64_t hold(std::vector<std::optional<Tensor>> tensors) {
  return reinterpret_cast<int64_t>(new HeldTensors{std::move(tensors)});
}

inline PyObject* own(PyObject*, PyObject* args) {
  long long address = 0;
  if (!PyArg_ParseTuple(args, "L", &address)) return nullptr;
  return PyCapsule_New(reinterpret_cast<void*>(address), kHeldName, [](PyObject* capsule) {
    delete static_cast<HeldTensors*>(PyCapsule_GetPointer(capsule, kHeldName));
  });
}

// Fills call.views from what is held, or else from the sequence. False when the dispatcher has to take the call.
inline bool read_views(py::Call* call, PyObject* tensors, PyObject* held) {
  if (held == Py_None || !PyCapsule_IsValid(held, kHeldName)) return call->read_views(tensors);
  const auto* list = static_cast<const HeldTensors*>(PyCapsule_GetPointer(held, kHeldName));
  return list->read(call->flat, &call->views) || call->read_views(tensors);
}

}  // namespace moe_zero
