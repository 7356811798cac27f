// The experts' kernels for AVX2 (with FMA and F16C).
#include "flat_cpu.h"
#include "moe_cpu.h"

#ifdef MOE_ZERO_X86_KERNELS
#include <immintrin.h>

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
// To the end of the file: templates get the options that hold where they are instantiated.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarms inside of the compiler's own intrinsics
#pragma GCC target("avx2,fma,f16c")
#endif

namespace moe_zero {
namespace avx2 {

#include "lanes_avx2.h"
#include "lanes_math.h"
#include "moe_cpu_kernels.h"

}  // namespace avx2

extern const MoeKernels<float> kAvx2MoeKernels = avx2::kernels_of<avx2::FloatMathLanes>();

}  // namespace moe_zero

#ifdef __clang__
#pragma clang attribute pop
#endif
#endif  // MOE_ZERO_X86_KERNELS
