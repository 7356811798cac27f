// The experts' kernels in portable C++, and the choice at run time.
#include "moe_cpu.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "flat_cpu.h"

namespace moe_zero {
namespace plain {

#include "lanes_plain.h"
#include "moe_cpu_kernels.h"

constexpr MoeKernels<float> kFloat = kernels_of<FloatLanes>();
constexpr MoeKernels<double> kDouble = kernels_of<DoubleLanes>();

}  // namespace plain

#ifdef MOE_ZERO_X86_KERNELS
extern const MoeKernels<float> kAvx2MoeKernels;
extern const MoeKernels<float> kAvx512MoeKernels;
#endif

template <>
const MoeKernels<float>& moe_kernels<float>() {
#ifdef MOE_ZERO_X86_KERNELS
  if (&cpu_kernels() == &kAvx512Kernels) return kAvx512MoeKernels;
  if (&cpu_kernels() == &kAvx2Kernels) return kAvx2MoeKernels;
#endif
  return plain::kFloat;
}

template <>
const MoeKernels<double>& moe_kernels<double>() {
  return plain::kDouble;
}

}  // namespace moe_zero
