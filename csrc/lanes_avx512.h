// Vectors of 16 floats, for the experts' kernels (F, BW, DQ, VL). Included inside the namespace and target options of
// an instruction set, see moe_cpu_avx512.cpp.

struct FloatLanes {
  using T = float;
  using F = __m512;
  static constexpr int64_t kLanes = 16;
  static constexpr int kRows = 4, kCols = 4;  // 16 sums and their operands in 32 registers

  static F set(float value) { return _mm512_set1_ps(value); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(mask(n), p); }
  static void store(float* p, F value) { _mm512_storeu_ps(p, value); }
  static void store(float* p, F value, int64_t n) { _mm512_mask_storeu_ps(p, mask(n), value); }

  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F abs(F a) { return _mm512_abs_ps(a); }
  static F if_negative(F sign, F yes, F no) { return _mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(sign)), no, yes); }
  static float sum(F a) { return _mm512_reduce_add_ps(a); }

  // The second operand of max and min is the result when the first is NaN or both are equal: NaN passes through.
  static F clamp(F x, float low, float high) { return _mm512_min_ps(set(high), _mm512_max_ps(set(low), x)); }
  static F round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F times_power_of_two(F x, F exponent) { return _mm512_scalef_ps(x, exponent); }

 private:
  static __mmask16 mask(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
};
