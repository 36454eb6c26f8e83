#include "graph/jagged.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/zeros.h>

#include "graph/error.h"

namespace ikbo::graph {

void check_offsets(const JaggedInput& input, const at::Tensor& offsets, std::int64_t total) {
  const at::Tensor bounds = offsets.to(at::kLong).contiguous();
  if (bounds.numel() == 0) {
    if (!input.includes_end) return;
    fail("input '{}' is empty: it must say where the last bag ends", input.offsets);
  }
  const auto* at = bounds.const_data_ptr<std::int64_t>();
  if (at[0] != 0) fail("input '{}' begins with {}: offsets of bags begin with 0", input.offsets, at[0]);
  for (std::int64_t i = 1; i < bounds.numel(); ++i) {
    if (at[i] >= at[i - 1] && at[i] <= total) continue;
    fail("input '{}' has {} after {} at position {}: offsets of bags never decrease, and there are {} values",
         input.offsets, at[i], at[i - 1], i, total);
  }
}

at::Tensor bag_bounds(const JaggedInput& input, const at::Tensor& offsets, const at::Tensor& values) {
  const std::int64_t total = values.size(0);
  check_offsets(input, offsets, total);
  const at::Tensor bounds = offsets.to(at::kLong);
  if (!input.includes_end) return at::cat({bounds, at::full({1}, total, at::kLong)});
  const auto last = bounds[bounds.numel() - 1].item<std::int64_t>();
  if (last != total) fail("input '{}' ends with {}, but there are {} values", input.offsets, last, total);
  return bounds;
}

at::Tensor bag_offsets(const JaggedInput& input, const at::Tensor& bounds, at::ScalarType type) {
  return (input.includes_end ? bounds : bounds.slice(0, 0, bounds.numel() - 1)).to(type).contiguous();
}

JaggedRows select_bags(const JaggedInput& input, const JaggedRows& bags, const at::Tensor& rows) {
  if (bags.values.empty()) {
    return {{}, bag_offsets(input, at::zeros({rows.numel() + 1}, at::kLong), bags.offsets.scalar_type())};
  }
  for (const at::Tensor& values : bags.values) {
    if (values.size(0) == bags.values[0].size(0)) continue;
    fail("'{}' and '{}' are values of the same bags ('{}'), but have {} and {} entries", input.values[0],
         input.values[static_cast<std::size_t>(&values - bags.values.data())], input.offsets, bags.values[0].size(0),
         values.size(0));
  }
  const at::Tensor bounds = bag_bounds(input, bags.offsets, bags.values[0]);
  const at::Tensor begins = bounds.slice(0, 0, bounds.numel() - 1).index_select(0, rows);
  const at::Tensor lengths = bounds.slice(0, 1).index_select(0, rows) - begins;
  const at::Tensor new_bounds = at::cat({at::zeros({1}, at::kLong), lengths.cumsum(0)});
  const at::Tensor moved = begins - new_bounds.slice(0, 0, rows.numel());
  const at::Tensor total = new_bounds[rows.numel()];
  const at::Tensor entries = at::arange(total.item<std::int64_t>(), at::kLong) + at::repeat_interleave(moved, lengths);
  JaggedRows selected{{}, bag_offsets(input, new_bounds, bags.offsets.scalar_type())};
  for (const at::Tensor& values : bags.values) selected.values.push_back(values.index_select(0, entries));
  return selected;
}

}  // namespace ikbo::graph
