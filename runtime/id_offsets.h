#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "graph/archive.h"

namespace ikbo::runtime {

/// Whole numbers that the archive holds and the graph adds to ids, so that several fields share one table.
class IdOffsets {
 public:
  explicit IdOffsets(const graph::Archive& archive);

  /// What a value adds along its last dimension (one number where it adds the same everywhere), if it is a constant of
  /// the archive or a cast, copy, view or cut of one. Nothing for any other value.
  std::optional<std::vector<std::int64_t>> along_last(const std::string& value) const;

 private:
  std::optional<at::Tensor> constant(const std::string& value) const;

  const graph::Archive& archive_;
  std::unordered_map<std::string, const graph::Weight*> weights_;
  std::unordered_map<std::string, const graph::Node*> makers_;
};

}  // namespace ikbo::runtime
