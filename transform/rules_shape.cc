// Operators that move, split, repeat or create elements without computing on them.
#include <algorithm>
#include <numeric>

#include "transform/rules.h"

namespace ikbo::transform {
namespace {

using graph::Expr;

RuleResult one(const Batch& batch) {
  return std::vector<std::optional<Batch>>{batch};
}

Expr product(const std::vector<Expr>& sizes, int end) {
  Expr p = 1;
  for (int i = 0; i < end; ++i) p = p * sizes[static_cast<std::size_t>(i)];
  return p;
}

// The one dimension of the result whose size is a multiple of the batch.
std::optional<Batch> batch_from_sizes(const RuleInput& in, const std::string& result) {
  const auto& sizes = in.meta(result).sizes;
  std::optional<Batch> batch;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (!sizes[d].depends_on(in.batch_symbol())) continue;
    const auto inner = sizes[d].multiple_of(in.batch_symbol());
    if (batch || !inner) return std::nullopt;
    batch = Batch{static_cast<int>(d), *inner};
  }
  return batch;
}

// view, reshape, flatten, unflatten: the batch stays outermost within its dimension, so rows stay together as long as
// as many entries stand in front of it as before.
RuleResult view(const RuleInput& in) {
  const Batch* b = in.batch_of("self");
  if (b == nullptr || in.results().size() != 1) return std::nullopt;
  if (in.node().find("dtype") != nullptr) return std::nullopt;  // view.dtype reinterprets bytes
  const std::string result = in.results()[0];
  const auto out = batch_from_sizes(in, result);
  if (!out) return std::nullopt;
  const Expr before = product(in.meta(*in.tensor("self")).sizes, b->axis);
  const Expr after = product(in.meta(result).sizes, out->axis);
  if (!(before == after)) return std::nullopt;
  return one(*out);
}

RuleResult unsqueeze(const RuleInput& in) {
  const Batch* b = in.batch_of("self");
  if (b == nullptr) return std::nullopt;
  const auto d = in.dim("dim", in.rank(*in.tensor("self")) + 1);
  if (!d) return std::nullopt;
  return one({b->axis + (*d <= b->axis ? 1 : 0), b->inner});
}

// squeeze without dimensions would also drop a batch of one row, so only named dimensions keep the meaning.
RuleResult squeeze(const RuleInput& in) {
  const Batch* b = in.batch_of("self");
  if (b == nullptr) return std::nullopt;
  const auto dims = in.integers("dim");
  if (!dims) return std::nullopt;
  const std::string& self = *in.tensor("self");
  const int rank = in.rank(self);
  int removed_before = 0;
  for (std::int64_t d : *dims) {
    if (d < -rank || d >= rank) return std::nullopt;
    if (d < 0) d += rank;
    if (d == b->axis) return std::nullopt;
    const Expr& size = in.meta(self).sizes[static_cast<std::size_t>(d)];
    if (!size.as_integer()) return std::nullopt;  // 1 or not is decided at run time
    if (size.is_integer(1) && d < b->axis) ++removed_before;
  }
  return one({b->axis - removed_before, b->inner});
}

RuleResult transpose(const RuleInput& in) {
  const Batch* b = in.batch_of("self");
  if (b == nullptr) return std::nullopt;
  const int rank = in.rank(*in.tensor("self"));
  const auto d0 = in.dim("dim0", rank);
  const auto d1 = in.dim("dim1", rank);
  if (!d0 || !d1) return std::nullopt;
  return one({b->axis == *d0 ? *d1 : b->axis == *d1 ? *d0 : b->axis, b->inner});
}

RuleResult t(const RuleInput& in) {
  const Batch* b = in.batch_of("self");
  if (b == nullptr) return std::nullopt;
  return one({in.rank(*in.tensor("self")) == 2 ? 1 - b->axis : b->axis, b->inner});
}

// The last two dimensions exchanged.
RuleResult matrix_transpose(const RuleInput& in) {
  const Batch* b = in.batch_of("self");
  if (b == nullptr) return std::nullopt;
  const int rank = in.rank(*in.tensor("self"));
  if (rank < 2) return std::nullopt;
  return one({b->axis == rank - 1 ? rank - 2 : b->axis == rank - 2 ? rank - 1 : b->axis, b->inner});
}

RuleResult permute(const RuleInput& in) {
  const Batch* b = in.batch_of("self");
  const auto dims = in.integers("dims");
  if (b == nullptr || !dims) return std::nullopt;
  const auto rank = static_cast<std::int64_t>(in.rank(*in.tensor("self")));
  for (std::size_t i = 0; i < dims->size(); ++i) {
    if ((*dims)[i] < -rank || (*dims)[i] >= rank) return std::nullopt;
    if (((*dims)[i] + rank) % rank == b->axis) return one({static_cast<int>(i), b->inner});
  }
  return std::nullopt;
}

// expand, broadcast_to, repeat, tile. A shared operand that is repeated to the batch makes rows that are all equal.
RuleResult expand(const RuleInput& in) {
  const std::string* self = in.tensor("self");
  if (self == nullptr || in.results().size() != 1) return std::nullopt;
  const std::string result = in.results()[0];
  const int shift = in.rank(result) - in.rank(*self);
  if (const Batch* b = in.batch(*self)) return one({b->axis + shift, b->inner});
  const auto out = batch_from_sizes(in, result);
  if (!out) return std::nullopt;
  const int axis = out->axis - shift;
  if (axis >= 0 && !in.meta(*self).sizes[static_cast<std::size_t>(axis)].is_integer(1)) return std::nullopt;
  return one(*out);
}

// repeat_interleave(x, r, dim): along the batch, r copies of each entry stand together, so rows stay together.
RuleResult repeat_interleave(const RuleInput& in) {
  const Batch* b = in.batch_of("self");
  if (b == nullptr || in.node().find("repeats") == nullptr) return std::nullopt;
  const auto repeats = in.integer("repeats");
  const auto d = in.dim("dim", in.rank(*in.tensor("self")));
  if (!repeats || !d || *repeats < 1) return std::nullopt;
  return one({b->axis, *d == b->axis ? b->inner * Expr(*repeats) : b->inner});
}

RuleResult select(const RuleInput& in) {
  const Batch* b = in.batch_of("self");
  if (b == nullptr) return std::nullopt;
  const auto d = in.dim("dim", in.rank(*in.tensor("self")));
  if (!d || *d == b->axis) return std::nullopt;
  return one({b->axis - (*d < b->axis ? 1 : 0), b->inner});
}

// A slice along the batch is fine where it takes everything: x[:, 0] is exported as slice(x, 0, 0, max), then select.
RuleResult slice(const RuleInput& in) {
  const Batch* b = in.batch_of("self");
  if (b == nullptr) return std::nullopt;
  const int rank = in.rank(*in.tensor("self"));
  const auto d = in.node().find("dim") == nullptr ? std::optional<int>(0) : in.dim("dim", rank);
  if (!d) return std::nullopt;
  if (*d == b->axis) {
    const auto absent = [&](const char* name) {
      const auto* a = in.node().find(name);
      return a == nullptr || std::holds_alternative<graph::NoneArg>(*a);
    };
    const bool from_start = absent("start") || in.integer("start") == 0;
    const bool to_end = absent("end") || in.integer("end") == INT64_MAX;
    const bool every = absent("step") || in.integer("step") == 1;
    if (!from_start || !to_end || !every) return std::nullopt;
  }
  return one(*b);
}

// split, chunk, unbind, narrow along another dimension than the batch.
RuleResult split(const RuleInput& in) {
  const std::string* self = in.tensor("self") != nullptr ? in.tensor("self") : in.tensor("input");
  const Batch* b = self != nullptr ? in.batch(*self) : nullptr;
  if (b == nullptr) return std::nullopt;
  const int rank = in.rank(*self);
  const auto d = in.node().find("dim") == nullptr ? std::optional<int>(0) : in.dim("dim", rank);
  if (!d || *d == b->axis) return std::nullopt;
  const bool drops = aten_name(in.node().target) == "unbind";
  const Batch out{b->axis - (drops && *d < b->axis ? 1 : 0), b->inner};
  return std::vector<std::optional<Batch>>(in.results().size(), out);
}

RuleResult cat(const RuleInput& in) {
  const auto operands = in.tensors("tensors");
  if (operands.empty()) return std::nullopt;
  const bool stacks = aten_name(in.node().target) == "stack";
  const int rank = in.rank(operands[0]) + (stacks ? 1 : 0);
  const auto d = in.node().find("dim") == nullptr ? std::optional<int>(0) : in.dim("dim", rank);
  const Batch* first = in.batch(operands[0]);
  if (!d || first == nullptr) return std::nullopt;
  for (const std::string& name : operands) {
    const Batch* b = in.batch(name);
    if (b == nullptr || !(*b == *first)) return std::nullopt;
  }
  if (stacks) return one({first->axis + (*d <= first->axis ? 1 : 0), first->inner});
  if (*d == first->axis) return std::nullopt;
  return one(*first);
}

RuleResult flip(const RuleInput& in) {
  const Batch* b = in.batch_of("self");
  const auto dims = in.integers("dims");
  if (b == nullptr || !dims || dims->empty()) return std::nullopt;
  const auto rank = static_cast<std::int64_t>(in.rank(*in.tensor("self")));
  for (const std::int64_t d : *dims) {
    if (d < -rank || d >= rank || (d + rank) % rank == b->axis) return std::nullopt;
  }
  return one(*b);
}

// constant_pad_nd(self, pad), pad(self, pad, mode): pad counts pairs from the last dimension backwards.
RuleResult pad(const RuleInput& in) {
  const Batch* b = in.batch_of("self");
  const auto pads = in.integers("pad");
  if (b == nullptr || !pads) return std::nullopt;
  const int rank = in.rank(*in.tensor("self"));
  for (std::size_t i = 0; i < pads->size(); ++i) {
    if ((*pads)[i] != 0 && rank - 1 - static_cast<int>(i / 2) == b->axis) return std::nullopt;
  }
  return one(*b);
}

RuleResult triangle(const RuleInput& in) {
  const Batch* b = in.batch_of("self");
  if (b == nullptr || b->axis >= in.rank(*in.tensor("self")) - 2) return std::nullopt;
  return one(*b);
}

// zeros(B, n): rows that are all equal, at whichever batch they are needed.
RuleResult create(const RuleInput& in) {
  if (in.results().size() != 1) return std::nullopt;
  const auto out = batch_from_sizes(in, in.results()[0]);
  if (!out) return std::nullopt;
  return one(*out);
}

}  // namespace

void add_shape_rules(RuleTable& table) {
  for (const char* name : {"view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_copy", "_reshape_copy"}) {
    table[name] = {view, true};
  }
  table["unsqueeze"] = {unsqueeze};
  table["squeeze"] = {squeeze};
  for (const char* name : {"transpose", "swapaxes", "swapdims"}) table[name] = {transpose};
  for (const char* name : {"t", "numpy_T"}) table[name] = {t};
  table["mT"] = {matrix_transpose};
  table["permute"] = {permute};
  for (const char* name : {"expand", "repeat", "tile", "broadcast_to"}) table[name] = {expand, true};
  table["repeat_interleave"] = {repeat_interleave};
  table["select"] = {select};
  table["slice"] = {slice};
  for (const char* name :
       {"split", "split_with_sizes", "chunk", "unbind", "narrow", "tensor_split", "unsafe_split", "unsafe_chunk"}) {
    table[name] = {split};
  }
  for (const char* name : {"cat", "concat", "concatenate", "stack"}) table[name] = {cat};
  table["flip"] = {flip};
  for (const char* name : {"constant_pad_nd", "pad"}) table[name] = {pad};
  for (const char* name : {"tril", "triu"}) table[name] = {triangle};
  for (const char* name : {"zeros", "ones", "full", "new_zeros", "new_ones", "new_full"}) table[name] = {create, true};
}

}  // namespace ikbo::transform
