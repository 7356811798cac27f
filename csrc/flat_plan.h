// Layout of one layer's tensors in a flat buffer that is sharded over ranks. Free of torch.
//
// The flat buffer is [world_size, shard_bytes]; rank r owns row r. Tensors are collected in groups of equal
// (trainable, tag, dtype); a group is the concatenation of its tensors, padded at the end so that it splits into
// world_size equal parts. A row is the concatenation of one part of every group, trainable groups first, so that
// what the optimizer owns is a prefix of the row.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moe_zero {

// The numbering is shared with the operators (flat_copy.h) and travels in FlatPlan::table().
enum class DType : int32_t { kFloat64 = 0, kFloat32 = 1, kFloat16 = 2, kBFloat16 = 3 };

DType dtype_from_name(const std::string& name);  // throws std::invalid_argument
const char* dtype_name(DType dtype);
int64_t dtype_size(DType dtype);

struct Group {
  bool trainable;
  int64_t tag;
  DType dtype;                   // as stored in the flat buffer
  std::vector<int64_t> members;  // tensor indices in order
  int64_t shard_numel;           // elements per rank, a multiple of FlatPlan::kAlignment
  int64_t element_offset;        // of this group's part in a row, in elements of the row
  int64_t byte_offset;           // the same in bytes
};

// A run of one tensor that is contiguous in the flat buffer. tensor == -1: zero padding.
struct Piece {
  int64_t tensor;
  int64_t tensor_start;  // first element, in the tensor's row-major order
  int64_t rank;
  int64_t byte_offset;  // in the row of that rank
  int64_t count;        // elements
  DType dtype;          // as stored
};

class FlatPlan {
 public:
  // 16 elements are at least 16 bytes whatever the dtype a group is stored in, so that a partition into elements
  // can be shared by parameters, gradients and fp32 masters, and vector loads are aligned in all of them.
  static constexpr int64_t kAlignment = 16;

  // `stored`: one dtype that all groups are stored in, whatever the dtypes that group them (see cast).
  FlatPlan(std::vector<int64_t> sizes, std::vector<DType> dtypes, std::vector<bool> trainable, int64_t world_size,
           std::vector<int64_t> tags, bool has_stored = false, DType stored = DType::kFloat32);

  FlatPlan cast(DType stored, bool trainable_only) const;

  int64_t world_size() const { return world_size_; }
  const std::vector<int64_t>& sizes() const { return sizes_; }
  const std::vector<DType>& grouping_dtypes() const { return dtypes_; }
  DType stored_dtype(size_t tensor) const { return has_stored_ ? stored_ : dtypes_[tensor]; }
  const std::vector<bool>& trainable() const { return trainable_; }
  const std::vector<int64_t>& tags() const { return tags_; }
  bool has_stored() const { return has_stored_; }
  DType stored() const { return stored_; }
  const std::vector<Group>& groups() const { return groups_; }
  const std::vector<Piece>& pieces() const { return pieces_; }  // in the order of the flat buffer, padding included
  int64_t shard_numel(bool trainable) const;
  int64_t shard_bytes() const { return shard_bytes_; }
  int64_t trainable_bytes() const { return trainable_bytes_; }

  // What the operators read: header, sizes of the tensors, pieces. See flat_table.h.
  std::vector<int64_t> table() const;
  std::vector<int64_t> tiles() const;

  bool operator==(const FlatPlan& other) const;
  size_t hash() const;

 private:
  std::vector<int64_t> sizes_;
  std::vector<DType> dtypes_;
  std::vector<bool> trainable_;
  std::vector<int64_t> tags_;
  int64_t world_size_;
  bool has_stored_;
  DType stored_;
  std::vector<Group> groups_;
  std::vector<Piece> pieces_;
  int64_t shard_bytes_ = 0;
  int64_t trainable_bytes_ = 0;
};

}  // namespace moe_zero
