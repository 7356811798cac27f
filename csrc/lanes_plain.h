// Short arrays that compilers turn into whatever vectors the processor has, for the experts' kernels in fp64 and where
// there are no others. Included inside the namespace of an instruction set, see moe_cpu_plain.cpp.

template <typename Float>
struct PlainLanes {
  using T = Float;
  static constexpr int64_t kLanes = 32 / sizeof(T);
  static constexpr int kRows = 2, kCols = 2;

  struct F {
    T lane[kLanes];
  };

  template <typename Function>
  static F map(const Function& function) {
    F out;
    for (int64_t i = 0; i < kLanes; ++i) out.lane[i] = function(i);
    return out;
  }

  static F set(T value) { return map([&](int64_t) { return value; }); }
  static F load(const T* p) { return map([&](int64_t i) { return p[i]; }); }
  static F load(const T* p, int64_t n) { return map([&](int64_t i) { return i < n ? p[i] : T(0); }); }
  static void store(T* p, F value) { store(p, value, kLanes); }
  static void store(T* p, F value, int64_t n) {
    for (int64_t i = 0; i < n; ++i) p[i] = value.lane[i];
  }

  static F add(F a, F b) { return map([&](int64_t i) { return a.lane[i] + b.lane[i]; }); }
  static F sub(F a, F b) { return map([&](int64_t i) { return a.lane[i] - b.lane[i]; }); }
  static F mul(F a, F b) { return map([&](int64_t i) { return a.lane[i] * b.lane[i]; }); }
  static F div(F a, F b) { return map([&](int64_t i) { return a.lane[i] / b.lane[i]; }); }
  static F fma(F a, F b, F c) { return map([&](int64_t i) { return a.lane[i] * b.lane[i] + c.lane[i]; }); }
  static T sum(F a) {
    T total = 0;
    for (int64_t i = 0; i < kLanes; ++i) total += a.lane[i];
    return total;
  }

  static F exp(F x) { return map([&](int64_t i) { return std::exp(x.lane[i]); }); }
  static F normal_cdf(F x, F* density) {
    *density = map([&](int64_t i) { return T(0.39894228040143267794) * std::exp(T(-0.5) * x.lane[i] * x.lane[i]); });
    return map([&](int64_t i) { return T(0.5) * std::erfc(x.lane[i] * T(-0.70710678118654752440)); });
  }
};

using FloatLanes = PlainLanes<float>;
using DoubleLanes = PlainLanes<double>;
