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
  std::vector<int64_t> index(view.ndim, 0);
  int64_t offset = 0;
  for (int64_t i = 0; i < view.numel; ++i) {
    if (!visit(base + (view.dense ? i : offset) * item)) return false;
    for (int d = view.ndim - 1; d >= 0 && !view.dense; --d) {
      offset += view.strides[d];
      if (++index[d] < view.sizes[d]) break;
      offset -= view.strides[d] * view.sizes[d];
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
bool nests(const TensorView& view) {
  std::vector<int> order(view.ndim);
  for (int d = 0; d < view.ndim; ++d) order[d] = d;
  std::sort(order.begin(), order.end(), [&](int a, int b) { return view.strides[a] < view.strides[b]; });
  int64_t span = 0;
  for (int d : order) {
    if (view.strides[d] <= span) return false;
    span += view.strides[d] * (view.sizes[d] - 1);
  }
  return true;
}

}  // namespace

void TensorView::set_geometry(const int64_t* all_sizes, const int64_t* all_strides, int all_dims) {
  numel = 1;
  for (int d = 0; d < all_dims; ++d) numel *= all_sizes[d];
  ndim = 0;
  dense = true;
  if (numel <= 1) return;
  int64_t expected = 1;
  for (int d = all_dims - 1; d >= 0 && dense; --d) {
    dense = all_sizes[d] == 1 || all_strides[d] == expected;
    expected *= all_sizes[d];
  }
  if (dense) return;
  sizes.clear();
  strides.clear();
  for (int d = 0; d < all_dims; ++d) {
    if (all_sizes[d] == 1) continue;
    if (!sizes.empty() && strides.back() == all_strides[d] * all_sizes[d]) {
      sizes.back() *= all_sizes[d];
      strides.back() = all_strides[d];
    } else {
      sizes.push_back(all_sizes[d]);
      strides.push_back(all_strides[d]);
    }
  }
  ndim = static_cast<int>(sizes.size());
}

void TensorView::extent(int64_t* below, int64_t* above) const {
  *below = 0;
  *above = numel - 1;
  if (dense) return;
  *above = 0;
  for (int d = 0; d < ndim; ++d) {
    const int64_t reach = strides[d] * (sizes[d] - 1);
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
    if (!tensors[i].dense && !nests(tensors[i]) &&
        any_byte_twice({&tensors[i]}, ranges.back().begin, ranges.back().end)) {
      return name(i) + " has several elements at the same address (an expanded tensor?); it cannot be written";
    }
  }
  const auto before = [](const Range& a, const Range& b) { return a.begin < b.begin; };
  if (!std::is_sorted(ranges.begin(), ranges.end(), before)) std::sort(ranges.begin(), ranges.end(), before);
  for (size_t first = 0; first < ranges.size();) {
    uintptr_t end = ranges[first].end;
    size_t last = first + 1;
    bool dense = tensors[ranges[first].index].dense;
    for (; last < ranges.size() && ranges[last].begin < end; ++last) {
      dense = dense && tensors[ranges[last].index].dense;
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
