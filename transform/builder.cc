#include "transform/builder.h"

#include <algorithm>
#include <optional>

#include "graph/error.h"
#include "transform/rules.h"

namespace ikbo::transform {

using graph::Argument;
using graph::Expr;
using graph::NamedArgument;
using graph::Node;
using graph::Role;
using graph::SymInt;
using graph::TensorArg;
using graph::TensorMeta;

std::string Builder::fresh(const std::string& wanted) {
  std::string name = wanted;
  for (int i = 1; !taken_.insert(name).second; ++i) name = fmt::format("{}_{}", wanted, i);
  return name;
}

Expr Builder::at(const Expr& original, Where where) const {
  if (where != Where::kUser) return original;
  return original.substitute({{candidate_symbol_, Expr::symbol(user_symbol_)}});
}

TensorMeta Builder::at(const TensorMeta& original, Where where) const {
  TensorMeta meta = original;
  for (Expr& e : meta.sizes) e = at(e, where);
  for (Expr& e : meta.strides) e = at(e, where);
  meta.storage_offset = at(meta.storage_offset, where);
  return meta;
}

bool Builder::computable(const Expr& expression) const {
  for (const std::string& symbol : expression.symbols()) {
    if (!anchors_.contains(symbol)) return false;
  }
  // Calls that no size operator computes stay with the node that the original has for them.
  for (const Expr::Term& term : expression.terms()) {
    for (const Expr::Factor& factor : term.factors) {
      if (!factor.is_call) continue;
      const bool known = factor.name == "FloorDiv" || factor.name == "Mod" || factor.name == "PythonMod";
      if (!known || factor.arguments.size() != 2) return false;
      for (const Expr& a : factor.arguments) {
        if (!computable(a)) return false;
      }
    }
  }
  return true;
}

std::string Builder::size_node(const std::string& target, const SymInt& a, const SymInt& b, const Expr& value) {
  Node node;
  node.target = target;
  node.inputs = {{"a", a, 1}, {"b", b, 1}};
  node.name = fresh("size");
  node.outputs = {SymInt{node.name}};
  graph.sym_ints.emplace(node.name, value);
  std::string name = node.name;
  append(std::move(node), Role::kConstant);
  return name;
}

SymInt Builder::size(const Expr& expression) {
  if (const auto value = expression.as_integer()) return {*value};
  const std::string key = expression.srepr();
  if (const auto it = size_values_.find(key); it != size_values_.end()) return {it->second};

  const auto factor_value = [&](const Expr::Factor& factor) -> SymInt {
    if (factor.is_call) {
      const Expr call = Expr::call(factor.name, factor.arguments);
      const std::string call_key = call.srepr();
      if (const auto it = size_values_.find(call_key); it != size_values_.end()) return {it->second};
      const std::string target = factor.name == "FloorDiv" ? "_operator.floordiv" : "_operator.mod";
      std::string name = size_node(target, size(factor.arguments[0]), size(factor.arguments[1]), call);
      size_values_.emplace(call_key, name);
      return {name};
    }
    const Expr symbol = Expr::symbol(factor.name);
    const std::string symbol_key = symbol.srepr();
    if (const auto it = size_values_.find(symbol_key); it != size_values_.end()) return {it->second};
    const auto& [input, dim] = anchors_.at(factor.name);
    Node node;
    node.target = "torch.ops.aten.sym_size.int";
    node.inputs = {{"self", TensorArg{input}, 1}, {"dim", std::int64_t{dim}, 1}};
    node.name = fresh("sym_size_int");
    node.outputs = {SymInt{node.name}};
    graph.sym_ints.emplace(node.name, symbol);
    std::string name = node.name;
    append(std::move(node), Role::kConstant);
    size_values_.emplace(symbol_key, name);
    return {name};
  };

  std::optional<SymInt> sum;
  Expr sum_value;
  for (const Expr::Term& term : expression.terms()) {
    SymInt product{term.coefficient};
    Expr product_value = term.coefficient;
    for (const Expr::Factor& factor : term.factors) {
      const SymInt value = factor_value(factor);
      product_value =
          product_value * (factor.is_call ? Expr::call(factor.name, factor.arguments) : Expr::symbol(factor.name));
      product = product == SymInt{std::int64_t{1}} ? value
                                                   : SymInt{size_node("_operator.mul", product, value, product_value)};
    }
    sum_value = sum_value + product_value;
    sum = sum ? SymInt{size_node("_operator.add", *sum, product, sum_value)} : product;
  }
  if (const auto* name = sum->name()) size_values_.emplace(key, *name);
  return *sum;
}

Argument Builder::sizes(const std::vector<Expr>& expressions) {
  std::vector<std::int64_t> plain;
  graph::SymIntListArg symbolic;
  for (const Expr& e : expressions) {
    symbolic.values.push_back(size(e));
    if (const auto value = e.as_integer()) plain.push_back(*value);
  }
  if (plain.size() == expressions.size()) return plain;
  return symbolic;
}

std::string Builder::emit(const std::string& target, std::vector<NamedArgument> inputs, const std::string& name,
                          TensorMeta meta, Role role, const Node* origin, std::string note) {
  Node node;
  node.target = target;
  node.inputs = std::move(inputs);
  node.name = fresh(name);
  node.outputs = {TensorArg{node.name}};
  if (origin != nullptr && origin->metadata.contains("stack_trace")) {
    node.metadata["stack_trace"] = origin->metadata["stack_trace"];
  }
  meta.requires_grad = false;
  graph.tensors.emplace(node.name, std::move(meta));
  std::string result = node.name;
  append(std::move(node), role, std::move(note));
  return result;
}

void Builder::append(Node node, Role role, std::string note) {
  roles_[node.name] = role;
  if (!note.empty()) notes_[node.name] = std::move(note);
  graph.nodes.push_back(std::move(node));
}

std::string Builder::note(const std::string& node) const {
  const auto it = notes_.find(node);
  return it == notes_.end() ? std::string() : it->second;
}

namespace {

TensorMeta contiguous(const TensorMeta& like, std::vector<Expr> sizes) {
  TensorMeta meta = like;
  meta.strides = graph::contiguous_strides(sizes);
  meta.sizes = std::move(sizes);
  meta.storage_offset = 0;
  return meta;
}

}  // namespace

std::string Builder::reshape(const std::string& value, const std::vector<Expr>& new_sizes, Role role) {
  if (meta(value).sizes == new_sizes) return value;
  const auto view = reshaped_.find(value);
  const std::string source = view == reshaped_.end() ? value : view->second;
  if (meta(source).sizes == new_sizes) return source;
  Argument shape = sizes(new_sizes);
  std::string made =
      emit("torch.ops.aten.reshape.default", {{"self", TensorArg{source}, 1}, {"shape", std::move(shape), 1}},
           source + "_reshape", contiguous(meta(source), new_sizes), role);
  reshaped_[made] = source;
  return made;
}

std::string Builder::cat(const std::vector<std::string>& values, int dim, Role role) {
  if (values.size() == 1) return values[0];
  if (const auto whole = neighbours(values, dim)) return slice(whole->source, dim, whole->from, whole->to, role);
  std::string& made = cats_[{dim, values}];
  if (!made.empty()) return made;
  made =
      emit("torch.ops.aten.cat.default", {{"tensors", graph::TensorListArg{values}, 1}, {"dim", std::int64_t{dim}, 1}},
           "cat", contiguous(meta(values[0]), sizes_of_cat(values, dim)), role);
  return made;
}

std::optional<Builder::Slice> Builder::neighbours(const std::vector<std::string>& values, int dim) const {
  std::optional<Slice> whole;
  for (const std::string& value : values) {
    const auto it = slices_.find(value);
    if (it == slices_.end() || it->second.dim != dim) return std::nullopt;
    const Slice& next = it->second;
    if (whole && (next.source != whole->source || next.from != whole->to)) return std::nullopt;
    if (!whole) whole = next;
    whole->to = next.to;
  }
  return whole;
}

std::vector<Expr> Builder::sizes_of_cat(const std::vector<std::string>& values, int dim) const {
  std::vector<Expr> all = meta(values[0]).sizes;
  Expr& along = all[static_cast<std::size_t>(dim)];
  for (std::size_t i = 1; i < values.size(); ++i) along = along + meta(values[i]).sizes[static_cast<std::size_t>(dim)];
  return all;
}

namespace {

constexpr std::int64_t kAlignedHalves = 8;  // elements of 2 bytes

bool has_unaligned_halves(const TensorMeta& meta) {
  const auto columns = meta.sizes.back().as_integer();
  return graph::is_floating(meta.dtype) && graph::dtype_bytes(meta.dtype) == 2 && columns &&
         *columns % kAlignedHalves != 0;
}

}  // namespace

std::string Builder::aligned_cat(const std::vector<std::string>& values, int dim, Role role) {
  if (!has_unaligned_halves(meta(values[0])) || values.size() == 1 || neighbours(values, dim)) {
    return cat(values, dim, role);
  }
  std::string& made = aligned_cats_[{dim, values}];
  if (!made.empty()) return made;
  TensorMeta result = contiguous(meta(values[0]), sizes_of_cat(values, dim));
  std::vector<Expr> in_memory = result.sizes;
  in_memory.back() = (*in_memory.back().as_integer() + kAlignedHalves - 1) / kAlignedHalves * kAlignedHalves;
  result.strides = graph::contiguous_strides(in_memory);
  made = emit("torch.ops.ikbo.aligned_cat.default",
              {{"tensors", graph::TensorListArg{values}, 1}, {"dim", std::int64_t{dim}, 1}}, "aligned_cat",
              std::move(result), role);
  return made;
}

std::vector<std::string> Builder::taken_apart(const std::vector<std::string>& values, int dim, Role role) {
  if (!has_unaligned_halves(meta(values[0]))) return values;
  std::vector<std::string> all;
  for (const std::string& value : values) {
    const std::vector<std::string> inner = concatenated(value, dim, role);
    const std::vector<std::string> leaves = inner.empty() ? std::vector{value} : taken_apart(inner, dim, role);
    all.insert(all.end(), leaves.begin(), leaves.end());
  }
  return all;
}

std::vector<std::string> Builder::concatenated(const std::string& value, int dim, Role role) {
  const Node* node = maker(value);
  if (node == nullptr) return {};
  const bool stacks = node->target == "torch.ops.aten.stack.default";
  if (!stacks && node->target != "torch.ops.aten.cat.default") return {};
  const auto given = integer_argument(*node, "dim");
  const auto* list = std::get_if<graph::TensorListArg>(node->find("tensors"));
  const TensorMeta whole = meta(value);
  const std::size_t rank = whole.sizes.size();
  const auto from_end = dim - static_cast<std::int64_t>(rank);
  if (list == nullptr || (given != dim && given != from_end)) return {};
  for (const std::string& name : list->names) {
    if (meta(name).dtype != whole.dtype || meta(name).sizes.size() + (stacks ? 1 : 0) != rank) return {};
  }
  std::vector<std::string> values = list->names;
  for (std::string& name : values) {
    std::vector<Expr> sizes = meta(name).sizes;
    if (stacks) sizes.insert(sizes.begin() + dim, 1);
    name = reshape(name, sizes, role);
  }
  return values;
}

const Node* Builder::maker(const std::string& value) const {
  const auto found = std::find_if(graph.nodes.rbegin(), graph.nodes.rend(), [&](const Node& n) {
    return n.outputs.size() == 1 && n.outputs[0] == Argument(TensorArg{value});
  });
  return found == graph.nodes.rend() ? nullptr : &*found;
}

std::string Builder::slice(const std::string& value, int dim, std::int64_t from, std::int64_t to, Role role) {
  if (const auto it = slices_.find(value); it != slices_.end() && it->second.dim == dim) {
    const Slice outer = it->second;
    return slice(outer.source, dim, outer.from + from, outer.from + to, role);
  }
  TensorMeta result = meta(value);
  if (from == 0 && result.sizes[static_cast<std::size_t>(dim)].is_integer(to)) return value;
  result.storage_offset = result.storage_offset + result.strides[static_cast<std::size_t>(dim)] * Expr(from);
  result.sizes[static_cast<std::size_t>(dim)] = to - from;
  std::string made =
      emit("torch.ops.aten.slice.Tensor",
           {{"self", TensorArg{value}, 1}, {"dim", std::int64_t{dim}, 1}, {"start", from, 1}, {"end", to, 1}},
           value + "_slice", std::move(result), role);
  slices_[made] = {value, dim, from, to};
  return made;
}

std::string Builder::expand(const std::string& value, const std::vector<Expr>& new_sizes, Role role) {
  if (meta(value).sizes == new_sizes) return value;
  TensorMeta result = meta(value);
  for (std::size_t i = 0; i < new_sizes.size(); ++i) {
    if (!(result.sizes[i] == new_sizes[i])) result.strides[i] = 0;
  }
  result.sizes = new_sizes;
  Argument shape = sizes(new_sizes);
  return emit("torch.ops.aten.expand.default", {{"self", TensorArg{value}, 1}, {"size", std::move(shape), 1}},
              value + "_expand", std::move(result), role);
}

namespace {

// The two dimensions that a node exchanges, in order; nothing for other nodes.
std::optional<std::pair<int, int>> exchanged(const Node& node, int rank) {
  const auto integer = [&](const char* name) -> std::optional<int> {
    const auto value = integer_argument(node, name);
    if (!value) return std::nullopt;
    return static_cast<int>(*value < 0 ? *value + rank : *value);
  };
  if (node.target == "torch.ops.aten.transpose.int") {
    const auto d0 = integer("dim0");
    const auto d1 = integer("dim1");
    if (d0 && d1) return std::pair(std::min(*d0, *d1), std::max(*d0, *d1));
  }
  if (node.target == "torch.ops.aten.permute.default") {
    const Argument* a = node.find("dims");
    const auto* dims = a != nullptr ? std::get_if<std::vector<std::int64_t>>(a) : nullptr;
    if (dims == nullptr) return std::nullopt;
    std::vector<int> moved;
    for (int i = 0; i < rank; ++i) {
      const std::int64_t d = (*dims)[static_cast<std::size_t>(i)];
      if ((d < 0 ? d + rank : d) != i) moved.push_back(i);
    }
    if (moved.size() == 2) return std::pair(moved[0], moved[1]);
  }
  return std::nullopt;
}

}  // namespace

std::string Builder::transpose(const std::string& value, int dim0, int dim1, Role role) {
  TensorMeta result = meta(value);
  const Node* node = maker(value);
  if (node != nullptr && exchanged(*node, static_cast<int>(result.sizes.size())) ==
                             std::pair(std::min(dim0, dim1), std::max(dim0, dim1))) {
    return graph::input_names(*node)[0];
  }
  std::swap(result.sizes[static_cast<std::size_t>(dim0)], result.sizes[static_cast<std::size_t>(dim1)]);
  std::swap(result.strides[static_cast<std::size_t>(dim0)], result.strides[static_cast<std::size_t>(dim1)]);
  return emit("torch.ops.aten.transpose.int",
              {{"self", TensorArg{value}, 1}, {"dim0", std::int64_t{dim0}, 1}, {"dim1", std::int64_t{dim1}, 1}},
              value + "_transpose", std::move(result), role);
}

std::string Builder::parameter(const std::string& wanted, const at::Tensor& contents, bool keep_strides) {
  NewParameter p;
  p.target = wanted;
  for (int i = 1;; ++i) {
    bool clash = false;
    for (const NewParameter& other : parameters_) clash = clash || other.target == p.target;
    if (!clash) break;
    p.target = fmt::format("{}_{}", wanted, i);
  }
  std::string value = "p_" + p.target;
  for (char& c : value) c = std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
  p.value = fresh(value);
  p.weight = graph::make_weight(contents, /*is_parameter=*/true, keep_strides);
  graph.tensors.emplace(p.value, p.weight.meta);
  parameters_.push_back(p);
  return p.value;
}

}  // namespace ikbo::transform
