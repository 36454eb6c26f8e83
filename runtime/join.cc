#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "graph/error.h"
#include "graph/jagged.h"
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
  const bool values = input.bags == RequestInput::Bags::kValues;
  const auto skip = values || input.side == Side::kCandidate ? std::size_t{1} : std::size_t{0};
  if (tensor.scalar_type() != graph::scalar_type(input.dtype)) {
    fail("request \"{}\": input '{}' is {}, expected {}", request.id, input.name,
         graph::dtype_name(graph::dtype_of(tensor.scalar_type())), graph::dtype_name(input.dtype));
  }
  if (tensor.dim() != static_cast<std::int64_t>(input.row.size() + skip)) {
    fail("request \"{}\": input '{}' has {} dimensions, expected {}", request.id, input.name, tensor.dim(),
         input.row.size() + skip);
  }
  if (skip == 1 && !values && tensor.size(0) != request.count) {
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
  const bool rows = input.side == Side::kRequestOnly && input.bags == RequestInput::Bags::kNone;
  return rows ? at::stack(parts) : parts.size() == 1 ? parts.front() : at::cat(parts);
}

// Where every bag of all requests begins: a user's is all of its values, a candidate's what its request says.
at::Tensor join_offsets(const RequestLayout& layout, const graph::JaggedInput& bags,
                        const std::vector<const Request*>& requests) {
  const RequestInput& input = layout.inputs()[layout.position(bags.offsets)];
  if (bags.values.empty()) {
    std::int64_t rows = 0;
    for (const Request* request : requests) rows += input.side == Side::kCandidate ? request->count : 1;
    return graph::bag_offsets(bags, at::zeros({rows + 1}, at::kLong), graph::scalar_type(input.dtype));
  }
  std::vector<at::Tensor> parts{at::zeros({1}, at::kLong)};
  std::int64_t total = 0;
  for (const Request* request : requests) {
    const at::Tensor& values = tensor_of(*request, layout.inputs()[layout.position(bags.values.front())]);
    for (const std::string& name : bags.values) {
      const RequestInput& other = layout.inputs()[layout.position(name)];
      if (tensor_of(*request, other).size(0) == values.size(0)) continue;
      fail("request \"{}\": input '{}' has {} values where '{}' has {}, and they belong together", request->id,
           other.name, tensor_of(*request, other).size(0), bags.values.front(), values.size(0));
    }
    if (input.side == Side::kCandidate) {
      const at::Tensor bounds = graph::bag_bounds(bags, tensor_of(*request, input), values);
      if (bounds.numel() != request->count + 1) {
        fail("request \"{}\": input '{}' has {} bags for {} candidates", request->id, input.name, bounds.numel() - 1,
             request->count);
      }
      parts.push_back(bounds.slice(0, 1) + total);
    } else {
      parts.push_back(at::full({1}, total + values.size(0), at::kLong));
    }
    total += values.size(0);
  }
  return graph::bag_offsets(bags, at::cat(parts), graph::scalar_type(input.dtype));
}

at::Tensor make_index(const RequestInput& input, const std::vector<const Request*>& requests, std::int64_t candidates) {
  at::Tensor index = at::empty({candidates}, at::kInt);
  auto* out = index.mutable_data_ptr<std::int32_t>();
  for (std::size_t user = 0; user < requests.size(); ++user) {
    out = std::fill_n(out, requests[user]->count, static_cast<std::int32_t>(user));
  }
  return index.to(graph::scalar_type(input.dtype));
}

// A packed matrix put together again: the user's ranges in order, the candidate's columns in between.
at::Tensor unpacked(const graph::PackedInput& packed, const at::Tensor& user_part, const at::Tensor& candidate_part) {
  std::vector<at::Tensor> parts;
  std::int64_t from_user = 0;
  std::int64_t from_candidate = 0;
  std::int64_t column = 0;
  for (const auto& [begin, end] : packed.user_columns) {
    parts.push_back(candidate_part.narrow(1, from_candidate, begin - column));
    from_candidate += begin - column;
    parts.push_back(user_part.narrow(1, from_user, end - begin));
    from_user += end - begin;
    column = end;
  }
  parts.push_back(candidate_part.narrow(1, from_candidate, packed.columns - column));
  return at::cat(parts, 1);
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
    if (input.bags == RequestInput::Bags::kOffsets) {
      batch.inputs.emplace_back();  // below, once the values are known to be tensors of the right rank
    } else {
      batch.inputs.push_back(input.side == Side::kIndex ? make_index(input, active, batch.candidates())
                                                        : join_input(input, active));
    }
  }
  for (const graph::JaggedInput& bags : layout.jagged()) {
    batch.inputs[layout.position(bags.offsets)] = join_offsets(layout, bags, active);
  }
  return batch;
}

std::vector<OriginalCall> original_calls(const graph::Program& original, const graph::Specification& specification,
                                         const RequestLayout& layout, std::span<const at::Tensor> inputs) {
  at::Tensor index;
  std::string index_value;
  std::map<std::string, std::size_t> position;
  for (std::size_t i = 0; i < layout.inputs().size(); ++i) {
    position[layout.inputs()[i].value] = i;
    if (layout.inputs()[i].side != Side::kIndex) continue;
    index = inputs[i].to(at::kLong);
    index_value = layout.inputs()[i].value;
  }
  if (!index.defined()) fail("the transformed archive has no input candidate_to_user");
  const std::vector<graph::UserInput> originals = graph::user_inputs(original);
  const graph::Expr batch = graph::Expr::symbol(specification.candidate_symbol);
  const bool own_index = std::any_of(originals.begin(), originals.end(),
                                     [&](const graph::UserInput& input) { return input.value == index_value; });
  // Where the original has the rows of users, not of candidates: one of them, or all for its own index to choose from.
  const auto leading = [&](const std::string& value) -> graph::Expr {
    const auto meta = original.graph.tensors.find(value);
    return meta == original.graph.tensors.end() || meta->second.sizes.empty() ? batch : meta->second.sizes[0];
  };
  const auto side_of = [&](const std::string& value) {
    const auto found = position.find(value);
    if (found == position.end()) fail("the transformed archive has no input '{}'", value);
    return layout.inputs()[found->second].side;
  };
  // Rows for the candidates of one user, or of all where `user` is negative.
  const auto rows = [&](const std::string& value, std::int64_t user, const at::Tensor& candidates) {
    const Side side = side_of(value);
    const at::Tensor& tensor = inputs[position.at(value)];
    if (side == Side::kRequestOnly) {
      const graph::Expr first = leading(value);
      if (own_index && !(first == batch)) return tensor;
      if (user >= 0 && first.is_integer(1)) return tensor.narrow(0, user, 1);
      return tensor.index_select(0, candidates.defined() ? index.index_select(0, candidates) : index);
    }
    return side == Side::kCandidate && candidates.defined() ? tensor.index_select(0, candidates) : tensor;
  };
  // Bags of many lengths: each candidate's copy of its user's.
  std::map<std::string, at::Tensor> copied;
  for (const graph::JaggedInput& bags : layout.jagged()) {
    if (side_of(bags.offsets) != Side::kRequestOnly) continue;
    graph::JaggedRows own{{}, inputs[position.at(bags.offsets)]};
    for (const std::string& value : bags.values) own.values.push_back(inputs[position.at(value)]);
    const graph::JaggedRows of_candidates = graph::select_bags(bags, own, index);
    copied[bags.offsets] = of_candidates.offsets;
    for (std::size_t i = 0; i < bags.values.size(); ++i) copied[bags.values[i]] = of_candidates.values[i];
  }
  const auto call = [&](std::int64_t user, const at::Tensor& candidates) {
    OriginalCall made;
    made.candidates = candidates;
    for (const graph::UserInput& input : originals) {
      if (const auto bags = copied.find(input.value); bags != copied.end()) {
        made.inputs.push_back(bags->second);
        continue;
      }
      const auto packed = std::find_if(
          specification.packed.begin(), specification.packed.end(),
          [&](const graph::PackedInput& p) { return p.name == input.name || p.candidate_value == input.value; });
      made.inputs.push_back(packed == specification.packed.end()
                                ? rows(input.value, user, candidates)
                                : unpacked(*packed, rows(packed->user_value, user, candidates),
                                           rows(packed->candidate_value, user, candidates)));
    }
    return made;
  };
  const bool one_user = std::any_of(originals.begin(), originals.end(), [&](const graph::UserInput& input) {
    return position.contains(input.value) && side_of(input.value) == Side::kRequestOnly &&
           leading(input.value).is_integer(1);
  });
  if (!one_user) return {call(-1, at::Tensor())};
  std::map<std::int64_t, std::vector<std::int64_t>> of_user;
  for (std::int64_t i = 0; i < index.numel(); ++i) of_user[index[i].item<std::int64_t>()].push_back(i);
  std::vector<OriginalCall> calls;
  const auto range = original.ranges.find(specification.candidate_symbol);
  const auto fewest = static_cast<std::size_t>(range == original.ranges.end() ? 1 : range->second.min.value_or(1));
  for (auto& [user, candidates] : of_user) {
    if (candidates.size() < fewest) candidates.resize(fewest, candidates.back());
    calls.push_back(call(user, at::tensor(candidates, at::kLong)));
  }
  return calls;
}

}  // namespace ikbo::runtime
