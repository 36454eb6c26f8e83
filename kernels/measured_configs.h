// Configurations of the linear-compression kernel that were measured on a device, and which of them serves a shape.
// Plain host code, no GPU needed.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/linear_compression_config.h"
#include "kernels/scalar_type.h"

namespace ikbo::kernels {

// The sizes that a model fixes; the batches are free.
struct MeasuredShape {
  ScalarType type = ScalarType::kBFloat16;  // kFloat16 or kBFloat16
  int64_t m = 0;
  int64_t n = 0;
  int64_t k_candidate = 0;
  std::vector<int64_t> k_broadcast;  // one entry a broadcast term

  bool operator==(const MeasuredShape&) const = default;
};

// The fastest configuration at one point of the batches.
struct MeasuredPoint {
  int64_t batch = 0;
  std::vector<int64_t> rows_broadcast;  // one entry a broadcast term
  int block_m = 0;
  int cluster = 1;

  bool operator==(const MeasuredPoint&) const = default;
};

// A point says nothing of batches that are more than this factor smaller or larger: there the model chooses.
constexpr double kFarthestBatch = 4;

// The legal configurations that are measured: one for each tile height and form of cluster. Of two that differ in their
// broadcast tiles alone, that is the one of the lower modelled time.
std::vector<LinearCompressionConfig> measurable_linear_compression_configs(const LinearCompressionShape& shape,
                                                                           int multiprocessors);

// What was measured on one device. All configurations give the same bits, so any choice is right; it is about time.
class MeasuredConfigs {
 public:
  explicit MeasuredConfigs(int multiprocessors) : multiprocessors_(multiprocessors) {}

  // Adds points of a shape; one at the same batches as before takes its place. Throws std::invalid_argument, and adds
  // none of them, where sizes are not those of a shape or a configuration is none that the kernel was built with.
  void add(const MeasuredShape& shape, const std::vector<MeasuredPoint>& points);

  // The configuration of the nearest point that was measured for these sizes of W and E and this type, by the Euclidean
  // distance of the logarithms of the batch and of each term's rows; nothing where no point is within kFarthestBatch of
  // the batch. Of points that are equally far the first in the order of batches counts, whatever order they came in.
  std::optional<LinearCompressionConfig> find(const LinearCompressionShape& shape, ScalarType type) const;

 private:
  struct Entry {
    MeasuredShape shape;
    std::vector<MeasuredPoint> points;  // in the order of batch and rows
  };

  int multiprocessors_;
  std::vector<Entry> entries_;  // few: one for each operator of a model
};

}  // namespace ikbo::kernels
