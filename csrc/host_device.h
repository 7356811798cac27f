// Marks functions that run on the host and on CUDA devices.
#pragma once

#if defined(__CUDACC__)
#define MOE_ZERO_HD __host__ __device__ __forceinline__
#else
#define MOE_ZERO_HD inline
#endif

#if defined(__CUDA_ARCH__)
#define MOE_ZERO_UNROLL _Pragma("unroll")
#else
#define MOE_ZERO_UNROLL
#endif
