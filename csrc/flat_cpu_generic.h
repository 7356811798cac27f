// Loops in plain C++ for every pair of dtypes. Included once per instruction set, inside that set's namespace and
// target options, so that the compiler vectorises the same text for each.

template <typename S, typename D>
void copy_generic(const void* src, void* dst, int64_t n, const CopyArgs& args, Stats* stats) {
  const S* __restrict source = static_cast<const S*>(src);
  D* __restrict target = static_cast<D*>(dst);
  if (stats) {
    for (int64_t i = 0; i < n; ++i) {
      target[i] = transform(source[i], target[i], args);
      stats->add(target[i]);
    }
  } else if (args.scaled || args.accumulate) {
    for (int64_t i = 0; i < n; ++i) target[i] = transform(source[i], target[i], args);
  } else if constexpr (std::is_same_v<S, D>) {
    memcpy(dst, src, n * sizeof(D));
  } else {
    using C = Compute<S, D>;
    for (int64_t i = 0; i < n; ++i) narrow(static_cast<C>(widen(source[i])), &target[i]);
  }
}

template <typename S, typename D>
void sum_rows_generic(const void* rows, int64_t num_rows, int64_t row_stride, void* dst, int64_t n,
                      const CopyArgs& args, Stats* stats) {
  using C = Compute<S, D>;
  const S* __restrict source = static_cast<const S*>(rows);
  D* __restrict target = static_cast<D*>(dst);
  for (int64_t i = 0; i < n; ++i) {
    C sum = static_cast<C>(widen(source[i]));
    for (int64_t r = 1; r < num_rows; ++r) sum += static_cast<C>(widen(source[r * row_stride + i]));
    if (args.scaled) sum *= static_cast<C>(args.scale);
    if (args.accumulate) sum = static_cast<C>(widen(target[i])) + sum;
    narrow(sum, &target[i]);
    if (stats) stats->add(target[i]);
  }
}
