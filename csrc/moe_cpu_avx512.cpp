// The experts' kernels for AVX-512 (F, BW, DQ, VL).
#include "flat_cpu.h"
#include "moe_cpu.h"

#ifdef MOE_ZERO_X86_KERNELS
#include <immintrin.h>

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
// To the end of the file: templates get the options that hold where they are instantiated.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarms inside of the compiler's own intrinsics
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif

namespace moe_zero {
namespace avx512 {

#include "lanes_avx512.h"
#include "lanes_math.h"
#include "moe_cpu_kernels.h"

}  // namespace avx512

extern const MoeKernels<float> kAvx512MoeKernels = avx512::kernels_of<avx512::FloatMathLanes>();

}  // namespace moe_zero

#ifdef __clang__
#pragma clang attribute pop
#endif
#endif  // MOE_ZERO_X86_KERNELS
