// CUDA kernels of the flat buffer: the thread blocks around the functions of flat_tiles.h.
//
// They sit at the limit of memory: every byte is read once and written once, in 16-byte accesses where both sides
// allow it.
#include "flat_cuda.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <type_traits>
#include <vector>

#include "flat_tiles.h"
#include "launch_words.h"

namespace moe_zero {
namespace {

// A launch's parameters may take 4 KB everywhere, and 32,764 bytes from CUDA 12.1 on (compute capability 7.0). The small
// form is cheaper to launch; the large one holds about 4,000 tensors, and beyond that there are several launches.
constexpr int kSmallWords = 480;
#if CUDART_VERSION >= 12010
constexpr int kLargeWords = 4060;
#else
constexpr int kLargeWords = kSmallWords;
#endif

// Thread blocks on a multiprocessor, at least: 512 threads with 64 bytes each in flight cover the latency of memory.
// Without the number, ptxas aims for more and spills registers for it.
constexpr int kBlocks = 2;

template <int kCapacity>
struct Launch {
  const TablePiece* pieces;
  const Tile* tiles;
  char* flat;
  double* partial;  // two doubles for each tile, or nullptr
  CopyArgs args;
  int64_t first_tensor;
  int64_t num_tensors;
  uint64_t words[kCapacity];
};

// Adds the block's sums in a fixed order and leaves them at `out`.
__device__ void reduce_block(const Stats& mine, double* out) {
  __shared__ double sums[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  const bool non_finite = __syncthreads_or(mine.non_finite) != 0;
  sums[thread] = mine.sum_of_squares;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) sums[thread] += sums[thread + half];
  }
  if (thread == 0) {
    out[0] = sums[0];
    out[1] = non_finite ? 1 : 0;
  }
}

template <int kCapacity, bool kStats>
__global__ void __launch_bounds__(kThreads, kBlocks) pack_kernel(const __grid_constant__ Launch<kCapacity> launch) {
  const int64_t tile = blockIdx.x;
  Stats stats;
  pack_tile(launch.pieces, launch.tiles, tile, static_cast<int>(threadIdx.x), launch.words, launch.first_tensor,
            launch.num_tensors, launch.flat, launch.args, kStats ? &stats : nullptr);
  if constexpr (kStats) {
    // A later launch must not wipe out the sums of an earlier one: only the launch that owns the tile writes.
    const int64_t tensor = launch.pieces[launch.tiles[tile].piece].tensor;
    const int64_t index = tensor - launch.first_tensor;
    if (tensor < 0 ? launch.first_tensor == 0 : index >= 0 && index < launch.num_tensors) {
      reduce_block(stats, launch.partial + 2 * tile);
    }
  }
}

template <int kCapacity>
__global__ void __launch_bounds__(kThreads, kBlocks) unpack_kernel(const __grid_constant__ Launch<kCapacity> launch) {
  unpack_tile(launch.pieces, launch.tiles, blockIdx.x, static_cast<int>(threadIdx.x), launch.words,
              launch.first_tensor, launch.num_tensors, launch.flat, launch.args);
}

template <typename S, typename D, bool kStats>
__global__ void __launch_bounds__(kThreads) sum_rows_kernel(const S* rows, int64_t num_rows, int64_t row_numel, D* out,
                                                            CopyArgs args, double* partial) {
  Stats stats;
  sum_rows_tile<S, D>(rows, num_rows, row_numel, out, blockIdx.x, static_cast<int>(threadIdx.x), args,
                      kStats ? &stats : nullptr);
  if constexpr (kStats) reduce_block(stats, partial + 2 * blockIdx.x);
}

// One block: the sums of all blocks, in the same order every time.
template <typename T>
__global__ void __launch_bounds__(kThreads) finish_stats_kernel(const double* partial, int64_t num_blocks, T* out) {
  __shared__ double result[2];
  Stats stats;
  for (int64_t i = threadIdx.x; i < num_blocks; i += kThreads) stats.merge(Stats{partial[2 * i], partial[2 * i + 1] != 0});
  reduce_block(stats, result);
  __syncthreads();
  if (threadIdx.x < 2) out[threadIdx.x] = static_cast<T>(result[threadIdx.x]);
}

// Makes `device` current for the calls of one function.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    cudaGetDevice(&previous_);
    changed_ = previous_ != device;
    if (changed_) cudaSetDevice(device);
  }
  ~DeviceScope() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

const char* last_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

void finish_stats(const CudaStats& stats, int64_t num_blocks, cudaStream_t stream) {
  if (stats.out_dtype == DType::kFloat64) {
    finish_stats_kernel<<<1, kThreads, 0, stream>>>(stats.partial, num_blocks, static_cast<double*>(stats.out));
  } else {
    finish_stats_kernel<<<1, kThreads, 0, stream>>>(stats.partial, num_blocks, static_cast<float*>(stats.out));
  }
}

// Calls body with a null pointer to the type.
template <typename Body>
void with_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat64: return body(static_cast<double*>(nullptr));
    case DType::kFloat32: return body(static_cast<float*>(nullptr));
    case DType::kFloat16: return body(static_cast<Half*>(nullptr));
    default: return body(static_cast<BFloat16*>(nullptr));
  }
}

enum class Direction { kPack, kUnpack };

template <Direction kDirection, int kCapacity>
void launch_words(const CudaPlan& plan, const std::vector<uint64_t>& words, int64_t first, int64_t count, char* flat,
                  const CopyArgs& args, double* partial) {
  Launch<kCapacity> launch;
  launch.pieces = plan.pieces;
  launch.tiles = plan.tiles;
  launch.flat = flat;
  launch.partial = partial;
  launch.args = args;
  launch.first_tensor = first;
  launch.num_tensors = count;
  memcpy(launch.words, words.data(), words.size() * sizeof(uint64_t));
  const auto grid = static_cast<unsigned>(plan.num_tiles);
  const auto stream = static_cast<cudaStream_t>(plan.stream);
  if constexpr (kDirection == Direction::kUnpack) {
    unpack_kernel<kCapacity><<<grid, kThreads, 0, stream>>>(launch);
  } else if (partial) {
    pack_kernel<kCapacity, true><<<grid, kThreads, 0, stream>>>(launch);
  } else {
    pack_kernel<kCapacity, false><<<grid, kThreads, 0, stream>>>(launch);
  }
}

template <Direction kDirection>
void launch_all(const CudaPlan& plan, const TensorView* tensors, int64_t num_tensors, char* flat, const CopyArgs& args,
                double* partial) {
  std::vector<uint64_t> words;
  int64_t first = 0;
  do {
    const int64_t count = fill_words(tensors, first, num_tensors, kLargeWords, &words);
    if (words.size() <= kSmallWords) {
      launch_words<kDirection, kSmallWords>(plan, words, first, count, flat, args, partial);
    } else {
      launch_words<kDirection, kLargeWords>(plan, words, first, count, flat, args, partial);
    }
    first += count;
  } while (first < num_tensors);
}

}  // namespace

const char* pack_cuda(const CudaPlan& plan, const TensorView* tensors, int64_t num_tensors, void* flat, double scale,
                      const CudaStats& stats) {
  const DeviceScope scope(plan.device);
  CopyArgs args;
  args.scale = scale;
  args.scaled = scale != 1;
  if (plan.num_tiles > 0) {
    launch_all<Direction::kPack>(plan, tensors, num_tensors, static_cast<char*>(flat), args, stats.partial);
  }
  if (stats.out) finish_stats(stats, plan.num_tiles, static_cast<cudaStream_t>(plan.stream));
  return last_error();
}

const char* unpack_cuda(const CudaPlan& plan, const TensorView* tensors, int64_t num_tensors, const void* flat,
                        bool accumulate) {
  const DeviceScope scope(plan.device);
  CopyArgs args;
  args.accumulate = accumulate;
  if (plan.num_tiles > 0) {
    // Only read; the parameter block is shared with pack.
    launch_all<Direction::kUnpack>(plan, tensors, num_tensors, static_cast<char*>(const_cast<void*>(flat)), args,
                                   nullptr);
  }
  return last_error();
}

const char* sum_rows_cuda(int device, void* stream, const void* rows, DType rows_dtype, int64_t num_rows,
                          int64_t row_numel, void* out, DType out_dtype, double scale, bool accumulate,
                          const CudaStats& stats) {
  const DeviceScope scope(device);
  CopyArgs args;
  args.scale = scale;
  args.scaled = scale != 1;
  args.accumulate = accumulate;
  const int64_t blocks = (row_numel + kSumRowsTile - 1) / kSumRowsTile;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (blocks > 0) {
    with_type(rows_dtype, [&](auto* rows_tag) {
      using S = std::remove_pointer_t<decltype(rows_tag)>;
      with_type(out_dtype, [&](auto* out_tag) {
        using D = std::remove_pointer_t<decltype(out_tag)>;
        const auto kernel = stats.partial ? sum_rows_kernel<S, D, true> : sum_rows_kernel<S, D, false>;
        kernel<<<static_cast<unsigned>(blocks), kThreads, 0, cuda_stream>>>(
            static_cast<const S*>(rows), num_rows, row_numel, static_cast<D*>(out), args, stats.partial);
      });
    });
  }
  if (stats.out) finish_stats(stats, blocks, cuda_stream);
  return last_error();
}

}  // namespace moe_zero
