#include "flat_cpu.h"
#ifdef MOE_ZERO_X86_KERNELS
namespace moe_zero { const CpuKernels kAvx512Kernels = kPlainKernels; }
#endif
