// The k largest of a row in the order of a stable descending sort: equal values by index, NaN above all others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

namespace moe_zero {

// An integer that is ordered as the value is.
template <typename T>
auto order_key(T value) {
  using Key = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  if (value != value) return static_cast<Key>(~Key(0));
  value += 0;  // -0 equals 0
  Key bits;
  memcpy(&bits, &value, sizeof bits);
  constexpr Key kSign = Key(1) << (8 * sizeof(Key) - 1);
  return static_cast<Key>(bits & kSign ? ~bits : bits | kSign);
}

template <typename T>
class TopK {
 public:
  using Key = decltype(order_key(T()));

  explicit TopK(int64_t n) : n_(n), keys_(new Key[n]), order_(new int64_t[n]) {}

  // Indices of the k largest of n values.
  void operator()(const T* values, int64_t k, int64_t* out) {
    for (int64_t i = 0; i < n_; ++i) keys_[i] = order_key(values[i]);
    if (k <= kPasses) {
      for (int64_t rank = 0; rank < k; ++rank) out[rank] = rank == 0 ? first() : next(out[rank - 1]);
      return;
    }
    for (int64_t i = 0; i < n_; ++i) order_[i] = i;
    int64_t* const order = order_.get();
    std::partial_sort(order, order + k, order + n_, [this](int64_t a, int64_t b) {
      return keys_[a] != keys_[b] ? keys_[a] > keys_[b] : a < b;
    });
    std::copy(order, order + k, out);
  }

 private:
  static constexpr int64_t kPasses = 8;  // below, a pass for each is faster than a sort

  int64_t first() const {
    int64_t best = 0;
    for (int64_t i = 1; i < n_; ++i) best = keys_[i] > keys_[best] ? i : best;
    return best;
  }

  // The largest of those that come after `last` in the order.
  int64_t next(int64_t last) const {
    int64_t best = -1;
    for (int64_t i = 0; i < n_; ++i) {
      const bool after = keys_[i] < keys_[last] || (keys_[i] == keys_[last] && i > last);
      if (after && (best < 0 || keys_[i] > keys_[best])) best = i;
    }
    return best;
  }

  int64_t n_;
  std::unique_ptr<Key[]> keys_;
  std::unique_ptr<int64_t[]> order_;
};

}  // namespace moe_zero
