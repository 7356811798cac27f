// CPU backend: walks the pieces of a plan and hands runs of elements to the kernels of an instruction set.
#include "flat_cpu.h"

#include <algorithm>
#include <cstring>

namespace moe_zero {
namespace {

// The flat buffer is cut into chunks of this many bytes. Chunks, not tensors, are dealt to threads, so pieces of very
// different sizes balance; sums are kept by chunk and added in order, so they do not depend on the thread count.
constexpr int64_t kChunkBytes = 64 * 1024;
// A thread takes at least this many chunks: waking one costs about as much as copying 100 KB.
constexpr int64_t kGrainChunks = 2;
// From this size on, stores go around the caches. The copy alone gains from 2 MB on (1.2 to 1.5 x), but whoever reads
// the result then waits for memory; copy and one read together gain from about here on.
constexpr int64_t kStreamBytes = int64_t{32} << 20;
// Elements of a strided tensor that are gathered or scattered at a time; the buffer stays in L1.
constexpr int64_t kBlock = 1024;

int64_t item(DType dtype) { return dtype_size(dtype); }

// A walk over the elements of a strided tensor in row-major order, from any element on.
class Odometer {
 public:
  Odometer(const Geometry& geometry, int64_t start) : geometry_(geometry) {
    for (int d = geometry.ndim() - 1; d >= 0; --d) {
      index_[d] = start % geometry.sizes[d];
      start /= geometry.sizes[d];
      offset_ += index_[d] * geometry.strides[d];
    }
  }

  // Calls run(offset, stride, count) for runs along the last dimension, n elements in all.
  template <typename Run>
  void walk(int64_t n, const Run& run) {
    const auto &sizes = geometry_.sizes, &strides = geometry_.strides;
    const int last = geometry_.ndim() - 1;
    while (n > 0) {
      const int64_t count = std::min(n, sizes[last] - index_[last]);
      run(offset_, strides[last], count);
      n -= count;
      index_[last] += count;
      offset_ += count * strides[last];
      for (int d = last; d > 0 && index_[d] == sizes[d]; --d) {
        offset_ += strides[d - 1] - strides[d] * sizes[d];
        index_[d] = 0;
        ++index_[d - 1];
      }
    }
  }

 private:
  const Geometry& geometry_;
  int64_t index_[kMaxDims];
  int64_t offset_ = 0;
};

template <typename T>
void gather(Odometer& odometer, const void* data, void* buffer, int64_t n) {
  const T* source = static_cast<const T*>(data);
  T* out = static_cast<T*>(buffer);
  odometer.walk(n, [&](int64_t offset, int64_t stride, int64_t count) {
    for (int64_t i = 0; i < count; ++i) out[i] = source[offset + i * stride];
    out += count;
  });
}

template <typename T>
void scatter(Odometer& odometer, void* data, const void* buffer, int64_t n) {
  T* target = static_cast<T*>(data);
  const T* in = static_cast<const T*>(buffer);
  odometer.walk(n, [&](int64_t offset, int64_t stride, int64_t count) {
    for (int64_t i = 0; i < count; ++i) target[offset + i * stride] = in[i];
    in += count;
  });
}

void gather(Odometer& odometer, const TensorView& view, void* buffer, int64_t n) {
  switch (item(view.dtype)) {
    case 2: return gather<uint16_t>(odometer, view.data, buffer, n);
    case 4: return gather<uint32_t>(odometer, view.data, buffer, n);
    default: return gather<uint64_t>(odometer, view.data, buffer, n);
  }
}

void scatter(Odometer& odometer, const TensorView& view, const void* buffer, int64_t n) {
  switch (item(view.dtype)) {
    case 2: return scatter<uint16_t>(odometer, view.data, buffer, n);
    case 4: return scatter<uint32_t>(odometer, view.data, buffer, n);
    default: return scatter<uint64_t>(odometer, view.data, buffer, n);
  }
}

// `count` elements of one tensor, from element `start` on, into the flat buffer.
void pack_run(const CpuKernels& kernels, const TensorView& view, int64_t start, char* flat, DType flat_dtype,
              int64_t count, const CopyArgs& args, Stats* stats) {
  const CopyFn copy = kernels.copy[static_cast<int>(view.dtype)][static_cast<int>(flat_dtype)];
  if (view.dense()) {
    return copy(static_cast<const char*>(view.data) + start * item(view.dtype), flat, count, args, stats);
  }
  alignas(64) char buffer[kBlock * 8];
  Odometer odometer(*view.geometry, start);
  for (int64_t done = 0; done < count; done += kBlock) {
    const int64_t n = std::min(kBlock, count - done);
    gather(odometer, view, buffer, n);
    copy(buffer, flat + done * item(flat_dtype), n, args, stats);
  }
}

void unpack_run(const CpuKernels& kernels, const TensorView& view, int64_t start, const char* flat, DType flat_dtype,
                int64_t count, const CopyArgs& args) {
  const CopyFn copy = kernels.copy[static_cast<int>(flat_dtype)][static_cast<int>(view.dtype)];
  if (view.dense()) {
    return copy(flat, static_cast<char*>(view.data) + start * item(view.dtype), count, args, nullptr);
  }
  alignas(64) char buffer[kBlock * 8];
  CopyArgs through = args;
  through.stream = false;
  Odometer reader(*view.geometry, start), writer(*view.geometry, start);
  for (int64_t done = 0; done < count; done += kBlock) {
    const int64_t n = std::min(kBlock, count - done);
    if (args.accumulate) gather(reader, view, buffer, n);
    copy(flat + done * item(flat_dtype), buffer, n, through, nullptr);
    scatter(writer, view, buffer, n);
  }
}

// Calls run(piece, first element within the piece, count) for the pieces in bytes [begin, end) of the flat buffer.
template <typename Run>
void for_each_run(const Table& table, int64_t begin, int64_t end, const Run& run) {
  const TablePiece* last = table.pieces + table.num_pieces;
  const TablePiece* piece =
      std::upper_bound(table.pieces, last, begin, [](int64_t byte, const TablePiece& p) { return byte < p.flat_byte; }) -
      1;
  for (; piece < last && piece->flat_byte < end; ++piece) {
    const int64_t size = item(static_cast<DType>(piece->dtype()));
    const int64_t first = (std::max(begin, piece->flat_byte) - piece->flat_byte) / size;
    const int64_t stop = std::min(piece->count, (end - piece->flat_byte) / size);
    if (stop > first) run(*piece, first, stop - first);
  }
}

int64_t num_chunks(int64_t bytes) { return (bytes + kChunkBytes - 1) / kChunkBytes; }

Stats merged(const std::vector<Stats>& partial) {
  Stats total;
  for (const Stats& stats : partial) total.merge(stats);
  return total;
}

}  // namespace

void pack_cpu(const Table& table, const TensorView* tensors, void* flat, double scale, Stats* stats,
              ParallelFor loop) {
  const CpuKernels& kernels = cpu_kernels();
  CopyArgs args;
  args.scale = scale;
  args.scaled = scale != 1;
  args.stream = table.flat_bytes >= kStreamBytes;
  const int64_t chunks = num_chunks(table.flat_bytes);
  std::vector<Stats> partial(stats ? chunks : 0);
  char* out = static_cast<char*>(flat);
  loop(chunks, kGrainChunks, [&](int64_t first_chunk, int64_t last_chunk) {
    // With sums, chunk by chunk; otherwise the whole range at once.
    const int64_t step = stats ? 1 : last_chunk - first_chunk;
    for (int64_t chunk = first_chunk; chunk < last_chunk; chunk += step) {
      const int64_t begin = chunk * kChunkBytes;
      const int64_t end = std::min((chunk + step) * kChunkBytes, table.flat_bytes);
      for_each_run(table, begin, end, [&](const TablePiece& piece, int64_t first, int64_t count) {
        const DType dtype = static_cast<DType>(piece.dtype());
        char* target = out + piece.flat_byte + first * item(dtype);
        if (piece.tensor < 0 || !tensors[piece.tensor].present) {
          memset(target, 0, count * item(dtype));
        } else {
          pack_run(kernels, tensors[piece.tensor], piece.tensor_start() + first, target, dtype, count, args,
                   stats ? &partial[chunk] : nullptr);
        }
      });
    }
  });
  if (stats) *stats = merged(partial);
}

void unpack_cpu(const Table& table, const TensorView* tensors, const void* flat, bool accumulate, ParallelFor loop) {
  const CpuKernels& kernels = cpu_kernels();
  CopyArgs args;
  args.accumulate = accumulate;
  args.stream = !accumulate && table.flat_bytes >= kStreamBytes;
  const char* in = static_cast<const char*>(flat);
  loop(num_chunks(table.flat_bytes), kGrainChunks, [&](int64_t first_chunk, int64_t last_chunk) {
    const int64_t begin = first_chunk * kChunkBytes;
    const int64_t end = std::min(last_chunk * kChunkBytes, table.flat_bytes);
    for_each_run(table, begin, end, [&](const TablePiece& piece, int64_t first, int64_t count) {
      if (piece.tensor < 0) return;
      const DType dtype = static_cast<DType>(piece.dtype());
      unpack_run(kernels, tensors[piece.tensor], piece.tensor_start() + first,
                 in + piece.flat_byte + first * item(dtype), dtype, count, args);
    });
  });
}

void sum_rows_cpu(const void* rows, DType rows_dtype, int64_t num_rows, int64_t row_numel, void* out, DType out_dtype,
                  double scale, bool accumulate, Stats* stats, ParallelFor loop) {
  const SumRowsFn sum = cpu_kernels().sum_rows[static_cast<int>(rows_dtype)][static_cast<int>(out_dtype)];
  CopyArgs args;
  args.scale = scale;
  args.scaled = scale != 1;
  args.accumulate = accumulate;
  const int64_t chunk = kChunkBytes / item(out_dtype);
  const int64_t chunks = (row_numel + chunk - 1) / chunk;
  std::vector<Stats> partial(stats ? chunks : 0);
  loop(chunks, kGrainChunks, [&](int64_t first_chunk, int64_t last_chunk) {
    for (int64_t c = first_chunk; c < last_chunk; ++c) {
      const int64_t begin = c * chunk;
      sum(static_cast<const char*>(rows) + begin * item(rows_dtype), num_rows, row_numel,
          static_cast<char*>(out) + begin * item(out_dtype), std::min(chunk, row_numel - begin), args,
          stats ? &partial[c] : nullptr);
    }
  });
  if (stats) *stats = merged(partial);
}

}  // namespace moe_zero
