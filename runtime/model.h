#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "graph/archive.h"
#include "graph/specification.h"
#include "runtime/engine.h"
#include "runtime/ids.h"
#include "runtime/requests.h"

namespace ikbo::runtime {

/// The specification inside a transformed archive. Throws ikbo::Error where there is none.
graph::Specification specification_of(const graph::Archive& archive);
bool is_transformed(const graph::Archive& archive);

/// The scores of one request: every output of the model, rows in the order of the request's candidates.
struct Scores {
  std::vector<at::Tensor> outputs;
};

/// A transformed archive ready to score. Safe for concurrent calls. On a GPU, the configurations of kernels that the
/// archive holds for that kind of device are used from here on.
class Model {
 public:
  Model(const graph::Archive& archive, const EngineOptions& options);

  /// Scores all requests in one call of the model. Everything is checked first, ids included; a request without
  /// candidates gets empty scores. Throws ikbo::Error naming request, input and position.
  std::vector<Scores> score(std::span<const Request> requests) const;

  /// Joins and checks, without running.
  Batch prepare(std::span<const Request> requests) const;

  const RequestLayout& layout() const { return layout_; }
  const graph::Specification& specification() const { return specification_; }
  const std::vector<IdRange>& id_ranges() const { return ids_; }
  const Engine& engine() const { return *engine_; }

 private:
  void check_ids(std::span<const Request> requests) const;

  graph::Specification specification_;
  RequestLayout layout_;
  std::vector<IdRange> ids_;
  std::vector<graph::TensorMeta> outputs_;
  c10::Device device_;
  std::unique_ptr<Engine> engine_;
};

/// Splits `outputs` of a call of `batch` into those of its requests. An output whose first size is not the number of
/// candidates has no row a candidate, and is refused.
std::vector<Scores> split_scores(const Batch& batch, std::span<const at::Tensor> outputs);

/// Checks the index itself: int32 or int64, one row a candidate, every value in [0, users). Throws ikbo::Error naming
/// the position and the value.
void check_candidate_to_user(const at::Tensor& candidate_to_user, std::int64_t users);

}  // namespace ikbo::runtime
