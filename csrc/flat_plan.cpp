#include "flat_plan.h"

#include <algorithm>
#include <limits>
#include <map>
#include <stdexcept>
#include <tuple>

#include "flat_table.h"

namespace moe_zero {
namespace {

constexpr const char* kNames[] = {"float64", "float32", "float16", "bfloat16"};
constexpr int64_t kSizes[] = {8, 4, 2, 2};

// Far above any real layer, and low enough that no sum or product below can overflow.
constexpr int64_t kMaxElements = int64_t{1} << 56;
constexpr int64_t kMaxWorldSize = int64_t{1} << 24;

void require_length(const char* name, size_t length, size_t expected) {
  if (length != expected) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(length) + " entries, but sizes has " +
                                std::to_string(expected) + "; one entry per tensor is needed");
  }
}

size_t mix(size_t seed, size_t value) { return seed ^ (value + 0x9e3779b97f4a7c15 + (seed << 6) + (seed >> 2)); }

}  // namespace

DType dtype_from_name(const std::string& name) {
  for (int i = 0; i < 4; ++i) {
    if (name == kNames[i]) return static_cast<DType>(i);
  }
  throw std::invalid_argument("dtype is '" + name + "'; a flat buffer holds float64, float32, float16 or bfloat16");
}

const char* dtype_name(DType dtype) { return kNames[static_cast<int>(dtype)]; }

int64_t dtype_size(DType dtype) { return kSizes[static_cast<int>(dtype)]; }

FlatPlan::FlatPlan(std::vector<int64_t> sizes, std::vector<DType> dtypes, std::vector<bool> trainable,
                   int64_t world_size, std::vector<int64_t> tags, bool has_stored, DType stored)
    : sizes_(std::move(sizes)),
      dtypes_(std::move(dtypes)),
      trainable_(std::move(trainable)),
      tags_(std::move(tags)),
      world_size_(world_size),
      has_stored_(has_stored),
      stored_(stored) {
  require_length("dtypes", dtypes_.size(), sizes_.size());
  require_length("trainable", trainable_.size(), sizes_.size());
  require_length("tags", tags_.size(), sizes_.size());
  if (world_size_ < 1 || world_size_ > kMaxWorldSize) {
    throw std::invalid_argument("world_size is " + std::to_string(world_size_) + "; it must be between 1 and " +
                                std::to_string(kMaxWorldSize));
  }
  int64_t total = 0;
  for (size_t i = 0; i < sizes_.size(); ++i) {
    if (sizes_[i] < 0) {
      throw std::invalid_argument("sizes[" + std::to_string(i) + "] is " + std::to_string(sizes_[i]) +
                                  "; a number of elements cannot be negative");
    }
    if (sizes_[i] > kMaxElements - total) {
      throw std::invalid_argument("sizes add up to more than 2**56 elements at sizes[" + std::to_string(i) + "]");
    }
    total += sizes_[i];
  }

  // std::map orders the groups: trainable first, then by tag, then by dtype.
  std::map<std::tuple<bool, int64_t, DType>, std::vector<int64_t>> members;
  for (size_t i = 0; i < sizes_.size(); ++i) {
    members[{!trainable_[i], tags_[i], dtypes_[i]}].push_back(static_cast<int64_t>(i));
  }
  int64_t element_offset = 0;
  for (auto& [key, indices] : members) {
    int64_t numel = 0;
    for (int64_t i : indices) numel += sizes_[i];
    const int64_t step = world_size_ * kAlignment;
    const int64_t shard_numel = (numel + step - 1) / step * kAlignment;
    const DType dtype = has_stored_ ? stored_ : std::get<2>(key);
    groups_.push_back(Group{!std::get<0>(key), std::get<1>(key), dtype, std::move(indices), shard_numel,
                            element_offset, shard_bytes_});
    element_offset += shard_numel;
    shard_bytes_ += shard_numel * dtype_size(dtype);
    if (groups_.back().trainable) trainable_bytes_ = shard_bytes_;
  }

  // Walk every rank's row; `cursor` remembers how far each group's concatenation has been laid out.
  struct Cursor {
    size_t member = 0;
    int64_t start = 0;
  };
  std::vector<Cursor> cursors(groups_.size());
  for (int64_t rank = 0; rank < world_size_; ++rank) {
    for (size_t g = 0; g < groups_.size(); ++g) {
      const Group& group = groups_[g];
      Cursor& cursor = cursors[g];
      const int64_t item = dtype_size(group.dtype);
      int64_t filled = 0;
      while (filled < group.shard_numel && cursor.member < group.members.size()) {
        const int64_t tensor = group.members[cursor.member];
        const int64_t count = std::min(sizes_[tensor] - cursor.start, group.shard_numel - filled);
        if (count > 0) {
          pieces_.push_back(
              Piece{tensor, cursor.start, rank, group.byte_offset + filled * item, count, group.dtype});
          filled += count;
          cursor.start += count;
        }
        if (cursor.start == sizes_[tensor]) cursor = Cursor{cursor.member + 1, 0};
      }
      if (filled < group.shard_numel) {
        pieces_.push_back(
            Piece{-1, 0, rank, group.byte_offset + filled * item, group.shard_numel - filled, group.dtype});
      }
    }
  }
}

FlatPlan FlatPlan::cast(DType stored, bool trainable_only) const {
  std::vector<int64_t> sizes, tags;
  std::vector<DType> dtypes;
  std::vector<bool> trainable;
  for (size_t i = 0; i < sizes_.size(); ++i) {
    if (trainable_only && !trainable_[i]) continue;
    sizes.push_back(sizes_[i]);
    dtypes.push_back(dtypes_[i]);
    trainable.push_back(trainable_[i]);
    tags.push_back(tags_[i]);
  }
  return FlatPlan(std::move(sizes), std::move(dtypes), std::move(trainable), world_size_, std::move(tags), true,
                  stored);
}

int64_t FlatPlan::shard_numel(bool trainable) const {
  int64_t numel = 0;
  for (const Group& group : groups_) numel += group.trainable == trainable ? group.shard_numel : 0;
  return numel;
}

std::vector<int64_t> FlatPlan::table() const {
  std::vector<int64_t> words = {kTableMagic, static_cast<int64_t>(sizes_.size()),
                                static_cast<int64_t>(pieces_.size()), world_size_ * shard_bytes_};
  words.reserve(kTableHeader + sizes_.size() + kPieceWords * pieces_.size());
  words.insert(words.end(), sizes_.begin(), sizes_.end());
  for (const Piece& piece : pieces_) {
    words.push_back(piece.rank * shard_bytes_ + piece.byte_offset);
    words.push_back(piece.tensor);
    words.push_back(piece.tensor_start * 8 + static_cast<int64_t>(piece.dtype));
    words.push_back(piece.count);
  }
  return words;
}

std::vector<int64_t> FlatPlan::tiles() const {
  std::vector<int64_t> words;
  for (size_t p = 0; p < pieces_.size(); ++p) {
    const int64_t step = kTileBytes / dtype_size(pieces_[p].dtype);
    for (int64_t first = 0; first < pieces_[p].count; first += step) {
      words.push_back(static_cast<int64_t>(p));
      words.push_back(first);
    }
  }
  return words;
}

bool FlatPlan::operator==(const FlatPlan& other) const {
  return world_size_ == other.world_size_ && sizes_ == other.sizes_ && dtypes_ == other.dtypes_ &&
         trainable_ == other.trainable_ && tags_ == other.tags_ && has_stored_ == other.has_stored_ &&
         (!has_stored_ || stored_ == other.stored_);
}

size_t FlatPlan::hash() const {
  size_t seed = mix(static_cast<size_t>(world_size_), has_stored_ ? 1 + static_cast<size_t>(stored_) : 0);
  for (size_t i = 0; i < sizes_.size(); ++i) {
    seed = mix(seed, static_cast<size_t>(sizes_[i]));
    seed = mix(seed, static_cast<size_t>(dtypes_[i]) * 2 + trainable_[i]);
    seed = mix(seed, static_cast<size_t>(tags_[i]));
  }
  return seed;
}

}  // namespace moe_zero
