// AVX2 kernels (with FMA and F16C, which every such processor has).
#include "flat_cpu.h"

#ifdef MOE_ZERO_X86_KERNELS
#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
// To the end of the file: templates get the options that hold where they are instantiated.
#pragma GCC target("avx2,fma,f16c")
#endif

namespace moe_zero {
namespace avx2 {

#include "flat_cpu_generic.h"

struct V {
  using F = __m256;
  static constexpr int64_t kLanes = 8;

  static F set(float value) { return _mm256_set1_ps(value); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }

  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static F load(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static F load(const BFloat16* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }

  static __m128i narrow(F value, Half*) {
    return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static __m128i narrow(F value, BFloat16*) {
    const __m256i kept = _mm256_srli_epi32(rounded_bits(value), 16);
    const __m256i packed = _mm256_packus_epi32(kept, kept);  // within each 128-bit half
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000));
  }

  static F rounded(F value, float*) { return value; }
  static F rounded(F value, Half* tag) { return _mm256_cvtph_ps(narrow(value, tag)); }
  static F rounded(F value, BFloat16*) {
    return _mm256_castsi256_ps(_mm256_and_si256(rounded_bits(value), _mm256_set1_epi32(static_cast<int>(0xffff0000))));
  }

  template <bool kStream>
  static void store_step(float* p, const F (&value)[4]) {
    for (int v = 0; v < 4; ++v) kStream ? _mm256_stream_ps(p + 8 * v, value[v]) : _mm256_storeu_ps(p + 8 * v, value[v]);
  }
  template <bool kStream, typename D>
  static void store_step(D* p, const F (&value)[4]) {
    for (int v = 0; v < 4; v += 2) {
      const __m256i half_line = _mm256_set_m128i(narrow(value[v + 1], p), narrow(value[v], p));
      __m256i* out = reinterpret_cast<__m256i*>(p + 8 * v);
      kStream ? _mm256_stream_si256(out, half_line) : _mm256_storeu_si256(out, half_line);
    }
  }

  struct Sum {
    __m256d low, high;
  };
  static Sum zero_sum() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }
  static Sum add_squares(Sum sum, F value) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(value));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1));
    return {_mm256_fmadd_pd(low, low, sum.low), _mm256_fmadd_pd(high, high, sum.high)};
  }
  static double total(Sum sum) {
    alignas(32) double lanes[4];
    _mm256_store_pd(lanes, _mm256_add_pd(sum.low, sum.high));
    return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  }
  using I = __m256i;
  static I zero_bits() { return _mm256_setzero_si256(); }
  static I max_magnitude(I largest, F value) {
    return _mm256_max_epu32(largest, _mm256_and_si256(_mm256_castps_si256(value), _mm256_set1_epi32(0x7fffffff)));
  }
  static bool all_finite(I largest) {
    return _mm256_movemask_epi8(_mm256_cmpgt_epi32(largest, _mm256_set1_epi32(0x7f7fffff))) == 0;
  }

  static void fence() { _mm_sfence(); }
  static void stream_bytes(const char* source, char* target, int64_t bytes) {
    const int64_t head = std::min<int64_t>(bytes, (64 - reinterpret_cast<uintptr_t>(target) % 64) % 64);
    memcpy(target, source, head);
    int64_t i = head;
    for (; i + 64 <= bytes; i += 64) {
      for (int64_t half = 0; half < 64; half += 32) {
        const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i + half));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(target + i + half), value);
      }
    }
    _mm_sfence();
    memcpy(target + i, source + i, bytes - i);
  }

 private:
  // The bfloat16 in the upper 16 bits of each lane.
  static __m256i rounded_bits(F value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, quiet, nan);
  }
};

#include "flat_cpu_simd.h"

}  // namespace avx2

const CpuKernels kAvx2Kernels = {"avx2", MOE_ZERO_PAIRS(avx2::copy), MOE_ZERO_PAIRS(avx2::sum_rows)};

}  // namespace moe_zero

#ifdef __clang__
#pragma clang attribute pop
#endif
#endif  // MOE_ZERO_X86_KERNELS
