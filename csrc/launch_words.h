// The words that a launch carries by value (flat_tiles.h describes them), put together on the host.
#pragma once

#include <cstdint>
#include <vector>

#include "flat_tiles.h"
#include "tensor_view.h"

namespace moe_zero {

// Appends tensors from `first` on until `capacity` words are full or all are in; returns how many. A tensor with more
// dimensions than fit is impossible: kMaxDims is far below any capacity.
inline int64_t fill_words(const TensorView* tensors, int64_t first, int64_t num_tensors, int64_t capacity,
                          std::vector<uint64_t>* words) {
  int64_t used = 0, count = 0;
  for (; first + count < num_tensors; ++count) {
    const TensorView& view = tensors[first + count];
    const int64_t need = 1 + (view.dense() ? 0 : 2 + 2 * view.geometry->ndim());
    if (used + need > capacity) break;
    used += need;
  }
  words->assign(count, 0);
  words->reserve(used);
  for (int64_t i = 0; i < count; ++i) {
    const TensorView& view = tensors[first + i];
    if (!view.present) continue;
    uint64_t bits = kPresent | static_cast<uint64_t>(view.dtype) << kDTypeShift;
    const auto address = reinterpret_cast<uint64_t>(view.data);
    if (view.dense()) {
      bits |= address & kAddressMask;
    } else {
      bits |= kStrided | words->size();
      const Geometry& geometry = *view.geometry;
      words->push_back(address);
      words->push_back(static_cast<uint64_t>(geometry.ndim()));
      for (int64_t size : geometry.sizes) words->push_back(static_cast<uint64_t>(size));
      for (int64_t stride : geometry.strides) words->push_back(static_cast<uint64_t>(stride));
    }
    (*words)[i] = bits;
  }
  return count;
}

}  // namespace moe_zero
