// Runs the CUDA kernels' functions (csrc/flat_tiles.h) on the host: every launch, every block, every thread in turn.
#include <vector>

#include "flat_tiles.h"
#include "launch_words.h"

using namespace moe_zero;

namespace {

struct Plan {
  Table table;
  const Tile* tiles;
  int64_t num_tiles;
  std::vector<TensorView> views;

  Plan(const int64_t* words, int64_t num_words, const int64_t* tile_words, int64_t num_tile_words, int64_t num_tensors,
       void* const* data, const int32_t* dtypes, const int32_t* ndims, const int64_t* geometry)
      : tiles(reinterpret_cast<const Tile*>(tile_words)), num_tiles(num_tile_words / 2), views(num_tensors) {
    Table::parse(words, num_words, &table);
    for (int64_t i = 0; i < num_tensors; ++i) {
      if (ndims[i] < 0) continue;  // None
      views[i].present = true;
      views[i].data = data[i];
      views[i].dtype = static_cast<DType>(dtypes[i]);
      views[i].set_geometry(geometry, geometry + ndims[i], ndims[i]);
      geometry += 2 * ndims[i];
    }
  }

  // Calls block(first tensor, number of tensors, words, tile, thread) as the launches of flat_cuda.cu do.
  template <typename Thread>
  int64_t run(int64_t capacity, const Thread& run_thread) const {
    std::vector<uint64_t> words;
    int64_t launches = 0, first = 0;
    const int64_t n = static_cast<int64_t>(views.size());
    do {
      const int64_t count = fill_words(views.data(), first, n, capacity, &words);
      for (int64_t tile = 0; tile < num_tiles; ++tile) {
        for (int thread = 0; thread < kThreads; ++thread) run_thread(first, count, words.data(), tile, thread);
      }
      first += count;
      ++launches;
    } while (first < n);
    return launches;
  }
};

}  // namespace

extern "C" {

int64_t tiles_pack(const int64_t* words, int64_t num_words, const int64_t* tiles, int64_t num_tile_words,
                   int64_t num_tensors, void* const* data, const int32_t* dtypes, const int32_t* ndims,
                   const int64_t* geometry, int64_t capacity, char* flat, double scale, double* stats) {
  const Plan plan(words, num_words, tiles, num_tile_words, num_tensors, data, dtypes, ndims, geometry);
  CopyArgs args;
  args.scale = scale;
  args.scaled = scale != 1;
  Stats sums;
  const int64_t launches =
      plan.run(capacity, [&](int64_t first, int64_t count, const uint64_t* launch, int64_t tile, int thread) {
        pack_tile(plan.table.pieces, plan.tiles, tile, thread, launch, first, count, flat, args, &sums);
      });
  stats[0] = sums.sum_of_squares;
  stats[1] = sums.non_finite;
  return launches;
}

int64_t tiles_unpack(const int64_t* words, int64_t num_words, const int64_t* tiles, int64_t num_tile_words,
                     int64_t num_tensors, void* const* data, const int32_t* dtypes, const int32_t* ndims,
                     const int64_t* geometry, int64_t capacity, const char* flat, int32_t accumulate) {
  const Plan plan(words, num_words, tiles, num_tile_words, num_tensors, data, dtypes, ndims, geometry);
  CopyArgs args;
  args.accumulate = accumulate != 0;
  return plan.run(capacity, [&](int64_t first, int64_t count, const uint64_t* launch, int64_t tile, int thread) {
    unpack_tile(plan.table.pieces, plan.tiles, tile, thread, launch, first, count, flat, args);
  });
}

void tiles_sum_rows(const float* rows, int64_t num_rows, int64_t row_numel, float* out, double scale,
                    int32_t accumulate, double* stats) {
  CopyArgs args;
  args.scale = scale;
  args.scaled = scale != 1;
  args.accumulate = accumulate != 0;
  Stats sums;
  for (int64_t tile = 0; tile * kSumRowsTile < row_numel; ++tile) {
    for (int thread = 0; thread < kThreads; ++thread) {
      sum_rows_tile(rows, num_rows, row_numel, out, tile, thread, args, &sums);
    }
  }
  stats[0] = sums.sum_of_squares;
  stats[1] = sums.non_finite;
}
}
