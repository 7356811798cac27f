// Vectors of 8 floats, for the experts' kernels. Included inside the namespace and target options of an instruction
// set, see moe_cpu_avx2.cpp.

struct FloatLanes {
  using T = float;
  using F = __m256;
  static constexpr int64_t kLanes = 8;
  static constexpr int kRows = 2, kCols = 4;  // 8 sums and their operands in 16 registers

  static F set(float value) { return _mm256_set1_ps(value); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static F load(const float* p, int64_t n) { return _mm256_maskload_ps(p, mask(n)); }
  static void store(float* p, F value) { _mm256_storeu_ps(p, value); }
  static void store(float* p, F value, int64_t n) { _mm256_maskstore_ps(p, mask(n), value); }

  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F abs(F a) { return _mm256_andnot_ps(set(-0.0f), a); }
  static F if_negative(F sign, F yes, F no) { return _mm256_blendv_ps(no, yes, sign); }
  static float sum(F a) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }

  // The second operand of max and min is the result when the first is NaN or both are equal: NaN passes through.
  static F clamp(F x, float low, float high) { return _mm256_min_ps(set(high), _mm256_max_ps(set(low), x)); }
  static F round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // In two factors, since 2^exponent alone may be outside of the normal numbers where the product is not.
  static F times_power_of_two(F x, F exponent) {
    const __m256i whole = _mm256_cvtps_epi32(exponent);
    const __m256i half = _mm256_srai_epi32(whole, 1);
    return mul(mul(x, power(half)), power(_mm256_sub_epi32(whole, half)));
  }

 private:
  static F power(__m256i exponent) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23));
  }
  static __m256i mask(int64_t n) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), lane);
  }
};
