// The portable kernels (any processor; on ARM the compiler vectorises them for NEON), and the choice at run time.
#include "flat_cpu.h"

#include <atomic>
#include <cstring>

namespace moe_zero {
namespace plain {

#include "flat_cpu_generic.h"

}  // namespace plain

#define ROW(FN, S) {plain::FN<S, double>, plain::FN<S, float>, plain::FN<S, Half>, plain::FN<S, BFloat16>}
#define PAIRS(FN) {ROW(FN, double), ROW(FN, float), ROW(FN, Half), ROW(FN, BFloat16)}

const CpuKernels kPlainKernels = {"plain", PAIRS(copy_generic), PAIRS(sum_rows_generic)};

namespace {

bool supported(const CpuKernels& kernels) {
#ifdef MOE_ZERO_X86_KERNELS
  __builtin_cpu_init();
  if (&kernels == &kAvx2Kernels) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  }
  if (&kernels == &kAvx512Kernels) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
#endif
  return &kernels == &kPlainKernels;
}

// From the best to the plainest.
const CpuKernels* const kAll[] = {
#ifdef MOE_ZERO_X86_KERNELS
    &kAvx512Kernels,
    &kAvx2Kernels,
#endif
    &kPlainKernels,
};

const CpuKernels& best() {
  for (const CpuKernels* kernels : kAll) {
    if (supported(*kernels)) return *kernels;
  }
  return kPlainKernels;
}

std::atomic<const CpuKernels*> selected{nullptr};

}  // namespace

const CpuKernels& cpu_kernels() {
  const CpuKernels* kernels = selected.load(std::memory_order_relaxed);
  if (!kernels) {
    kernels = &best();
    selected.store(kernels, std::memory_order_relaxed);
  }
  return *kernels;
}

bool select_cpu_kernels(const char* name) {
  if (!name || strcmp(name, "auto") == 0) {
    selected.store(&best(), std::memory_order_relaxed);
    return true;
  }
  for (const CpuKernels* kernels : kAll) {
    if (strcmp(kernels->name, name) == 0 && supported(*kernels)) {
      selected.store(kernels, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

}  // namespace moe_zero
