#include "flat_cpu.h"
#ifdef MOE_ZERO_X86_KERNELS
namespace moe_zero { const CpuKernels kAvx2Kernels = kPlainKernels; }
#endif
