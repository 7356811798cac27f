// Loops over vectors of floats, for the pairs of dtypes that are computed in fp32. Included once per instruction
// set, inside its namespace and target options; V is the set's vector type (see flat_cpu_avx2.cpp).

// A step fills one cache line of a 16-bit destination and two of an fp32 one.
constexpr int64_t kStep = 32;

// Elements until `pointer` is aligned to a cache line.
template <typename D>
int64_t head_count(const void* pointer) {
  return static_cast<int64_t>((64 - reinterpret_cast<uintptr_t>(pointer) % 64) % 64 / sizeof(D));
}

// Sum of squares in fp64 and finiteness of vectors; the squares of fp32 values overflow fp32 from 2e19 on.
struct VectorStats {
  typename V::Sum sum;
  typename V::I largest;  // of the magnitudes' bits: those of inf and NaN are above all others

  // Spelled out, because an implicit constructor would not get the target options.
  VectorStats() : sum(V::zero_sum()), largest(V::zero_bits()) {}

  void add(typename V::F value) {
    sum = V::add_squares(sum, value);
    largest = V::max_magnitude(largest, value);
  }

  void into(Stats* stats) const {
    stats->sum_of_squares += V::total(sum);
    stats->non_finite = stats->non_finite || !V::all_finite(largest);
  }
};

// Loads through one pipe, the choices of `args` made outside of the loop.
template <typename S, typename D, bool kScale, bool kAccumulate, bool kStats, bool kStream>
void copy_steps(const S* source, D* target, int64_t n, const CopyArgs& args, Stats* stats) {
  using F = typename V::F;
  const F scale = V::set(static_cast<float>(args.scale));
  VectorStats sums;
  for (int64_t i = 0; i < n; i += kStep) {
    F value[kStep / V::kLanes];
    for (int64_t v = 0; v < kStep / V::kLanes; ++v) {
      F x = V::load(source + i + v * V::kLanes);
      if constexpr (kScale) x = V::mul(x, scale);
      if constexpr (kAccumulate) x = V::add(V::load(target + i + v * V::kLanes), x);
      value[v] = x;
      if constexpr (kStats) sums.add(V::rounded(x, static_cast<D*>(nullptr)));
    }
    V::template store_step<kStream>(target + i, value);
  }
  if constexpr (kStats) sums.into(stats);
}

template <typename S, typename D>
void copy_vectors(const void* src, void* dst, int64_t n, const CopyArgs& args, Stats* stats) {
  const S* source = static_cast<const S*>(src);
  D* target = static_cast<D*>(dst);
  const bool stream = args.stream && !args.accumulate && n >= 4 * kStep &&
                      reinterpret_cast<uintptr_t>(dst) % sizeof(D) == 0;
  if (stream) {
    const int64_t head = head_count<D>(target);
    copy_generic<S, D>(source, target, head, args, stats);
    source += head, target += head, n -= head;
  }
  const int64_t whole = n / kStep * kStep;
  if (args.accumulate) {
    copy_steps<S, D, false, true, false, false>(source, target, whole, args, stats);
  } else {
    const auto pick = [&](auto scaled, auto with_stats) {
      constexpr bool kScale = decltype(scaled)::value, kStats = decltype(with_stats)::value;
      stream ? copy_steps<S, D, kScale, false, kStats, true>(source, target, whole, args, stats)
             : copy_steps<S, D, kScale, false, kStats, false>(source, target, whole, args, stats);
    };
    const std::true_type yes;
    const std::false_type no;
    args.scaled ? (stats ? pick(yes, yes) : pick(yes, no)) : (stats ? pick(no, yes) : pick(no, no));
  }
  if (stream) V::fence();
  copy_generic<S, D>(source + whole, target + whole, n - whole, args, stats);
}

// Same dtype on both sides: bits are moved as they are, unless there is arithmetic to do.
template <typename T>
void copy_same(const void* src, void* dst, int64_t n, const CopyArgs& args, Stats* stats) {
  const bool scaled = args.scaled || args.accumulate;
  if (!scaled && !stats) {
    const int64_t bytes = n * static_cast<int64_t>(sizeof(T));
    return args.stream ? V::stream_bytes(static_cast<const char*>(src), static_cast<char*>(dst), bytes)
                       : static_cast<void>(memcpy(dst, src, bytes));
  }
  if constexpr (std::is_same_v<T, double>) {
    copy_generic<T, T>(src, dst, n, args, stats);
  } else {
    copy_vectors<T, T>(src, dst, n, args, stats);
  }
}

template <typename S, typename D>
void sum_rows_vectors(const void* rows, int64_t num_rows, int64_t row_stride, void* dst, int64_t n,
                      const CopyArgs& args, Stats* stats) {
  using F = typename V::F;
  const S* source = static_cast<const S*>(rows);
  D* target = static_cast<D*>(dst);
  const F scale = V::set(static_cast<float>(args.scale));
  VectorStats sums;
  const int64_t whole = n / kStep * kStep;
  for (int64_t i = 0; i < whole; i += kStep) {
    F value[kStep / V::kLanes];
    for (int64_t v = 0; v < kStep / V::kLanes; ++v) value[v] = V::load(source + i + v * V::kLanes);
    for (int64_t r = 1; r < num_rows; ++r) {
      const S* row = source + r * row_stride + i;
      for (int64_t v = 0; v < kStep / V::kLanes; ++v) value[v] = V::add(value[v], V::load(row + v * V::kLanes));
    }
    for (int64_t v = 0; v < kStep / V::kLanes; ++v) {
      if (args.scaled) value[v] = V::mul(value[v], scale);
      if (args.accumulate) value[v] = V::add(V::load(target + i + v * V::kLanes), value[v]);
      if (stats) sums.add(V::rounded(value[v], static_cast<D*>(nullptr)));
    }
    V::template store_step<false>(target + i, value);
  }
  if (stats) sums.into(stats);
  sum_rows_generic<S, D>(source + whole, num_rows, row_stride, target + whole, n - whole, args, stats);
}

template <typename S, typename D>
void copy(const void* src, void* dst, int64_t n, const CopyArgs& args, Stats* stats) {
  if constexpr (std::is_same_v<S, D>) {
    copy_same<S>(src, dst, n, args, stats);
  } else if constexpr (std::is_same_v<Compute<S, D>, double>) {
    copy_generic<S, D>(src, dst, n, args, stats);
  } else {
    copy_vectors<S, D>(src, dst, n, args, stats);
  }
}

template <typename S, typename D>
void sum_rows(const void* rows, int64_t num_rows, int64_t row_stride, void* dst, int64_t n, const CopyArgs& args,
              Stats* stats) {
  if constexpr (std::is_same_v<Compute<S, D>, double>) {
    sum_rows_generic<S, D>(rows, num_rows, row_stride, dst, n, args, stats);
  } else {
    sum_rows_vectors<S, D>(rows, num_rows, row_stride, dst, n, args, stats);
  }
}

#define MOE_ZERO_ROW(FN, S) {FN<S, double>, FN<S, float>, FN<S, Half>, FN<S, BFloat16>}
#define MOE_ZERO_PAIRS(FN) \
  {MOE_ZERO_ROW(FN, double), MOE_ZERO_ROW(FN, float), MOE_ZERO_ROW(FN, Half), MOE_ZERO_ROW(FN, BFloat16)}
