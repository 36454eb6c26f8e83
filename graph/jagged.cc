#include "graph/jagged.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/zeros.h>

#include "graph/error.h"

namespace ikbo::graph {

at::Tensor bag_bounds(const JaggedInput& input, const at::Tensor& offsets, const at::Tensor& values) {
  const std::int64_t total = values.size(0);
  at::Tensor bounds = offsets.to(at::kLong);
  if (!input.includes_end) bounds = at::cat({bounds, at::full({1}, total, at::kLong)});
  if (bounds.numel() == 0) fail("input '{}' is empty: it must say where the last bag ends", input.offsets);
  const auto* at = bounds.const_data_ptr<std::int64_t>();
  const std::int64_t last = bounds.numel() - 1;
  if (at[0] != 0) fail("input '{}' begins with {}: offsets of bags begin with 0", input.offsets, at[0]);
  for (std::int64_t i = 1; i <= last; ++i) {
    if (at[i] >= at[i - 1] && at[i] <= total) continue;
    fail("input '{}' has {} after {} at position {}: offsets of bags never decrease, and there are {} values",
         input.offsets, at[i], at[i - 1], i, total);
  }
  if (at[last] != total) fail("input '{}' ends with {}, but there are {} values", input.offsets, at[last], total);
  return bounds;
}

at::Tensor bag_offsets(const JaggedInput& input, const at::Tensor& bounds, at::ScalarType type) {
  return (input.includes_end ? bounds : bounds.slice(0, 0, bounds.numel() - 1)).to(type).contiguous();
}

JaggedRows select_bags(const JaggedInput& input, const JaggedRows& bags, const at::Tensor& rows) {
  const at::Tensor bounds = bag_bounds(input, bags.offsets, bags.values.at(0));
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
