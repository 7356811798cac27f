#include "tensor_view.h"

#include <algorithm>
#include <cstdint>

namespace moe_zero {
namespace {

struct Range {
  uintptr_t begin;
  uintptr_t end;
  int64_t index;
};

std::string name(int64_t index) { return "tensors[" + std::to_string(index) + "]"; }

Range range_of(const TensorView& view, int64_t index) {
  int64_t below = 0, above = 0;
  view.extent(&below, &above);
  const auto base = reinterpret_cast<uintptr_t>(view.data);
  const int64_t item = dtype_size(view.dtype);
  return Range{base + below * item, base + (above + 1) * item, index};
}

// Calls visit(byte address) for every element, in row-major order, until it returns false.
template <typename Visit>
bool for_each_element(const TensorView& view, const Visit& visit) {
  const auto base = reinterpret_cast<uintptr_t>(view.data);
  const int64_t item = dtype_size(view.dtype);
  if (view.dense()) {
    for (int64_t i = 0; i < view.numel; ++i) {
      if (!visit(base + i * item)) return false;
    }
    return true;
  }
  const Geometry& geometry = *view.geometry;
  std::vector<int64_t> index(geometry.ndim(), 0);
  int64_t offset = 0;
  for (int64_t i = 0; i < view.numel; ++i) {
    if (!visit(base + offset * item)) return false;
    for (int d = geometry.ndim() - 1; d >= 0; --d) {
      offset += geometry.strides[d];
      if (++index[d] < geometry.sizes[d]) break;
      offset -= geometry.strides[d] * geometry.sizes[d];
      index[d] = 0;
    }
  }
  return true;
}

// Exact: marks every byte that the views of one cluster of intersecting ranges touch. Only views that interleave
// (columns of one matrix, say) come here.
bool any_byte_twice(const std::vector<const TensorView*>& views, uintptr_t begin, uintptr_t end) {
  std::vector<bool> seen(end - begin, false);
  for (const TensorView* view : views) {
    const int64_t item = dtype_size(view->dtype);
    const bool distinct = for_each_element(*view, [&](uintptr_t address) {
      for (int64_t byte = 0; byte < item; ++byte) {
        if (seen[address - begin + byte]) return false;
        seen[address - begin + byte] = true;
      }
      return true;
    });
    if (!distinct) return true;
  }
  return false;
}

// True when dimensions sorted by stride each step over all that lies below them: then no element repeats.
bool nests(const Geometry& geometry) {
  std::vector<int> order(geometry.ndim());
  for (int d = 0; d < geometry.ndim(); ++d) order[d] = d;
  const std::vector<int64_t>&sizes = geometry.sizes, &strides = geometry.strides;
  std::sort(order.begin(), order.end(), [&](int a, int b) { return strides[a] < strides[b]; });
  int64_t span = 0;
  for (int d : order) {
    if (strides[d] <= span) return false;
    span += strides[d] * (sizes[d] - 1);
  }
  return true;
}

}  // namespace

void TensorView::set_geometry(const int64_t* sizes, const int64_t* strides, int ndim) {
  numel = 1;
  bool is_dense = true;
  for (int d = ndim - 1; d >= 0; --d) {
    is_dense = is_dense && (!strides || sizes[d] == 1 || strides[d] == numel);
    numel *= sizes[d];
  }
  geometry.reset();
  if (is_dense || numel <= 1) return;
  geometry = std::make_unique<Geometry>();
  for (int d = 0; d < ndim; ++d) {
    if (sizes[d] == 1) continue;
    if (geometry->ndim() > 0 && geometry->strides.back() == strides[d] * sizes[d]) {
      geometry->sizes.back() *= sizes[d];
      geometry->strides.back() = strides[d];
    } else {
      geometry->sizes.push_back(sizes[d]);
      geometry->strides.push_back(strides[d]);
    }
  }
}

void TensorView::extent(int64_t* below, int64_t* above) const {
  *below = 0;
  *above = dense() ? numel - 1 : 0;
  for (int d = 0; !dense() && d < geometry->ndim(); ++d) {
    const int64_t reach = geometry->strides[d] * (geometry->sizes[d] - 1);
    (reach < 0 ? *below : *above) += reach;
  }
}

std::string check_tensors(const Table& table, const TensorView* tensors, int64_t num_tensors) {
  if (num_tensors != table.num_tensors) {
    return "tensors has " + std::to_string(num_tensors) + " entries, but the plan was made for " +
           std::to_string(table.num_tensors);
  }
  for (int64_t i = 0; i < num_tensors; ++i) {
    if (tensors[i].present && tensors[i].numel != table.sizes[i]) {
      return name(i) + " has " + std::to_string(tensors[i].numel) + " elements, but the plan was made for " +
             std::to_string(table.sizes[i]);
    }
    if (tensors[i].present && tensors[i].numel > 0 && !tensors[i].data) {
      return name(i) + " has no memory (its storage was freed)";
    }
  }
  return "";
}

std::string check_flat_size(const Table& table, int64_t flat_bytes) {
  if (flat_bytes == table.flat_bytes) return "";
  return "the flat buffer has " + std::to_string(flat_bytes) + " bytes, but the plan needs " +
         std::to_string(table.flat_bytes) + " (world_size * shard_bytes)";
}

std::string check_sources(const TensorView* tensors, int64_t num_tensors, const void* flat, int64_t flat_bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(flat);
  for (int64_t i = 0; i < num_tensors; ++i) {
    if (!tensors[i].present || tensors[i].numel == 0) continue;
    const Range range = range_of(tensors[i], i);
    if (range.begin < begin + flat_bytes && begin < range.end) {
      return name(i) + " shares memory with the flat buffer that is written";
    }
  }
  return "";
}

std::string check_targets(const TensorView* tensors, int64_t num_tensors, const void* flat, int64_t flat_bytes) {
  std::vector<Range> ranges;
  ranges.reserve(num_tensors);
  const auto begin = reinterpret_cast<uintptr_t>(flat);
  for (int64_t i = 0; i < num_tensors; ++i) {
    if (!tensors[i].present) return name(i) + " is None; unpack needs a tensor to write to";
    if (tensors[i].numel == 0) continue;
    ranges.push_back(range_of(tensors[i], i));
    if (ranges.back().begin < begin + flat_bytes && begin < ranges.back().end) {
      return name(i) + " shares memory with the flat buffer that is read";
    }
    if (!tensors[i].dense() && !nests(*tensors[i].geometry) &&
        any_byte_twice({&tensors[i]}, ranges.back().begin, ranges.back().end)) {
      return name(i) + " has several elements at the same address (an expanded tensor?); it cannot be written";
    }
  }
  const auto before = [](const Range& a, const Range& b) { return a.begin < b.begin; };
  if (!std::is_sorted(ranges.begin(), ranges.end(), before)) std::sort(ranges.begin(), ranges.end(), before);
  for (size_t first = 0; first < ranges.size();) {
    uintptr_t end = ranges[first].end;
    size_t last = first + 1;
    bool dense = tensors[ranges[first].index].dense();
    for (; last < ranges.size() && ranges[last].begin < end; ++last) {
      dense = dense && tensors[ranges[last].index].dense();
      end = std::max(end, ranges[last].end);
    }
    if (last > first + 1) {
      std::vector<const TensorView*> views;
      for (size_t i = first; i < last; ++i) views.push_back(&tensors[ranges[i].index]);
      if (dense || any_byte_twice(views, ranges[first].begin, end)) {
        return name(ranges[first].index) + " and " + name(ranges[first + 1].index) +
               " share memory; each element must be written once";
      }
    }
    first = last;
  }
  return "";
}

}  // namespace moe_zero
