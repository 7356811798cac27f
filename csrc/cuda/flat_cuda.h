// Launchers of the CUDA kernels, on raw pointers and a stream. Free of torch, so that the .cu file compiles fast.
#pragma once

#include <cstdint>

#include "flat_copy.h"
#include "flat_plan.h"
#include "flat_table.h"
#include "tensor_view.h"

namespace moe_zero {

struct CudaPlan {
  int device;
  void* stream;
  const TablePiece* pieces;  // in device memory
  const Tile* tiles;         // in device memory
  int64_t num_tiles;
};

// Where the sums of a call go; `partial` has room for two doubles for each thread block.
struct CudaStats {
  double* partial = nullptr;
  void* out = nullptr;
  DType out_dtype = DType::kFloat64;
};

// Each returns nullptr, or the CUDA runtime's description of what went wrong with the launch.
const char* pack_cuda(const CudaPlan& plan, const TensorView* tensors, int64_t num_tensors, void* flat, double scale,
                      const CudaStats& stats);
const char* unpack_cuda(const CudaPlan& plan, const TensorView* tensors, int64_t num_tensors, const void* flat,
                        bool accumulate);
const char* sum_rows_cuda(int device, void* stream, const void* rows, DType rows_dtype, int64_t num_rows,
                          int64_t row_numel, void* out, DType out_dtype, double scale, bool accumulate,
                          const CudaStats& stats);

}  // namespace moe_zero
