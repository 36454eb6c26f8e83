#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "graph/specification.h"

namespace ikbo::graph {

/// Bags of many lengths as tensors: those of a JaggedInput.
struct JaggedRows {
  std::vector<at::Tensor> values;
  at::Tensor offsets;
};

/// Throws ikbo::Error, with the name of the input, unless offsets (any integers, on the CPU) begin at 0, never decrease
/// and stay within `total` values. Fewer values than there are is no error: operators leave out what follows.
void check_offsets(const JaggedInput& input, const at::Tensor& offsets, std::int64_t total);
/// Where each bag begins, and where the last one ends (int64 [rows + 1]). Throws ikbo::Error as check_offsets does, and
/// where offsets do not end with the values.
at::Tensor bag_bounds(const JaggedInput& input, const at::Tensor& offsets, const at::Tensor& values);
/// Offsets of bags that begin and end at `bounds`, in the input's form.
at::Tensor bag_offsets(const JaggedInput& input, const at::Tensor& bounds, at::ScalarType type);
/// The bags that `rows` (int64) names, in its order: what index_select is for rows of one length. Throws ikbo::Error as
/// bag_bounds does, and where there are several values of which one has more entries than another. Of bags without
/// values, offsets may be any.
JaggedRows select_bags(const JaggedInput& input, const JaggedRows& bags, const at::Tensor& rows);

}  // namespace ikbo::graph
