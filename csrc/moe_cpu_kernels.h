// Bodies of MoeKernels over vectors L. Included once per instruction set, inside its namespace and target options.

// Sums are in registers only if the bodies of loops are expanded where they stand.
#if defined(__GNUC__)
#define MOE_ZERO_INLINE __attribute__((always_inline))
#else
#define MOE_ZERO_INLINE
#endif

// Calls body(index, lanes) over [0, n); `lanes` is the constant L::kLanes but for the rest at the end.
template <class L, class Body>
inline MOE_ZERO_INLINE void for_lanes(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + L::kLanes <= n; i += L::kLanes) body(i, std::integral_constant<int64_t, L::kLanes>());
  if (i < n) body(i, n - i);
}

template <class L>
typename L::F load(const typename L::T* p, std::integral_constant<int64_t, L::kLanes>) {
  return L::load(p);
}
template <class L>
typename L::F load(const typename L::T* p, int64_t lanes) {
  return L::load(p, lanes);
}
template <class L>
void store(typename L::T* p, typename L::F value, std::integral_constant<int64_t, L::kLanes>) {
  L::store(p, value);
}
template <class L>
void store(typename L::T* p, typename L::F value, int64_t lanes) {
  L::store(p, value, lanes);
}

// A block of M x N sums stays in registers while both operands are read once. Rows are summed in parts and those in
// fp64, so that rounding errors hardly grow with the length.
template <class L, int M, int N, class T = typename L::T>
void dot_block(const T* a, int64_t lda, const T* b, int64_t ldb, int64_t n, T* out, int64_t ldo) {
  constexpr int64_t kPart = 512;
  double totals[M][N] = {};
  for (int64_t begin = 0; begin < n; begin += kPart) {
    typename L::F sums[M][N];
    for (auto& row : sums) {
      for (auto& sum : row) sum = L::set(0);
    }
    for_lanes<L>(std::min(kPart, n - begin), [&](int64_t i, auto lanes) MOE_ZERO_INLINE {
      const int64_t d = begin + i;
      typename L::F right[N];
      for (int j = 0; j < N; ++j) right[j] = load<L>(b + j * ldb + d, lanes);
      for (int i = 0; i < M; ++i) {
        const typename L::F left = load<L>(a + i * lda + d, lanes);
        for (int j = 0; j < N; ++j) sums[i][j] = L::fma(left, right[j], sums[i][j]);
      }
    });
    for (int i = 0; i < M; ++i) {
      for (int j = 0; j < N; ++j) totals[i][j] += L::sum(sums[i][j]);
    }
  }
  for (int i = 0; i < M; ++i) {
    for (int j = 0; j < N; ++j) out[i * ldo + j] = static_cast<T>(totals[i][j]);
  }
}

// Calls body(integral constant m) for the m rows, 1 to kMax, that are left.
template <int kMax, class Body>
void for_rows(int64_t rows, const Body& body) {
  if constexpr (kMax > 1) {
    if (rows < kMax) return for_rows<kMax - 1>(rows, body);
  }
  body(std::integral_constant<int, kMax>());
}

template <class L, class T = typename L::T>
void dot_rows(const T* a, int64_t lda, int64_t rows_a, const T* b, int64_t ldb, int64_t rows_b, int64_t n, T* out,
              int64_t ldo) {
  for (int64_t j = 0; j < rows_b; j += L::kCols) {
    for (int64_t i = 0; i < rows_a; i += L::kRows) {
      for_rows<L::kRows>(rows_a - i, [&](auto m) {
        for_rows<L::kCols>(rows_b - j, [&](auto k) {
          dot_block<L, m(), k()>(a + i * lda, lda, b + j * ldb, ldb, n, out + i * ldo + j, ldo);
        });
      });
    }
  }
}

template <class L, int M, int S, class Lanes, class T = typename L::T>
void outer_block(const T* coefficients, int64_t row_step, int64_t term_step, int64_t terms, const T* b, int64_t ldb,
                 T* out, int64_t ldo, Lanes last, bool accumulate) {
  typename L::F sums[M][S];
  const auto each = [&](const auto& body) MOE_ZERO_INLINE {
    for (int s = 0; s + 1 < S; ++s) body(s, std::integral_constant<int64_t, L::kLanes>());
    body(S - 1, last);
  };
  for (int i = 0; i < M; ++i) {
    each([&](int s, auto lanes) MOE_ZERO_INLINE {
      sums[i][s] = accumulate ? load<L>(out + i * ldo + s * L::kLanes, lanes) : L::set(0);
    });
  }
  for (int64_t e = 0; e < terms; ++e) {
    typename L::F right[S];
    each([&](int s, auto lanes) MOE_ZERO_INLINE { right[s] = load<L>(b + e * ldb + s * L::kLanes, lanes); });
    for (int i = 0; i < M; ++i) {
      const typename L::F left = L::set(coefficients[i * row_step + e * term_step]);
      for (int s = 0; s < S; ++s) sums[i][s] = L::fma(left, right[s], sums[i][s]);
    }
  }
  for (int i = 0; i < M; ++i) {
    each([&](int s, auto lanes) MOE_ZERO_INLINE { store<L>(out + i * ldo + s * L::kLanes, sums[i][s], lanes); });
  }
}

template <class L, class T = typename L::T>
void outer_rows(const T* coefficients, int64_t row_step, int64_t term_step, int64_t rows, int64_t terms, const T* b,
                int64_t ldb, int64_t n, T* out, int64_t ldo, bool accumulate) {
  constexpr int64_t kStrip = L::kCols * L::kLanes;
  for (int64_t d = 0; d < n; d += kStrip) {
    const int64_t left = std::min<int64_t>(kStrip, n - d);
    for (int64_t i = 0; i < rows; i += L::kRows) {
      for_rows<L::kRows>(rows - i, [&](auto m) {
        const T* c = coefficients + i * row_step;
        T* target = out + i * ldo + d;
        if (left == kStrip) {
          constexpr std::integral_constant<int64_t, L::kLanes> whole;
          outer_block<L, m(), L::kCols>(c, row_step, term_step, terms, b + d, ldb, target, ldo, whole, accumulate);
          return;
        }
        for (int64_t s = 0; s < left; s += L::kLanes) {
          outer_block<L, m(), 1>(c, row_step, term_step, terms, b + d + s, ldb, target + s, ldo,
                                 std::min<int64_t>(L::kLanes, left - s), accumulate);
        }
      });
    }
  }
}

template <class L, class T = typename L::T>
void scale(const T* x, T factor, int64_t n, T* out) {
  const auto f = L::set(factor);
  for_lanes<L>(n, [&](int64_t i, auto lanes) MOE_ZERO_INLINE { store<L>(out + i, L::mul(load<L>(x + i, lanes), f), lanes); });
}

template <class L, class T = typename L::T>
void add_scaled(const T* x, T factor, int64_t n, T* out) {
  const auto f = L::set(factor);
  for_lanes<L>(n, [&](int64_t i, auto lanes) MOE_ZERO_INLINE {
    store<L>(out + i, L::fma(load<L>(x + i, lanes), f, load<L>(out + i, lanes)), lanes);
  });
}

template <class L, class T = typename L::T>
T dot(const T* a, const T* b, int64_t n) {
  T out;
  dot_block<L, 1, 1>(a, 0, b, 0, n, &out, 0);
  return out;
}

template <class L, class T = typename L::T>
T exp_shifted(T* x, T shift, int64_t n) {
  const auto s = L::set(shift);
  T total = 0;
  for_lanes<L>(n, [&](int64_t i, auto lanes) MOE_ZERO_INLINE {
    store<L>(x + i, L::exp(L::sub(load<L>(x + i, lanes), s)), lanes);
    total += L::sum(load<L>(x + i, lanes));  // lanes beyond the end are 0 again
  });
  return total;
}

template <class L, class T = typename L::T>
void moments(const T* x, int64_t n, T* mean, T* variance) {
  auto sum = L::set(0), squares = L::set(0);
  for_lanes<L>(n, [&](int64_t i, auto lanes) MOE_ZERO_INLINE { sum = L::add(sum, load<L>(x + i, lanes)); });
  *mean = L::sum(sum) / static_cast<T>(n);
  const auto m = L::set(*mean);
  T rest = 0;
  for_lanes<L>(n, [&](int64_t i, auto lanes) MOE_ZERO_INLINE {
    if constexpr (std::is_same_v<decltype(lanes), int64_t>) {
      for (int64_t j = 0; j < lanes; ++j) rest += (x[i + j] - *mean) * (x[i + j] - *mean);
    } else {
      const auto centred = L::sub(L::load(x + i), m);
      squares = L::fma(centred, centred, squares);
    }
  });
  *variance = (L::sum(squares) + rest) / static_cast<T>(n);
}

template <class L, class T = typename L::T>
void normalize(const T* x, T mean, T rstd, const T* weight, const T* bias, int64_t n, T* out) {
  const auto m = L::set(mean), r = L::set(rstd);
  for_lanes<L>(n, [&](int64_t i, auto lanes) MOE_ZERO_INLINE {
    const auto unit = L::mul(L::sub(load<L>(x + i, lanes), m), r);
    const auto w = load<L>(weight + i, lanes);
    store<L>(out + i, bias ? L::fma(unit, w, load<L>(bias + i, lanes)) : L::mul(unit, w), lanes);
  });
}

template <class L, class T = typename L::T>
void normalize_backward(const T* grad, const T* x, T mean, T rstd, const T* weight, int64_t n, T* out, T* weight_grad,
                        T* bias_grad) {
  const auto m = L::set(mean), r = L::set(rstd);
  auto sum = L::set(0), product = L::set(0);
  for_lanes<L>(n, [&](int64_t i, auto lanes) MOE_ZERO_INLINE {
    const auto g = load<L>(grad + i, lanes);
    const auto unit = L::mul(L::sub(load<L>(x + i, lanes), m), r);  // of lanes beyond the end, a factor of g = 0
    const auto contribution = L::mul(g, unit);
    store<L>(weight_grad + i, L::add(load<L>(weight_grad + i, lanes), contribution), lanes);
    store<L>(bias_grad + i, L::add(load<L>(bias_grad + i, lanes), g), lanes);
    const auto w = load<L>(weight + i, lanes);
    sum = L::fma(g, w, sum);
    product = L::fma(contribution, w, product);
  });
  const auto mean_sum = L::set(L::sum(sum) / static_cast<T>(n));
  const auto mean_product = L::set(L::sum(product) / static_cast<T>(n));
  for_lanes<L>(n, [&](int64_t i, auto lanes) MOE_ZERO_INLINE {
    const auto unit = L::mul(L::sub(load<L>(x + i, lanes), m), r);
    const auto g = L::mul(load<L>(grad + i, lanes), load<L>(weight + i, lanes));
    store<L>(out + i, L::mul(r, L::sub(L::sub(g, mean_sum), L::mul(unit, mean_product))), lanes);
  });
}

// gelu(x) = x * cdf(x) and its derivative, for one vector.
template <class L, bool kTanh, bool kDerivative, class F = typename L::F>
F gelu_cdf(F x, std::type_identity_t<F>* derivative) {
  if constexpr (kTanh) {
    // (1 + tanh(u)) / 2 = 1 / (1 + e^(-2u)), which loses no digits where tanh is close to -1.
    constexpr double kSlope = 1.5957691216057307, kCubic = 0.044715;  // 2 sqrt(2 / pi)
    const F square = L::mul(x, x);
    const F twice_u = L::mul(L::mul(x, L::set(kSlope)), L::fma(square, L::set(kCubic), L::set(1)));
    const F cdf = L::div(L::set(1), L::add(L::set(1), L::exp(L::sub(L::set(0), twice_u))));
    if constexpr (kDerivative) {
      const F slope = L::mul(L::set(kSlope), L::fma(square, L::set(3 * kCubic), L::set(1)));
      *derivative = L::fma(L::mul(x, slope), L::mul(cdf, L::sub(L::set(1), cdf)), cdf);
    }
    return cdf;
  } else {
    F density;
    const F cdf = L::normal_cdf(x, &density);
    if constexpr (kDerivative) *derivative = L::fma(x, density, cdf);
    return cdf;
  }
}

template <class L, bool kTanh, class T = typename L::T>
void gelu_of(const T* x, const T* bias, int64_t n, T* pre, T* out) {
  for_lanes<L>(n, [&](int64_t i, auto lanes) MOE_ZERO_INLINE {
    auto value = load<L>(x + i, lanes);
    if (bias) value = L::add(value, load<L>(bias + i, lanes));
    if (pre) store<L>(pre + i, value, lanes);
    store<L>(out + i, L::mul(value, gelu_cdf<L, kTanh, false>(value, nullptr)), lanes);
  });
}

template <class L, class T = typename L::T>
void gelu(const T* x, const T* bias, int64_t n, bool tanh, T* pre, T* out) {
  tanh ? gelu_of<L, true>(x, bias, n, pre, out) : gelu_of<L, false>(x, bias, n, pre, out);
}

template <class L, bool kTanh, class T = typename L::T>
T gelu_backward_of(const T* grad, const T* pre, T factor, int64_t n, T* act, T* grad_pre, T* bias_grad) {
  const auto f = L::set(factor);
  auto products = L::set(0);
  for_lanes<L>(n, [&](int64_t i, auto lanes) MOE_ZERO_INLINE {
    const auto x = load<L>(pre + i, lanes), g = load<L>(grad + i, lanes);
    typename L::F derivative;
    const auto value = L::mul(x, gelu_cdf<L, kTanh, true>(x, &derivative));
    products = L::fma(g, value, products);
    if (act) store<L>(act + i, L::mul(value, f), lanes);
    const auto result = L::mul(L::mul(g, derivative), f);
    store<L>(grad_pre + i, result, lanes);
    if (bias_grad) store<L>(bias_grad + i, L::add(load<L>(bias_grad + i, lanes), result), lanes);
  });
  return L::sum(products);
}

template <class L, class T = typename L::T>
T gelu_backward(const T* grad, const T* pre, T factor, int64_t n, bool tanh, T* act, T* grad_pre, T* bias_grad) {
  return tanh ? gelu_backward_of<L, true>(grad, pre, factor, n, act, grad_pre, bias_grad)
              : gelu_backward_of<L, false>(grad, pre, factor, n, act, grad_pre, bias_grad);
}

template <class L>
constexpr MoeKernels<typename L::T> kernels_of() {
  return {dot_rows<L>, outer_rows<L>, scale<L>,     add_scaled<L>,         dot<L>,  exp_shifted<L>,
          moments<L>,  normalize<L>,  normalize_backward<L>, gelu<L>, gelu_backward<L>};
}
