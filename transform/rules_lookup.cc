// Operators that read or write through an index.
#include <algorithm>

#include "transform/rules.h"

namespace ikbo::transform {
namespace {

RuleResult one(const Batch& batch) {
  return std::vector<std::optional<Batch>>{batch};
}

RuleResult embedding(const RuleInput& in) {
  const Batch* b = in.batch_of("indices");
  if (b == nullptr || !in.shared("weight")) return std::nullopt;
  return one(*b);
}

RuleResult index_select(const RuleInput& in) {
  const std::string* self = in.tensor("self");
  const std::string* index = in.tensor("index");
  if (self == nullptr || index == nullptr) return std::nullopt;
  const auto d = in.dim("dim", in.rank(*self));
  if (!d) return std::nullopt;
  const Batch* of_self = in.batch(*self);
  const Batch* of_index = in.batch(*index);
  if (of_self != nullptr && of_index == nullptr && *d != of_self->axis) return one(*of_self);
  if (of_self == nullptr && of_index != nullptr && in.rank(*index) == 1) return one({*d, of_index->inner});
  return std::nullopt;
}

// gather and scatter along another dimension than the batch, all operands with the same rows.
RuleResult gather(const RuleInput& in) {
  const std::string* self = in.tensor("self");
  const Batch* b = self != nullptr ? in.batch(*self) : nullptr;
  if (b == nullptr) return std::nullopt;
  const auto d = in.dim("dim", in.rank(*self));
  if (!d || *d == b->axis) return std::nullopt;
  for (const std::string& name : in.operands()) {
    const Batch* o = in.batch(name);
    if (o == nullptr || !(*o == *b)) return std::nullopt;
  }
  return one(*b);
}

// index.Tensor(self, [None, ..., index, ...]) with one index tensor.
RuleResult index(const RuleInput& in) {
  const std::string* self = in.tensor("self");
  const auto* argument = in.node().find("indices");
  const auto* list = argument != nullptr ? std::get_if<graph::OptionalTensorListArg>(argument) : nullptr;
  std::vector<std::optional<std::string>> indices;
  if (list != nullptr) {
    indices = list->names;
  } else if (argument != nullptr) {
    for (const std::string& name : graph::value_names(*argument)) indices.emplace_back(name);
  }
  const auto given = std::count_if(indices.begin(), indices.end(), [](const auto& i) { return i.has_value(); });
  if (self == nullptr || given != 1) return std::nullopt;
  const auto at = static_cast<int>(
      std::find_if(indices.begin(), indices.end(), [](const auto& i) { return i.has_value(); }) - indices.begin());
  const std::string& name = *indices[static_cast<std::size_t>(at)];
  if (!graph::is_integral(in.meta(name).dtype) || in.meta(name).dtype == graph::DType::kUInt8) {
    return std::nullopt;  // a mask: the size depends on data
  }
  const Batch* of_self = in.batch(*self);
  const Batch* of_index = in.batch(name);
  if (of_self != nullptr && of_index != nullptr) return std::nullopt;
  if (of_index != nullptr) return one({at + of_index->axis, of_index->inner});
  if (of_self == nullptr || of_self->axis == at) return std::nullopt;
  return one({of_self->axis + (at < of_self->axis ? in.rank(name) - 1 : 0), of_self->inner});
}

RuleResult one_hot(const RuleInput& in) {
  const Batch* b = in.batch_of("self");
  const auto classes = in.integer("num_classes");
  if (b == nullptr || !classes || *classes <= 0) return std::nullopt;  // -1 reads the largest value of the batch
  return one(*b);
}

}  // namespace

void add_lookup_rules(RuleTable& table) {
  table["embedding"] = {embedding};
  table["index_select"] = {index_select};
  for (const char* name : {"gather", "scatter", "scatter_add", "scatter_reduce", "take_along_dim"})
    table[name] = {gather};
  table["index"] = {index};
  table["one_hot"] = {one_hot};
}

}  // namespace ikbo::transform
