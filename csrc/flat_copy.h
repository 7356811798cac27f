// The copy of one element and of one run of elements, the same for host and device.
//
// Arithmetic (scale, accumulation, sums) is in fp32, or in fp64 as soon as the source or the destination is fp64;
// the result is rounded once, to nearest even. An fp64 value reaches a 16-bit type through fp32, as in PyTorch.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "host_device.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#endif

namespace moe_zero {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

template <typename S, typename D>
using Compute = std::conditional_t<std::is_same_v<S, double> || std::is_same_v<D, double>, double, float>;

MOE_ZERO_HD uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

MOE_ZERO_HD float bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

MOE_ZERO_HD float widen(BFloat16 value) { return bits_float(static_cast<uint32_t>(value.bits) << 16); }
MOE_ZERO_HD float widen(float value) { return value; }
MOE_ZERO_HD double widen(double value) { return value; }

MOE_ZERO_HD float widen(Half value) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(value.bits));
#else
  // Shifting the half's exponent and mantissa into place leaves the exponent 112 too low; a multiplication by 2^112
  // repairs it for normal and denormal numbers alike. Inf and NaN have the largest exponent and get it set.
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fff) << 13;
  if (magnitude >= 0x0f800000) return bits_float(sign | magnitude | 0x7f800000);
  return bits_float(sign | float_bits(bits_float(magnitude) * 0x1p112f));
#endif
}

MOE_ZERO_HD void narrow(float value, float* out) { *out = value; }
MOE_ZERO_HD void narrow(float value, double* out) { *out = value; }
MOE_ZERO_HD void narrow(double value, double* out) { *out = value; }
MOE_ZERO_HD void narrow(double value, float* out) { *out = static_cast<float>(value); }

MOE_ZERO_HD void narrow(float value, BFloat16* out) {
  const uint32_t bits = float_bits(value);
  // Adding half of the last kept place, less one when that place is even, rounds to nearest even; a NaN would
  // overflow into infinity and is made quiet instead.
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  out->bits = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40 : rounded);
}

MOE_ZERO_HD void narrow(float value, Half* out) {
#if defined(__CUDA_ARCH__)
  out->bits = __half_as_ushort(__float2half_rn(value));
#else
  const uint32_t bits = float_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  // Denormal halves: an addition of 0.5 puts the value's last place at 2^-24, where the sum is rounded in hardware.
  const uint32_t denormal = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000;
  // Normal halves: as for bfloat16, with the exponent's bias moved from 127 to 15.
  const uint32_t normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 | ((magnitude >> 13) & 0x3ff) : 0x7c00;
  const uint32_t finite = magnitude < 0x38800000 ? denormal : normal;
  out->bits = static_cast<uint16_t>(sign | (magnitude >= 0x477ff000 ? special : finite));
#endif
}

MOE_ZERO_HD void narrow(double value, BFloat16* out) { narrow(static_cast<float>(value), out); }
MOE_ZERO_HD void narrow(double value, Half* out) { narrow(static_cast<float>(value), out); }

MOE_ZERO_HD bool is_finite(float value) { return (float_bits(value) & 0x7f800000) != 0x7f800000; }
MOE_ZERO_HD bool is_finite(double value) { return value - value == 0; }

// Sum of squares of what was written, and whether any of it was inf or NaN.
struct Stats {
  double sum_of_squares = 0;
  bool non_finite = false;

  template <typename T>
  MOE_ZERO_HD void add(T written) {
    const auto value = widen(written);
    const double wide = value;
    sum_of_squares += wide * wide;
    non_finite = non_finite || !is_finite(value);
  }

  MOE_ZERO_HD void merge(const Stats& other) {
    sum_of_squares += other.sum_of_squares;
    non_finite = non_finite || other.non_finite;
  }
};

// What happens to an element between the load and the store.
struct CopyArgs {
  double scale = 1;
  bool scaled = false;      // dst = src * scale
  bool accumulate = false;  // dst = dst + src
  bool stream = false;      // host only: store around the caches
};

template <typename S, typename D>
MOE_ZERO_HD D transform(S source, const D& previous, const CopyArgs& args) {
  using C = Compute<S, D>;
  D result;
  if constexpr (std::is_same_v<S, D>) {
    if (!args.scaled && !args.accumulate) return source;  // bit for bit, NaN payloads too
  }
  C value = static_cast<C>(widen(source));
  if (args.scaled) value *= static_cast<C>(args.scale);
  if (args.accumulate) value = static_cast<C>(widen(previous)) + value;
  narrow(value, &result);
  return result;
}

}  // namespace moe_zero
