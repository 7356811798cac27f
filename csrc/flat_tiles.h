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

// At most 16 bytes in one instruction: wider vectors are made of several.
template <typename T, int N>
MOE_ZERO_HD void load(const T* source, T (&out)[N]) {
  constexpr int kPart = sizeof(T) * N > kVectorBytes ? kVectorBytes / static_cast<int>(sizeof(T)) : N;
  for (int part = 0; part < N; part += kPart) {
    const auto vector = *reinterpret_cast<const Vector<T, kPart>*>(source + part);
    for (int i = 0; i < kPart; ++i) out[part + i] = vector.at[i];
  }
}

template <typename T, int N>
MOE_ZERO_HD void store(T* target, const T (&in)[N]) {
  constexpr int kPart = sizeof(T) * N > kVectorBytes ? kVectorBytes / static_cast<int>(sizeof(T)) : N;
  for (int part = 0; part < N; part += kPart) {
    Vector<T, kPart> vector;
    for (int i = 0; i < kPart; ++i) vector.at[i] = in[part + i];
    *reinterpret_cast<Vector<T, kPart>*>(target + part) = vector;
  }
}

template <typename T, int N>
MOE_ZERO_HD bool aligned(const T* pointer) {
  constexpr int kBytes = sizeof(T) * N > kVectorBytes ? kVectorBytes : static_cast<int>(sizeof(T)) * N;
  return reinterpret_cast<uint64_t>(pointer) % kBytes == 0;
}

// Elements before the first one that starts a 16-byte vector of the flat buffer.
template <typename F>
MOE_ZERO_HD int64_t head_count(const F* flat, int64_t count) {
  const int64_t misaligned = static_cast<int64_t>(reinterpret_cast<uint64_t>(flat) % kVectorBytes);
  const int64_t head = misaligned == 0 ? 0 : (kVectorBytes - misaligned) / static_cast<int64_t>(sizeof(F));
  return head < count ? head : count;
}

// What one thread does of `count` elements that start at element `start` of a tensor and at `flat`: its share of the
// single elements in front of and behind the aligned middle, and of the middle's vectors. Neighbouring threads touch
// neighbouring vectors.
template <typename T, typename F>
MOE_ZERO_HD void pack_share(const uint64_t* words, TensorWord word, int64_t start, F* flat, int64_t count,
                            const CopyArgs& args, int thread, Stats* stats) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(F));
  const int64_t head = head_count(flat, count);
  const int64_t vectors = (count - head) / N;
  const bool dense = !word.strided();
  const T* source = element<T>(words, word, 0);
  for (int64_t v = thread; v < vectors; v += kThreads) {
    const int64_t i = head + v * N;
    T in[N];
    if (dense && aligned<T, N>(source + start + i)) {
      load<T, N>(source + start + i, in);
    } else {
      for (int k = 0; k < N; ++k) in[k] = *element<const T>(words, word, start + i + k);
    }
    F out[N];
    for (int k = 0; k < N; ++k) {
      out[k] = transform(in[k], out[k], args);
      if (stats) stats->add(out[k]);
    }
    store<F, N>(flat + i, out);
  }
  const int64_t singles = count - vectors * N;  // fewer than 2 * N, so one per thread
  if (thread < singles) {
    const int64_t i = thread < head ? thread : thread + vectors * N;
    flat[i] = transform(*element<const T>(words, word, start + i), flat[i], args);
    if (stats) stats->add(flat[i]);
  }
}

template <typename F>
MOE_ZERO_HD void zero_share(F* flat, int64_t count, int thread) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(F));
  const int64_t head = head_count(flat, count);
  const int64_t vectors = (count - head) / N;
  const F zeros[N] = {};
  for (int64_t v = thread; v < vectors; v += kThreads) store<F, N>(flat + head + v * N, zeros);
  const int64_t singles = count - vectors * N;
  if (thread < singles) flat[thread < head ? thread : thread + vectors * N] = F{};
}

template <typename F, typename T>
MOE_ZERO_HD void unpack_share(const uint64_t* words, TensorWord word, int64_t start, const F* flat, int64_t count,
                              const CopyArgs& args, int thread) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(F));
  const int64_t head = head_count(flat, count);
  const int64_t vectors = (count - head) / N;
  const bool dense = !word.strided();
  T* target = element<T>(words, word, 0);
  for (int64_t v = thread; v < vectors; v += kThreads) {
    const int64_t i = head + v * N;
    F in[N];
    load<F, N>(flat + i, in);
    if (dense && aligned<T, N>(target + start + i)) {
      T out[N];
      if (args.accumulate) load<T, N>(target + start + i, out);
      for (int k = 0; k < N; ++k) out[k] = transform(in[k], out[k], args);
      store<T, N>(target + start + i, out);
    } else {
      for (int k = 0; k < N; ++k) {
        T* out = element<T>(words, word, start + i + k);
        *out = transform(in[k], *out, args);
      }
    }
  }
  const int64_t singles = count - vectors * N;
  if (thread < singles) {
    const int64_t i = thread < head ? thread : thread + vectors * N;
    T* out = element<T>(words, word, start + i);
    *out = transform(flat[i], *out, args);
  }
}

// Calls body with a null pointer to the type of a dtype code (flat_plan.h's DType). Host code passes host lambdas and
// device code device lambdas, which nvcc has to be told not to mind.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <typename Body>
MOE_ZERO_HD void with_type(int dtype, const Body& body) {
  switch (dtype) {
    case 0: return body(static_cast<double*>(nullptr));
    case 1: return body(static_cast<float*>(nullptr));
    case 2: return body(static_cast<Half*>(nullptr));
    default: return body(static_cast<BFloat16*>(nullptr));
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

// One thread's part of one tile of pack. Tensors from first_tensor on have words; others belong to another launch.
MOE_ZERO_HD void pack_tile(const TablePiece* pieces, const Tile* tiles, int64_t tile, int thread,
                           const uint64_t* words, int64_t first_tensor, int64_t num_tensors, bool padding, char* flat,
                           const CopyArgs& args, Stats* stats) {
  const Span span = span_of(pieces, tiles, tile);
  const int64_t index = span.piece.tensor - first_tensor;
  if (span.piece.tensor < 0 ? !padding : index < 0 || index >= num_tensors) return;
  const TensorWord word{span.piece.tensor < 0 ? 0 : words[index]};
  with_type(span.piece.dtype(), [&](auto* flat_tag) {
    using F = std::remove_pointer_t<decltype(flat_tag)>;
    F* target = reinterpret_cast<F*>(flat + span.piece.flat_byte) + span.first;
    if (!word.present()) return zero_share(target, span.count, thread);
    with_type(word.dtype(), [&](auto* tensor_tag) {
      using T = std::remove_pointer_t<decltype(tensor_tag)>;
      pack_share<T, F>(words, word, span.piece.tensor_start() + span.first, target, span.count, args, thread, stats);
    });
  });
}

MOE_ZERO_HD void unpack_tile(const TablePiece* pieces, const Tile* tiles, int64_t tile, int thread,
                             const uint64_t* words, int64_t first_tensor, int64_t num_tensors, const char* flat,
                             const CopyArgs& args) {
  const Span span = span_of(pieces, tiles, tile);
  const int64_t index = span.piece.tensor - first_tensor;
  if (span.piece.tensor < 0 || index < 0 || index >= num_tensors) return;
  const TensorWord word{words[index]};
  with_type(span.piece.dtype(), [&](auto* flat_tag) {
    using F = std::remove_pointer_t<decltype(flat_tag)>;
    const F* source = reinterpret_cast<const F*>(flat + span.piece.flat_byte) + span.first;
    with_type(word.dtype(), [&](auto* tensor_tag) {
      using T = std::remove_pointer_t<decltype(tensor_tag)>;
      unpack_share<F, T>(words, word, span.piece.tensor_start() + span.first, source, span.count, args, thread);
    });
  });
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
