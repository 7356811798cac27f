// AVX-512 kernels (F, BW, DQ, VL).
#include "flat_cpu.h"

#ifdef MOE_ZERO_X86_KERNELS
#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
// To the end of the file: templates get the options that hold where they are instantiated.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarms inside of the compiler's own intrinsics
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif

namespace moe_zero {
namespace avx512 {

#include "flat_cpu_generic.h"

struct V {
  using F = __m512;
  static constexpr int64_t kLanes = 16;

  static F set(float value) { return _mm512_set1_ps(value); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }

  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static F load(const BFloat16* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }

  static __m256i narrow(F value, Half*) {
    return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // Not vcvtneps2bf16: that instruction flushes denormals to zero.
  static __m256i narrow(F value, BFloat16*) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
  }

  static F rounded(F value, float*) { return value; }
  static F rounded(F value, Half* tag) { return _mm512_cvtph_ps(narrow(value, tag)); }
  static F rounded(F value, BFloat16* tag) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(value, tag)), 16));
  }

  template <bool kStream>
  static void store_step(float* p, const F (&value)[2]) {
    for (int v = 0; v < 2; ++v) kStream ? _mm512_stream_ps(p + 16 * v, value[v]) : _mm512_storeu_ps(p + 16 * v, value[v]);
  }
  template <bool kStream, typename D>
  static void store_step(D* p, const F (&value)[2]) {
    const __m512i line =
        _mm512_inserti64x4(_mm512_castsi256_si512(narrow(value[0], p)), narrow(value[1], p), 1);
    kStream ? _mm512_stream_si512(reinterpret_cast<__m512i*>(p), line) : _mm512_storeu_si512(p, line);
  }

  using Sum = __m512d;
  static Sum zero_sum() { return _mm512_setzero_pd(); }
  static Sum add_squares(Sum sum, F value) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(value));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, 1));
    return _mm512_fmadd_pd(high, high, _mm512_fmadd_pd(low, low, sum));
  }
  static double total(Sum sum) { return _mm512_reduce_add_pd(sum); }
  using I = __m512i;
  static I zero_bits() { return _mm512_setzero_si512(); }
  static I max_magnitude(I largest, F value) {
    return _mm512_max_epu32(largest, _mm512_and_si512(_mm512_castps_si512(value), _mm512_set1_epi32(0x7fffffff)));
  }
  static bool all_finite(I largest) { return _mm512_reduce_max_epu32(largest) < 0x7f800000; }

  static void fence() { _mm_sfence(); }
  static void stream_bytes(const char* source, char* target, int64_t bytes) {
    const int64_t head = std::min<int64_t>(bytes, (64 - reinterpret_cast<uintptr_t>(target) % 64) % 64);
    memcpy(target, source, head);
    int64_t i = head;
    for (; i + 64 <= bytes; i += 64) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(target + i), _mm512_loadu_si512(source + i));
    }
    _mm_sfence();
    memcpy(target + i, source + i, bytes - i);
  }
};

#include "flat_cpu_simd.h"

}  // namespace avx512

const CpuKernels kAvx512Kernels = {"avx512", MOE_ZERO_PAIRS(avx512::copy), MOE_ZERO_PAIRS(avx512::sum_rows)};

}  // namespace moe_zero

#ifdef __clang__
#pragma clang attribute pop
#endif
#endif  // MOE_ZERO_X86_KERNELS
