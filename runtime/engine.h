#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "graph/archive.h"

namespace ikbo::runtime {

struct EngineOptions {
  std::string device = "cpu";  // as open_device takes it
  /// Weights, floating-point inputs and every floating type named in the graph become float64: the reference that
  /// `verify` compares with.
  bool float64 = false;
  int threads = 0;     // budget of intra-operator threads over all concurrent runs; 0: all cores
  int concurrent = 1;  // runs at a time; more callers wait
};

/// What one executed operator cost, for `bench`.
struct NodeCost {
  std::string node;
  std::string target;
  double microseconds = 0;
  std::int64_t allocated_bytes = 0;  // by the allocator during the call, temporaries included
  std::int64_t output_bytes = 0;     // of new storage in the results
  std::int64_t peak_bytes = 0;       // in use at a time during the call, all earlier results that are alive included
};

/// Executes an exported program. Safe for concurrent calls.
class Engine {
 public:
  virtual ~Engine() = default;
  /// `inputs` in the order of graph::user_inputs(program). Throws ikbo::Error for a wrong number, rank, size or type,
  /// before anything runs; sizes are checked against the archive's symbolic sizes and their ranges.
  virtual std::vector<at::Tensor> run(std::span<const at::Tensor> inputs) const = 0;
  /// The same, and what every operator cost. Slower; for measurements only.
  virtual std::vector<at::Tensor> run_profiled(std::span<const at::Tensor> inputs,
                                               std::vector<NodeCost>& costs) const = 0;
};

/// Executes the graph through PyTorch's dispatcher, an operator at a time: every ATen operator works, nothing is
/// compiled. Keeps what it needs of the archive.
std::unique_ptr<Engine> make_eager_engine(const graph::Archive& archive, const EngineOptions& options);

}  // namespace ikbo::runtime
