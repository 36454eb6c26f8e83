#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <limits>

#include "graph/error.h"
#include "runtime/requests.h"

namespace ikbo::runtime {
namespace {

using graph::Side;

const at::Tensor& tensor_of(const Request& request, const RequestInput& input) {
  const auto& table = input.side == Side::kRequestOnly ? request.user
                      : input.side == Side::kCandidate ? request.candidates
                                                       : request.shared;
  const auto found = table.find(input.value);
  if (found == table.end() || !found->second.defined()) {
    fail("request \"{}\": input '{}' is missing", request.id, input.name);
  }
  return found->second;
}

// A dimension that the model leaves open must still be the same in all requests of a call.
void check_row(const Request& request, const RequestInput& input, const at::Tensor& tensor, const Request& first,
               const at::Tensor& model) {
  const auto skip = input.side == Side::kCandidate ? std::size_t{1} : std::size_t{0};
  if (tensor.scalar_type() != graph::scalar_type(input.dtype)) {
    fail("request \"{}\": input '{}' is {}, expected {}", request.id, input.name,
         graph::dtype_name(graph::dtype_of(tensor.scalar_type())), graph::dtype_name(input.dtype));
  }
  if (tensor.dim() != static_cast<std::int64_t>(input.row.size() + skip)) {
    fail("request \"{}\": input '{}' has {} dimensions, expected {}", request.id, input.name, tensor.dim(),
         input.row.size() + skip);
  }
  if (skip == 1 && tensor.size(0) != request.count) {
    fail("request \"{}\": input '{}' has {} rows for {} candidates", request.id, input.name, tensor.size(0),
         request.count);
  }
  if (tensor.sizes().slice(skip) == model.sizes().slice(skip)) return;
  for (std::size_t d = skip; d < static_cast<std::size_t>(tensor.dim()); ++d) {
    const auto dim = static_cast<std::int64_t>(d);
    if (tensor.size(dim) != model.size(dim)) {
      fail("request \"{}\": input '{}' has size {} where request \"{}\" has {}: one call needs them equal", request.id,
           input.name, tensor.size(dim), first.id, model.size(dim));
    }
  }
}

at::Tensor join_input(const RequestInput& input, const std::vector<const Request*>& requests) {
  const Request& first = *requests.front();
  std::vector<at::Tensor> parts;
  for (const Request* request : requests) {
    const at::Tensor& tensor = tensor_of(*request, input);
    check_row(*request, input, tensor, first, parts.empty() ? tensor : parts.front());
    if (input.side == Side::kShared && !parts.empty()) {
      if (!at::equal(tensor, parts.front())) {
        fail("request \"{}\": shared input '{}' differs from that of request \"{}\"", request->id, input.name,
             first.id);
      }
      continue;
    }
    parts.push_back(tensor);
  }
  if (input.side == Side::kShared) return parts.front();
  return input.side == Side::kRequestOnly ? at::stack(parts) : parts.size() == 1 ? parts.front() : at::cat(parts);
}

at::Tensor make_index(const RequestInput& input, const std::vector<const Request*>& requests, std::int64_t candidates) {
  at::Tensor index = at::empty({candidates}, at::kInt);
  auto* out = index.mutable_data_ptr<std::int32_t>();
  for (std::size_t user = 0; user < requests.size(); ++user) {
    out = std::fill_n(out, requests[user]->count, static_cast<std::int32_t>(user));
  }
  return index.to(graph::scalar_type(input.dtype));
}

}  // namespace

Batch join_requests(const RequestLayout& layout, std::span<const Request> requests) {
  Batch batch;
  batch.offsets.push_back(0);
  std::vector<const Request*> active;
  for (const Request& request : requests) {
    if (request.count > 0) active.push_back(&request);
    batch.offsets.push_back(batch.offsets.back() + request.count);
  }
  batch.users = static_cast<std::int64_t>(active.size());
  if (active.empty()) return batch;
  if (batch.candidates() > std::numeric_limits<std::int32_t>::max()) {
    fail("{} candidates in one call: at most 2147483647", batch.candidates());
  }
  for (const RequestInput& input : layout.inputs()) {
    batch.inputs.push_back(input.side == Side::kIndex ? make_index(input, active, batch.candidates())
                                                      : join_input(input, active));
  }
  return batch;
}

std::vector<at::Tensor> broadcast_inputs(const graph::Program& original, const graph::Specification& specification,
                                         const RequestLayout& layout, std::span<const at::Tensor> inputs) {
  at::Tensor index;
  std::map<std::string, std::size_t> position;
  for (std::size_t i = 0; i < layout.inputs().size(); ++i) {
    position[layout.inputs()[i].value] = i;
    if (layout.inputs()[i].side == Side::kIndex) index = inputs[i].to(at::kLong);
  }
  if (!index.defined()) fail("the transformed archive has no input candidate_to_user");
  const auto rows = [&](const std::string& value) {
    const auto found = position.find(value);
    if (found == position.end()) fail("the transformed archive has no input '{}'", value);
    const at::Tensor& tensor = inputs[found->second];
    const Side side = layout.inputs()[found->second].side;
    return side == Side::kRequestOnly ? tensor.index_select(0, index) : tensor;
  };
  std::vector<at::Tensor> result;
  for (const graph::UserInput& user : graph::user_inputs(original)) {
    const auto packed = std::find_if(
        specification.packed.begin(), specification.packed.end(),
        [&](const graph::PackedInput& p) { return p.name == user.name || p.candidate_value == user.value; });
    if (packed == specification.packed.end()) {
      result.push_back(rows(user.value));
      continue;
    }
    // Columns go back to where they were: the user's ranges in order, the candidate's in between.
    const at::Tensor user_part = rows(packed->user_value);
    const at::Tensor candidate_part = rows(packed->candidate_value);
    std::vector<at::Tensor> parts;
    std::int64_t from_user = 0;
    std::int64_t from_candidate = 0;
    std::int64_t column = 0;
    for (const auto& [begin, end] : packed->user_columns) {
      parts.push_back(candidate_part.narrow(1, from_candidate, begin - column));
      from_candidate += begin - column;
      parts.push_back(user_part.narrow(1, from_user, end - begin));
      from_user += end - begin;
      column = end;
    }
    parts.push_back(candidate_part.narrow(1, from_candidate, packed->columns - column));
    result.push_back(at::cat(parts, 1));
  }
  return result;
}

}  // namespace ikbo::runtime
