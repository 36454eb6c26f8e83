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

// slice_scatter that takes the whole dimension, as x[:, i] = y is exported: start and end say so.
bool takes_everything(const RuleInput& in) {
  const auto is = [&](const char* name, std::int64_t value) {
    const auto* a = in.node().find(name);
    return a == nullptr || std::holds_alternative<graph::NoneArg>(*a) || in.integer(name) == value;
  };
  return is("start", 0) && is("end", INT64_MAX) && is("step", 1);
}

// select_scatter, slice_scatter: a row of `src` into a row of `self`, along another dimension than the batch.
RuleResult scatter_part(const RuleInput& in) {
  const std::string* self = in.tensor("self");
  const std::string* src = in.tensor("src");
  if (self == nullptr || src == nullptr) return std::nullopt;
  const int rank = in.rank(*self);
  const auto d = in.node().find("dim") == nullptr ? std::optional<int>(0) : in.dim("dim", rank);
  const bool drops = aten_name(in.node().target) == "select_scatter";
  const Batch* of_self = in.batch(*self);
  const Batch* of_src = in.batch(*src);
  if (!d || of_self == nullptr || of_src == nullptr) return std::nullopt;
  if (*d == of_self->axis && (drops || !takes_everything(in))) return std::nullopt;
  const Batch expected{of_self->axis - (drops && *d < of_self->axis ? 1 : 0), of_self->inner};
  if (!(*of_src == expected)) return std::nullopt;
  return one(*of_self);
}

// index_put(self, [mask], value): one value wherever a mask of the same rows says so.
// index_put(self, [None, ..., index, ...], values): at shared positions of another dimension than the batch.
RuleResult index_put(const RuleInput& in) {
  const Batch* b = in.batch_of("self");
  const std::string* values = in.tensor("values");
  const auto* argument = in.node().find("indices");
  if (b == nullptr || values == nullptr || argument == nullptr) return std::nullopt;
  const int rank = in.rank(*in.tensor("self"));
  const auto& sizes = in.meta(*values).sizes;
  const bool one_value = in.batch(*values) == nullptr &&
                         std::all_of(sizes.begin(), sizes.end(), [](const auto& e) { return e.is_integer(1); });
  std::vector<std::optional<std::string>> indices;
  if (const auto* list = std::get_if<graph::OptionalTensorListArg>(argument)) {
    indices = list->names;
  } else {
    for (const std::string& name : graph::value_names(*argument)) indices.emplace_back(name);
  }
  int at = 0;
  int given = 0;
  for (const auto& name : indices) {
    if (!name) {
      ++at;
      continue;
    }
    if (++given > 1) return std::nullopt;
    const Batch* own = in.batch(*name);
    if (in.meta(*name).dtype == graph::DType::kBool) {
      if (own == nullptr || at != 0 || !(*own == *b) || !one_value) return std::nullopt;
    } else if (own != nullptr || at == b->axis) {
      return std::nullopt;
    } else if (!one_value) {  // a list of positions in place of the dimension: values have the dimensions of self
      const Batch* of_values = in.batch(*values);
      if (in.rank(*name) != 1 || in.rank(*values) != rank || of_values == nullptr || !(*of_values == *b)) {
        return std::nullopt;
      }
    }
  }
  return one(*b);
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
  table["index_put"] = {index_put};
  for (const char* name : {"select_scatter", "slice_scatter"}) table[name] = {scatter_part};
  table["one_hot"] = {one_hot};
}

}  // namespace ikbo::transform
