// The form in which a FlatPlan reaches the operators: one int64 vector, so that it is a tensor like any other
// argument (fake tensors, export and CUDA graphs need no special case) and can live in device memory.
//
//   word 0  magic
//   word 1  number of tensors, n
//   word 2  number of pieces, p
//   word 3  bytes of the whole flat buffer
//   then    n sizes (elements)
//   then    p pieces of 4 words: flat byte, tensor (-1: zero padding), tensor_start * 8 + dtype, count
//
// Pieces are sorted by their flat byte and cover the flat buffer without a gap.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace moe_zero {

constexpr int64_t kTableMagic = 0x6d7a666c6174'01;
constexpr int64_t kTableHeader = 4;
constexpr int64_t kPieceWords = 4;

struct TablePiece {
  int64_t flat_byte;
  int64_t tensor;
  int64_t start_and_dtype;
  int64_t count;

  MOE_ZERO_HD int64_t tensor_start() const { return start_and_dtype >> 3; }
  MOE_ZERO_HD int32_t dtype() const { return static_cast<int32_t>(start_and_dtype & 7); }
};
static_assert(sizeof(TablePiece) == kPieceWords * sizeof(int64_t));

struct Table {
  int64_t num_tensors;
  int64_t num_pieces;
  int64_t flat_bytes;
  const int64_t* sizes;
  const TablePiece* pieces;

  // False if the words are not a table (wrong magic, or a length that does not fit its header).
  static bool parse(const int64_t* words, int64_t num_words, Table* out) {
    if (num_words < kTableHeader || words[0] != kTableMagic) return false;
    const int64_t n = words[1], p = words[2];
    if (n < 0 || p < 0 || n > num_words || p > num_words) return false;
    if (kTableHeader + n + p * kPieceWords != num_words) return false;
    *out = Table{n, p, words[3], words + kTableHeader,
                 reinterpret_cast<const TablePiece*>(words + kTableHeader + n)};
    return true;
  }
};

// For CUDA the table in device memory is followed by tiles of 2 words: what one thread block copies, part of one piece.
struct Tile {
  int64_t piece;
  int64_t first;  // element within the piece
};

// Bytes of the flat buffer in one tile. 16 KB are 4 vectors of 16 bytes for each of 256 threads: enough loads in flight
// to cover the latency of memory, and few enough tiles that their table stays small.
constexpr int64_t kTileBytes = 16 * 1024;

}  // namespace moe_zero
