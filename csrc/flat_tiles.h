// The CUDA kernels' work, written as functions of (tile, thread) that run on the device and, in the tests, on the host
// block by block. One tile is what one thread block copies.
//
// A launch carries by value, in its parameters, what changes from call to call (addresses, dtypes, strides: "words");
// what a plan fixes (pieces, tiles) lies in device memory and is cached with the plan. So a launch needs no allocation,
// no copy and no synchronisation, and can be captured in a CUDA graph.
#pragma once

#include <cstdint>

#include "flat_copy.h"
#include "flat_table.h"

namespace moe_zero {

constexpr int kThreads = 256;
constexpr int kVectorBytes = 16;

// The words of a launch. Each tensor has one: its address in the lower 56 bits, then 3 bits of dtype and flags. Where
// kStrided is set, the word holds instead the index of a record: address, number of dimensions, sizes, strides.
constexpr uint64_t kAddressMask = (uint64_t{1} << 56) - 1;
constexpr int kDTypeShift = 56;
constexpr uint64_t kStrided = uint64_t{1} << 60;
constexpr uint64_t kPresent = uint64_t{1} << 61;

struct TensorWord {
  uint64_t bits;

  MOE_ZERO_HD bool present() const { return (bits & kPresent) != 0; }
  MOE_ZERO_HD bool strided() const { return (bits & kStrided) != 0; }
  MOE_ZERO_HD int dtype() const { return static_cast<int>(bits >> kDTypeShift & 7); }
  MOE_ZERO_HD uint64_t payload() const { return bits & kAddressMask; }
};

// Address of element `index` (row-major) of a tensor.
template <typename T>
MOE_ZERO_HD T* element(const uint64_t* words, TensorWord word, int64_t index) {
  if (!word.strided()) return reinterpret_cast<T*>(word.payload()) + index;
  const uint64_t* record = words + word.payload();
  const int ndim = static_cast<int>(record[1]);
  int64_t offset = 0;
  for (int d = ndim - 1; d >= 0; --d) {
    const int64_t size = static_cast<int64_t>(record[2 + d]);
    const int64_t rest = index / size;
    offset += (index - rest * size) * static_cast<int64_t>(record[2 + ndim + d]);
    index = rest;
  }
  return reinterpret_cast<T*>(record[0]) + offset;
}

// N elements that are moved by one instruction where the address allows it.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vector {
  T at[N];
};

// Elements of one access: at most 16 bytes; wider groups are made of several.
template <typename T, int N>
constexpr int kPart = sizeof(T) * N > kVectorBytes ? kVectorBytes / static_cast<int>(sizeof(T)) : N;

// Arrays stay in registers only if every loop over them is unrolled.
template <typename T, int N>
MOE_ZERO_HD void load(const T* source, T (&out)[N]) {
  MOE_ZERO_UNROLL
  for (int part = 0; part < N; part += kPart<T, N>) {
    const auto vector = *reinterpret_cast<const Vector<T, kPart<T, N>>*>(source + part);
    MOE_ZERO_UNROLL
    for (int i = 0; i < kPart<T, N>; ++i) out[part + i] = vector.at[i];
  }
}

template <typename T, int N>
MOE_ZERO_HD void store(T* target, const T (&in)[N]) {
  MOE_ZERO_UNROLL
  for (int part = 0; part < N; part += kPart<T, N>) {
    Vector<T, kPart<T, N>> vector;
    MOE_ZERO_UNROLL
    for (int i = 0; i < kPart<T, N>; ++i) vector.at[i] = in[part + i];
    *reinterpret_cast<Vector<T, kPart<T, N>>*>(target + part) = vector;
  }
}

// How `count` elements at `flat` split: single elements up to the first 16-byte boundary, whole vectors, and single
// elements behind them.
struct Split {
  int64_t head;
  int64_t vectors;
  int64_t count;

  // The element of one of the `singles()` first threads; there are fewer than two vectors' worth of them.
  MOE_ZERO_HD int64_t single(int thread, int per_vector) const {
    return thread < head ? thread : thread + vectors * per_vector;
  }
  MOE_ZERO_HD int64_t singles(int per_vector) const { return count - vectors * per_vector; }
};

template <typename F>
MOE_ZERO_HD Split split(const F* flat, int64_t count) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(F));
  const int64_t misaligned = static_cast<int64_t>(reinterpret_cast<uint64_t>(flat) % kVectorBytes);
  const int64_t head = misaligned == 0 ? 0 : (kVectorBytes - misaligned) / static_cast<int64_t>(sizeof(F));
  if (head >= count) return Split{count, 0, count};
  return Split{head, (count - head) / N, count};
}

// Whether the tensor's side of the vectors is aligned too.
template <typename T, int N>
MOE_ZERO_HD bool aligned(const T* pointer) {
  return reinterpret_cast<uint64_t>(pointer) % (sizeof(T) * kPart<T, N>) == 0;
}

// Vectors that a thread loads before it stores the first, so that enough loads are in flight: 64 bytes of the wider side.
template <typename S, typename D>
constexpr int kBatch = sizeof(S) <= sizeof(D) ? 4 : sizeof(S) == 2 * sizeof(D) ? 2 : 1;

// Pairs of dtypes that are moved in vectors. Those with fp64 on one side go element by element: they are rare, and in
// vectors they would set the register count of the whole kernel.
template <typename T, typename F>
constexpr bool kWide = std::is_same_v<T, F> || std::is_same_v<Compute<T, F>, float>;

// What one thread does of `count` elements that start at element `start` of a tensor and at `flat`. Neighbouring threads
// touch neighbouring vectors, or neighbouring elements where the tensor is strided or misaligned.
template <typename T, typename F>
MOE_ZERO_HD void pack_share(const uint64_t* words, TensorWord word, int64_t start, F* flat, int64_t count,
                            const CopyArgs& args, int thread, Stats* stats) {
  if constexpr (kWide<T, F>) {
    constexpr int N = kVectorBytes / static_cast<int>(sizeof(F));
    constexpr int B = kBatch<T, F>;
    const Split parts = split(flat, count);
    const T* dense = word.strided() ? nullptr : element<const T>(words, word, start);
    if (dense && aligned<T, N>(dense + parts.head)) {
      for (int64_t first = thread; first < parts.vectors; first += B * kThreads) {
        T in[B][N] = {};
        MOE_ZERO_UNROLL
        for (int b = 0; b < B; ++b) {
          const int64_t v = first + b * kThreads;
          if (v < parts.vectors) load<T, N>(dense + parts.head + v * N, in[b]);
        }
        MOE_ZERO_UNROLL
        for (int b = 0; b < B; ++b) {
          const int64_t v = first + b * kThreads;
          F out[N];
          MOE_ZERO_UNROLL
          for (int k = 0; k < N; ++k) {
            out[k] = transform(in[b][k], F{}, args);
            if (stats && v < parts.vectors) stats->add(out[k]);
          }
          if (v < parts.vectors) store<F, N>(flat + parts.head + v * N, out);
        }
      }
      if (thread < parts.singles(N)) {
        const int64_t i = parts.single(thread, N);
        const F out = transform(dense[i], F{}, args);
        if (stats) stats->add(out);
        flat[i] = out;
      }
      return;
    }
  }
  for (int64_t i = thread; i < count; i += kThreads) {
    const F out = transform(*element<const T>(words, word, start + i), F{}, args);
    if (stats) stats->add(out);
    flat[i] = out;
  }
}

template <typename F>
MOE_ZERO_HD void zero_share(F* flat, int64_t count, int thread) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(F));
  const Split parts = split(flat, count);
  const F zeros[N] = {};
  for (int64_t v = thread; v < parts.vectors; v += kThreads) store<F, N>(flat + parts.head + v * N, zeros);
  if (thread < parts.singles(N)) flat[parts.single(thread, N)] = F{};
}

template <typename F, typename T>
MOE_ZERO_HD void unpack_share(const uint64_t* words, TensorWord word, int64_t start, const F* flat, int64_t count,
                              const CopyArgs& args, int thread) {
  if constexpr (kWide<T, F>) {
    constexpr int N = kVectorBytes / static_cast<int>(sizeof(F));
    constexpr int B = kBatch<T, F>;
    const Split parts = split(flat, count);
    T* dense = word.strided() ? nullptr : element<T>(words, word, start);
    if (dense && aligned<T, N>(dense + parts.head)) {
      for (int64_t first = thread; first < parts.vectors; first += B * kThreads) {
        F in[B][N] = {};
        MOE_ZERO_UNROLL
        for (int b = 0; b < B; ++b) {
          const int64_t v = first + b * kThreads;
          if (v < parts.vectors) load<F, N>(flat + parts.head + v * N, in[b]);
        }
        MOE_ZERO_UNROLL
        for (int b = 0; b < B; ++b) {
          const int64_t v = first + b * kThreads;
          T out[N] = {};
          if (v < parts.vectors && args.accumulate) load<T, N>(dense + parts.head + v * N, out);
          MOE_ZERO_UNROLL
          for (int k = 0; k < N; ++k) out[k] = transform(in[b][k], out[k], args);
          if (v < parts.vectors) store<T, N>(dense + parts.head + v * N, out);
        }
      }
      if (thread < parts.singles(N)) {
        const int64_t i = parts.single(thread, N);
        dense[i] = transform(flat[i], args.accumulate ? dense[i] : T{}, args);
      }
      return;
    }
  }
  for (int64_t i = thread; i < count; i += kThreads) {
    T* out = element<T>(words, word, start + i);
    *out = transform(flat[i], args.accumulate ? *out : T{}, args);
  }
}

// Dispatch on the dtypes (flat_plan.h's codes) of tensor and flat buffer: one branch for a whole block. Spelled out,
// because nvcc does not inline lambdas, and calls spill registers.
template <typename F>
MOE_ZERO_HD void pack_share(const uint64_t* words, TensorWord word, int64_t start, char* flat, int64_t first,
                            int64_t count, const CopyArgs& args, int thread, Stats* stats) {
  F* target = reinterpret_cast<F*>(flat) + first;
  if (!word.present()) return zero_share<F>(target, count, thread);
  switch (word.dtype()) {
    case 0: return pack_share<double, F>(words, word, start, target, count, args, thread, stats);
    case 1: return pack_share<float, F>(words, word, start, target, count, args, thread, stats);
    case 2: return pack_share<Half, F>(words, word, start, target, count, args, thread, stats);
    default: return pack_share<BFloat16, F>(words, word, start, target, count, args, thread, stats);
  }
}

template <typename F>
MOE_ZERO_HD void unpack_share(const uint64_t* words, TensorWord word, int64_t start, const char* flat, int64_t first,
                              int64_t count, const CopyArgs& args, int thread) {
  const F* source = reinterpret_cast<const F*>(flat) + first;
  switch (word.dtype()) {
    case 0: return unpack_share<F, double>(words, word, start, source, count, args, thread);
    case 1: return unpack_share<F, float>(words, word, start, source, count, args, thread);
    case 2: return unpack_share<F, Half>(words, word, start, source, count, args, thread);
    default: return unpack_share<F, BFloat16>(words, word, start, source, count, args, thread);
  }
}

// The part of a piece that a tile covers.
struct Span {
  TablePiece piece;
  int64_t first;
  int64_t count;
};

MOE_ZERO_HD int64_t tile_elements(int dtype) { return kTileBytes / (dtype == 0 ? 8 : dtype == 1 ? 4 : 2); }

MOE_ZERO_HD Span span_of(const TablePiece* pieces, const Tile* tiles, int64_t tile) {
  const Tile at = tiles[tile];
  const TablePiece piece = pieces[at.piece];
  const int64_t most = tile_elements(piece.dtype());
  const int64_t left = piece.count - at.first;
  return Span{piece, at.first, left < most ? left : most};
}

// One thread's part of one tile of pack. The launch has words for tensors from first_tensor on; tiles of other tensors
// belong to other launches, and the padding to the first.
MOE_ZERO_HD void pack_tile(const TablePiece* pieces, const Tile* tiles, int64_t tile, int thread,
                           const uint64_t* words, int64_t first_tensor, int64_t num_tensors, char* flat,
                           const CopyArgs& args, Stats* stats) {
  const Span span = span_of(pieces, tiles, tile);
  const int64_t index = span.piece.tensor - first_tensor;
  const bool padding = span.piece.tensor < 0;
  if (padding ? first_tensor != 0 : index < 0 || index >= num_tensors) return;
  const TensorWord word{padding ? 0 : words[index]};
  const int64_t start = span.piece.tensor_start() + span.first;
  char* target = flat + span.piece.flat_byte;
  switch (span.piece.dtype()) {
    case 0: return pack_share<double>(words, word, start, target, span.first, span.count, args, thread, stats);
    case 1: return pack_share<float>(words, word, start, target, span.first, span.count, args, thread, stats);
    case 2: return pack_share<Half>(words, word, start, target, span.first, span.count, args, thread, stats);
    default: return pack_share<BFloat16>(words, word, start, target, span.first, span.count, args, thread, stats);
  }
}

MOE_ZERO_HD void unpack_tile(const TablePiece* pieces, const Tile* tiles, int64_t tile, int thread,
                             const uint64_t* words, int64_t first_tensor, int64_t num_tensors, const char* flat,
                             const CopyArgs& args) {
  const Span span = span_of(pieces, tiles, tile);
  const int64_t index = span.piece.tensor - first_tensor;
  if (span.piece.tensor < 0 || index < 0 || index >= num_tensors) return;
  const TensorWord word{words[index]};
  const int64_t start = span.piece.tensor_start() + span.first;
  const char* source = flat + span.piece.flat_byte;
  switch (span.piece.dtype()) {
    case 0: return unpack_share<double>(words, word, start, source, span.first, span.count, args, thread);
    case 1: return unpack_share<float>(words, word, start, source, span.first, span.count, args, thread);
    case 2: return unpack_share<Half>(words, word, start, source, span.first, span.count, args, thread);
    default: return unpack_share<BFloat16>(words, word, start, source, span.first, span.count, args, thread);
  }
}

// Elements of a row that one thread block of sum_rows adds up.
constexpr int64_t kSumRowsTile = 4096;

template <typename S, typename D>
MOE_ZERO_HD void sum_rows_tile(const S* rows, int64_t num_rows, int64_t row_numel, D* out, int64_t tile, int thread,
                               const CopyArgs& args, Stats* stats) {
  using C = Compute<S, D>;
  const int64_t begin = tile * kSumRowsTile;
  const int64_t end = begin + kSumRowsTile < row_numel ? begin + kSumRowsTile : row_numel;
  // One element of a row at a time: neighbouring threads read neighbouring elements, so that accesses coalesce
  // whatever the alignment of a row, and there are as many loads in flight as rows.
  for (int64_t i = begin + thread; i < end; i += kThreads) {
    C sum = static_cast<C>(widen(rows[i]));
    for (int64_t r = 1; r < num_rows; ++r) sum += static_cast<C>(widen(rows[r * row_numel + i]));
    if (args.scaled) sum *= static_cast<C>(args.scale);
    if (args.accumulate) sum = static_cast<C>(widen(out[i])) + sum;
    D result;
    narrow(sum, &result);
    out[i] = result;
    if (stats) stats->add(result);
  }
}

}  // namespace moe_zero
