// CPU backend of the flat buffer, free of torch: the caller brings the pointers and the parallel loop.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "flat_copy.h"
#include "flat_plan.h"
#include "flat_table.h"
#include "tensor_view.h"

namespace moe_zero {

// Copies n elements that lie densely on both sides.
using CopyFn = void (*)(const void* src, void* dst, int64_t n, const CopyArgs& args, Stats* stats);
// dst[i] = scale * sum over r of rows[r * row_stride + i], (+ dst[i]).
using SumRowsFn = void (*)(const void* rows, int64_t num_rows, int64_t row_stride, void* dst, int64_t n,
                           const CopyArgs& args, Stats* stats);

// One instruction set; the arrays are indexed by DType of source and destination.
struct CpuKernels {
  const char* name;
  CopyFn copy[4][4];
  SumRowsFn sum_rows[4][4];
};

extern const CpuKernels kPlainKernels;
#if defined(__x86_64__) && defined(__GNUC__)
#define MOE_ZERO_X86_KERNELS 1
extern const CpuKernels kAvx2Kernels;
extern const CpuKernels kAvx512Kernels;
#endif

// The best set that this processor has, or the one forced by select_cpu_kernels.
const CpuKernels& cpu_kernels();
// nullptr or "auto": back to the best. False if the name is unknown or the processor lacks it.
bool select_cpu_kernels(const char* name);

// Runs body(begin, end) over [0, n) in parallel pieces of at least `grain`.
using ParallelFor = void (*)(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

void pack_cpu(const Table& table, const TensorView* tensors, void* flat, double scale, Stats* stats, ParallelFor loop);
void unpack_cpu(const Table& table, const TensorView* tensors, const void* flat, bool accumulate, ParallelFor loop);
void sum_rows_cpu(const void* rows, DType rows_dtype, int64_t num_rows, int64_t row_numel, void* out, DType out_dtype,
                  double scale, bool accumulate, Stats* stats, ParallelFor loop);

}  // namespace moe_zero
