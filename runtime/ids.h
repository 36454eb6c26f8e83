#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "graph/archive.h"

namespace ikbo::runtime {

/// A half-open range of one dimension.
struct DimRange {
  std::int64_t dim = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool operator==(const DimRange&) const = default;
};

/// Elements of an input that the graph uses as indices into a table, and the values they may have.
struct IdRange {
  std::string value;              // the input in the graph
  std::vector<DimRange> columns;  // which elements; empty: all
  std::int64_t min = 0;           // inclusive
  std::int64_t max = 0;           // inclusive
  std::string table;              // weight or operator that is indexed
};

/// Follows every index operand (of embedding, index_select, gather, index, ...) back through casts, views, slices,
/// concatenations, added constants and the like to the inputs it comes from. An operand that is computed in another way
/// (clamped, masked, hashed) says nothing of the input, and gives no range.
std::vector<IdRange> find_id_ranges(const graph::Archive& archive);

/// The first element of `input` that lies outside `range`.
struct BadId {
  std::vector<std::int64_t> position;
  std::int64_t value = 0;
};
std::optional<BadId> find_bad_id(const at::Tensor& input, const IdRange& range);

/// The part of `input` that `range` speaks of, as a view.
at::Tensor id_elements(const at::Tensor& input, const IdRange& range);

}  // namespace ikbo::runtime
