#pragma once

#include <string>
#include <utility>
#include <vector>

#include "graph/archive.h"
#include "graph/specification.h"
#include "transform/builder.h"
#include "transform/rewriter.h"
#include "transform/transform.h"

namespace ikbo::transform {

/// Puts the new program together: what a caller passes, signature, ranges, guards, sample inputs, specification,
/// report.
struct Assembly {
  Mode mode = Mode::kIkbo;
  std::vector<graph::InputEntry> inputs;  // the original's, in its order
  std::vector<graph::PackedInput> packed;
  std::vector<graph::JaggedInput> jagged;
  std::string index;       // of the new program: says which user each candidate belongs to
  bool own_index = false;  // it is an input of the original
  std::string user_symbol;
  std::string candidate_symbol;
  std::vector<std::string> retired_symbols;  // batch symbols of the original
  graph::Range user_range;
  graph::Range candidate_range;

  /// Splits a packed input's request-only columns into an input of their own; returns the parts that the original
  /// input then is.
  Parts split_packed(Builder& builder, const graph::InputEntry& entry, const graph::TensorMeta& meta,
                     const std::vector<std::pair<std::int64_t, std::int64_t>>& user_columns);

  void finish(const graph::Archive& source, const graph::Graph& original, Builder& builder, Result& result);

 private:
  void drop_dead(Builder& builder, const graph::Graph& original);
  void sign(const graph::Archive& source, Builder& builder, Result& result);
  void guard(const graph::Archive& source, Result& result);
  void sample(const graph::Archive& source, Result& result);
  void specify(const Builder& builder, Result& result);
};

}  // namespace ikbo::transform
