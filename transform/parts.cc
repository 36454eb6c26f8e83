// Values kept in parts: how concatenations, sums and expansions become parts, and which operators pass through them.
#include <algorithm>
#include <numeric>

#include "graph/error.h"
#include "transform/rewriter.h"

namespace ikbo::transform {

using graph::Argument;
using graph::Expr;
using graph::Node;
using graph::Role;
using graph::TensorArg;

Role Rewriter::role_of(Where where) {
  return where == Where::kUser ? Role::kRequestOnly : Role::kCandidate;
}

// ---- Making parts -------------------------------------------------------------------------------------------------

std::optional<Term> Rewriter::term_of(const std::string& name) {
  const auto it = values_.find(name);
  if (it == values_.end() || it->second.level == Level::kShared || !it->second.batch) return std::nullopt;
  const auto& sizes = original_.tensors.at(name).sizes;
  if (it->second.level != Level::kCandidate) return Term{Where::kUser, at_user(name), sizes};
  if (it->second.parts) {
    const Parts& parts = *it->second.parts;
    if (parts.pieces.size() == 1 && parts.pieces[0].terms.size() == 1 && parts.pieces[0].terms[0].sign == 1 &&
        parts.shape == sizes) {
      return parts.pieces[0].terms[0];
    }
  }
  return Term{Where::kCandidate, at_candidate(name), sizes};
}

std::optional<Parts> Rewriter::parts_of(const std::string& name, int dim) {
  const auto& sizes = original_.tensors.at(name).sizes;
  const auto it = values_.find(name);
  if (it != values_.end() && it->second.parts && it->second.parts->shape == sizes) {
    Parts parts = *it->second.parts;
    if (parts.dim == dim) return parts;
    if (parts.pieces.size() == 1) {
      parts.dim = dim;
      parts.pieces[0].extent = sizes[static_cast<std::size_t>(dim)];
      return parts;
    }
  }
  auto term = term_of(name);
  if (!term) return std::nullopt;
  return Parts{dim, sizes, {Piece{{std::move(*term)}, sizes[static_cast<std::size_t>(dim)]}}};
}

std::optional<Parts> Rewriter::make_parts(const Node& node) {
  const std::string name = aten_name(node.target);
  const auto results = graph::output_names(node);
  if (results.size() != 1) return std::nullopt;
  if (name == "cat" || name == "concat" || name == "concatenate" || name == "stack") return parts_of_cat(node);
  if (name == "sub" || name == "add") return parts_of_sum(node);
  if (name == "expand") return parts_of_expand(node);
  return std::nullopt;
}

// An operand of a stack: one entry along a new dimension.
std::optional<Parts> Rewriter::parts_of_entry(const std::string& name, int dim) {
  auto parts = parts_of(name, 0);
  if (!parts || parts->pieces.size() != 1) {
    auto term = term_of(name);
    if (!term) return std::nullopt;
    parts = Parts{0, original_.tensors.at(name).sizes, {Piece{{std::move(*term)}, 1}}};
  }
  parts->dim = dim;
  parts->shape.insert(parts->shape.begin() + dim, 1);
  parts->pieces[0].extent = 1;
  for (Term& term : parts->pieces[0].terms) {
    std::vector<Expr> sizes = term.sizes;
    sizes.insert(sizes.begin() + dim, 1);
    term.value = reshape_term(term, sizes);
    term.sizes = sizes;
  }
  return parts;
}

std::optional<Parts> Rewriter::parts_of_cat(const Node& node) {
  const bool stacks = aten_name(node.target) == "stack";
  const std::map<std::string, Batch> none;
  const RuleInput in(original_, node, builder_.candidate_symbol(), none);
  const auto operands = in.tensors("tensors");
  const std::string result = graph::output_names(node)[0];
  const auto& sizes = original_.tensors.at(result).sizes;
  const auto d = node.find("dim") == nullptr ? std::optional<int>(0) : in.dim("dim", static_cast<int>(sizes.size()));
  const auto batch = batch_shown_by_sizes(result);
  if (!d || !batch || batch->axis == *d) return std::nullopt;
  const Batch own_batch{batch->axis - (stacks && *d < batch->axis ? 1 : 0), batch->inner};
  for (const std::string& name : operands) {  // a shared operand, or one whose batch is elsewhere, is no part
    const auto it = values_.find(name);
    if (it == values_.end() || it->second.level == Level::kShared || it->second.batch != own_batch) return std::nullopt;
    if (original_.tensors.at(name).dtype != original_.tensors.at(result).dtype) return std::nullopt;
  }
  Parts parts{*d, sizes, {}};
  bool useful = false;
  for (const std::string& name : operands) {
    auto own = stacks ? parts_of_entry(name, *d) : parts_of(name, *d);
    if (!own) return std::nullopt;
    for (Piece& piece : own->pieces) {
      for (Term& term : piece.terms) {
        useful = useful || term.where == Where::kUser || !(term.sizes == own->shape);
        if (!(term.sizes[static_cast<std::size_t>(*d)] == piece.extent)) {  // repeated along the concatenation itself
          std::vector<Expr> full = term.sizes;
          full[static_cast<std::size_t>(*d)] = piece.extent;
          term.value = expand_term(term, full);
          term.sizes = full;
        }
      }
      parts.pieces.push_back(std::move(piece));
    }
  }
  if (!useful) return std::nullopt;
  return parts;
}

// a + b and a - b, where one is request-only or repeated along a dimension: a linear consumer takes them one by one.
std::optional<Parts> Rewriter::parts_of_sum(const Node& node) {
  const std::string result = graph::output_names(node)[0];
  const auto& meta = original_.tensors.at(result);
  const auto* a = node.find("self");
  const auto* b = node.find("other");
  const auto* left = a != nullptr ? std::get_if<TensorArg>(a) : nullptr;
  const auto* right = b != nullptr ? std::get_if<TensorArg>(b) : nullptr;
  if (left == nullptr || right == nullptr || !graph::is_floating(meta.dtype) || meta.sizes.empty()) return std::nullopt;
  if (const auto* alpha = node.find("alpha")) {
    const auto* one = std::get_if<std::int64_t>(alpha);
    if (one == nullptr || *one != 1) return std::nullopt;
  }
  const auto batch = batch_shown_by_sizes(result);
  if (!batch || batch->axis == static_cast<int>(meta.sizes.size()) - 1) return std::nullopt;
  Parts parts{static_cast<int>(meta.sizes.size()) - 1, meta.sizes, {Piece{{}, meta.sizes.back()}}};
  bool useful = false;
  for (const TensorArg* operand : {left, right}) {
    const auto it = values_.find(operand->name);
    const auto& own = original_.tensors.at(operand->name);
    if (it == values_.end() || !(it->second.batch == batch) || own.dtype != meta.dtype) return std::nullopt;
    if (own.sizes.size() != meta.sizes.size() || !(own.sizes.back() == meta.sizes.back())) return std::nullopt;
    auto own_parts = parts_of(operand->name, parts.dim);
    if (!own_parts || own_parts->pieces.size() != 1) return std::nullopt;
    for (Term term : own_parts->pieces[0].terms) {
      if (operand == right && aten_name(node.target) == "sub") term.sign = -term.sign;
      if (!(term.sizes.back() == meta.sizes.back())) return std::nullopt;
      useful = useful || term.where == Where::kUser || !(term.sizes == meta.sizes);
      parts.pieces[0].terms.push_back(std::move(term));
    }
  }
  if (!useful) return std::nullopt;
  return parts;
}

std::optional<Parts> Rewriter::parts_of_expand(const Node& node) {
  const std::string result = graph::output_names(node)[0];
  const auto& sizes = original_.tensors.at(result).sizes;
  const auto names = graph::input_names(node);
  const auto it = values_.find(names[0]);
  if (it == values_.end() || it->second.level != Level::kCandidate || sizes.empty()) return std::nullopt;
  const auto batch = batch_shown_by_sizes(result);
  if (!batch || !(it->second.batch == batch)) return std::nullopt;
  if (original_.tensors.at(names[0]).sizes.size() != sizes.size()) return std::nullopt;
  auto term = term_of(names[0]);
  if (!term) return std::nullopt;
  const int last = static_cast<int>(sizes.size()) - 1;
  return Parts{last, sizes, {Piece{{std::move(*term)}, sizes.back()}}};
}

// ---- Passing through parts ----------------------------------------------------------------------------------------

bool Rewriter::pass_through_parts(const Node& node) {
  const std::map<std::string, Batch> none;
  const RuleInput input(original_, node, builder_.candidate_symbol(), none);
  const auto operands = input.operands();
  const auto results = input.results();
  if (operands.empty() || results.empty()) return false;
  // One value in parts beside shared ones; or several, taken piece by piece.
  const std::string* self = nullptr;
  bool others = false;
  for (const std::string& name : operands) {
    const auto it = values_.find(name);
    if (it == values_.end() || it->second.level == Level::kShared) continue;
    others = others || (self != nullptr && *self != name) || !it->second.parts;
    if (it->second.parts) self = &name;
  }
  if (self == nullptr) return false;
  if (!std::holds_alternative<TensorArg>(node.outputs[0])) return !others && split_parts(node, input, *self);
  if (results.size() != 1) return false;
  std::optional<Parts> parts;
  if (!others) parts = passed(node, input, *self);
  if (!parts && mode_ == Mode::kIkbo) parts = aligned(node);
  if (!parts) return false;
  if (bind_single_piece(results[0], *parts)) return true;
  values_[results[0]] = Value{Level::kCandidate, batch_shown_by_sizes(results[0]), {}, {}, &node, *parts};
  return true;
}

std::optional<Parts> Rewriter::passed(const Node& node, const RuleInput& in, const std::string& self) {
  const Parts parts = *values_.at(self).parts;
  const std::string op = aten_name(node.target);
  const std::string result = in.results()[0];
  const auto& before = original_.tensors.at(self).sizes;
  const auto& after = original_.tensors.at(result).sizes;
  const bool own_shape = parts.shape == before;
  const int rank = static_cast<int>(before.size());
  const int last = static_cast<int>(parts.shape.size()) - 1;

  if ((op == "index" || op == "index_select") && own_shape) {
    if (auto columns = picked(parts, in)) return columns;
  }
  // Columns of a packed input, and of any concatenation: a cut takes the pieces it needs.
  if (op == "slice" || op == "select") {
    const auto d = node.find("dim") == nullptr ? std::optional<int>(0) : in.dim("dim", rank);
    const bool along = d && (own_shape ? *d == parts.dim : (*d == rank - 1 && parts.dim == last));
    const auto extent = d ? before[static_cast<std::size_t>(*d)].as_integer() : std::nullopt;
    if (!along || !extent) return std::nullopt;
    if (op == "select") {
      auto index = in.integer("index");
      if (!index || !own_shape) return std::nullopt;
      if (*index < 0) *index += *extent;
      auto piece = cut_parts(parts, *index, *index + 1);
      if (!piece || piece->pieces.size() != 1 || piece->pieces[0].terms.size() != 1) return std::nullopt;
      Term& term = piece->pieces[0].terms[0];
      std::vector<Expr> sizes = term.sizes;
      sizes.erase(sizes.begin() + *d);
      term.value = reshape_term(term, sizes);
      term.sizes = sizes;
      piece->dim = 0;
      piece->shape = after;
      if (term.sign != 1 || !(sizes == after)) return std::nullopt;
      return piece;
    }
    const auto absent = [&](const char* n) {
      const Argument* a = node.find(n);
      return a == nullptr || std::holds_alternative<graph::NoneArg>(*a);
    };
    const auto bound = [&](const char* n, std::int64_t otherwise) -> std::optional<std::int64_t> {
      if (absent(n)) return otherwise;
      auto v = in.integer(n);
      if (v && *v < 0) *v += *extent;
      if (v) *v = std::clamp<std::int64_t>(*v, 0, *extent);
      return v;
    };
    const auto from = bound("start", 0);
    const auto to = bound("end", *extent);
    if (!from || !to || *from >= *to || (!absent("step") && in.integer("step") != 1)) return std::nullopt;
    auto cut = cut_parts(parts, *from, *to);
    if (cut) cut->shape[static_cast<std::size_t>(cut->dim)] = *to - *from;
    return cut;
  }
  if (mode_ != Mode::kIkbo) return std::nullopt;

  const bool same = keeps_values(op) || one_of(op, {"dropout", "feature_dropout", "alpha_dropout"});
  if (same && !is_random(node)) return parts;
  const bool numbers_only = std::none_of(node.inputs.begin(), node.inputs.end(), [&](const graph::NamedArgument& a) {
    const auto names = graph::value_names(a.value);
    return !names.empty() && names != std::vector<std::string>{self};
  });
  if (is_pointwise(node.target) && numbers_only) {
    Parts out = parts;
    for (Piece& piece : out.pieces) {
      if (piece.terms.size() != 1 || piece.terms[0].sign != 1) return std::nullopt;
    }
    for (Piece& piece : out.pieces) {
      piece.terms[0].value = apply_to_term(node, self, piece.terms[0], piece.terms[0].sizes);
    }
    return out;
  }
  if (op == "view" || op == "reshape" || op == "_unsafe_view" || op == "flatten") {
    return own_shape ? view_parts(parts, before, after) : std::nullopt;
  }
  if (!own_shape) return std::nullopt;
  if (op == "sum" || op == "mean") {
    if (auto sums = reduced(node, in, self)) return sums;
  }
  const bool moves = op == "unsqueeze" || op == "transpose" || op == "permute";
  if (!moves) return piece_by_piece(node, self);

  // Dimensions move: where each dimension of the result comes from (-1: a new one of size 1).
  std::vector<int> from;
  if (op == "unsqueeze") {
    const auto d = in.dim("dim", rank + 1);
    if (!d) return std::nullopt;
    from.resize(before.size());
    std::iota(from.begin(), from.end(), 0);
    from.insert(from.begin() + *d, -1);
  } else if (op == "transpose") {
    const auto d0 = in.dim("dim0", rank);
    const auto d1 = in.dim("dim1", rank);
    if (!d0 || !d1) return std::nullopt;
    from.resize(before.size());
    std::iota(from.begin(), from.end(), 0);
    std::swap(from[static_cast<std::size_t>(*d0)], from[static_cast<std::size_t>(*d1)]);
  } else if (op == "permute") {
    const auto dims = in.integers("dims");
    if (!dims) return std::nullopt;
    for (const std::int64_t d : *dims) from.push_back(static_cast<int>(d < 0 ? d + rank : d));
  } else {
    return std::nullopt;
  }
  Parts out = parts;
  out.shape = after;
  out.dim = static_cast<int>(std::find(from.begin(), from.end(), parts.dim) - from.begin());
  for (Piece& piece : out.pieces) {
    for (Term& term : piece.terms) {
      std::vector<Expr> sizes;
      for (const int f : from) sizes.push_back(f < 0 ? Expr(1) : term.sizes[static_cast<std::size_t>(f)]);
      term.value = apply_to_term(node, self, term, sizes);
      term.sizes = sizes;
    }
  }
  return out;
}

// A view that merges the concatenated dimension with those behind it, (B, F, D) -> (B, F * D): each piece is merged
// alone. Or one that flattens what stands in front of the last dimension: the parts stay as they are.
std::optional<Parts> Rewriter::view_parts(const Parts& parts, const std::vector<Expr>& before,
                                          const std::vector<Expr>& after) {
  if (auto moved = unit_dimensions(parts, before, after)) return moved;
  const auto d = static_cast<std::size_t>(parts.dim);
  const auto same = [](auto a, auto b, std::size_t n) { return std::equal(a, a + static_cast<std::ptrdiff_t>(n), b); };
  if (after.size() > d && same(before.begin(), after.begin(), d)) {
    Expr behind = 1;
    for (std::size_t end = d + 1; end <= before.size(); ++end) {
      if (before[end - 1].depends_on(builder_.candidate_symbol())) break;  // the batch itself is merged
      if (after.size() - d - 1 == before.size() - end && after[d] == before[d] * behind &&
          std::equal(before.begin() + static_cast<std::ptrdiff_t>(end), before.end(),
                     after.begin() + static_cast<std::ptrdiff_t>(d) + 1)) {
        Parts out = parts;
        out.shape = after;
        for (Piece& piece : out.pieces) {
          for (Term& term : piece.terms) {
            std::vector<Expr> full = term.sizes;
            for (std::size_t i = d; i < end; ++i) full[i] = i == d ? piece.extent : before[i];
            term.value = expand_term(term, full);
            std::vector<Expr> merged(full.begin(), full.begin() + static_cast<std::ptrdiff_t>(d));
            merged.push_back(piece.extent * behind);
            merged.insert(merged.end(), full.begin() + static_cast<std::ptrdiff_t>(end), full.end());
            term.value = reshape_term({term.where, term.value, full, term.sign}, merged);
            term.sizes = merged;
          }
          piece.extent = piece.extent * behind;
        }
        return out;
      }
      if (end < before.size()) behind = behind * before[end];
    }
  }
  if (d + 1 == before.size() && !after.empty() && after.back() == before.back()) return parts;
  return std::nullopt;
}

std::optional<Parts> Rewriter::cut_parts(const Parts& parts, std::int64_t from, std::int64_t to) {
  Parts out{parts.dim, parts.shape, {}};
  const auto d = static_cast<std::size_t>(parts.dim);
  std::int64_t start = 0;
  for (const Piece& piece : parts.pieces) {
    const auto extent = piece.extent.as_integer();
    if (!extent) return std::nullopt;
    const std::int64_t lo = std::max(from, start) - start;
    const std::int64_t hi = std::min(to, start + *extent) - start;
    start += *extent;
    if (lo >= hi) continue;
    Piece cut{{}, hi - lo};
    for (Term term : piece.terms) {
      if (!term.sizes[d].is_integer(*extent)) return std::nullopt;
      term.value = builder_.slice(term.value, parts.dim, lo, hi, role_of(term.where));
      term.sizes[d] = hi - lo;
      cut.terms.push_back(std::move(term));
    }
    out.pieces.push_back(std::move(cut));
  }
  return out;
}

bool Rewriter::bind_single_piece(const std::string& name, const Parts& parts) {
  if (parts.pieces.size() != 1 || parts.pieces[0].terms.size() != 1) return false;
  const Term& term = parts.pieces[0].terms[0];
  const auto batch = batch_shown_by_sizes(name);
  if (term.sign != 1 || !(term.sizes == original_.tensors.at(name).sizes) || !batch) return false;
  Value value;
  value.batch = batch;
  value.level = term.where == Where::kUser ? Level::kUser : Level::kCandidate;
  (term.where == Where::kUser ? value.at_user : value.at_candidate) = term.value;
  values_[name] = std::move(value);
  return true;
}

// The whole of a value from its parts: of a packed input, or of what was computed piece by piece.
std::string Rewriter::join_parts(const std::string& name, const Parts& parts) {
  const auto& meta = original_.tensors.at(name);
  const auto d = static_cast<std::size_t>(parts.dim);
  Batch batch;  // in the shape that the terms refer to, which may be the value's own before a flatten
  for (std::size_t i = 0; i < parts.shape.size(); ++i) {
    if (!parts.shape[i].depends_on(builder_.candidate_symbol())) continue;
    const auto inner = parts.shape[i].multiple_of(builder_.candidate_symbol());
    if (!inner) fail("internal error: '{}' does not show its batch", name);
    batch = {static_cast<int>(i), *inner};
  }
  std::vector<std::string> values;
  for (const Piece& piece : parts.pieces) {
    std::vector<Expr> full = parts.shape;
    full[d] = piece.extent;
    std::string sum;
    for (const Term& term : piece.terms) {
      const std::string value = at_candidate(term, meta, batch);
      if (sum.empty() && term.sign == 1) {
        sum = value;
        continue;
      }
      graph::TensorMeta whole = builder_.meta(value);
      whole.sizes = full;
      whole.strides = graph::contiguous_strides(full);
      if (sum.empty()) {
        whole.sizes = term.sizes;
        sum = builder_.emit("torch.ops.aten.neg.default", {{"self", TensorArg{value}, 1}}, name + "_part", whole,
                            Role::kCandidate);
        continue;
      }
      sum = builder_.emit(term.sign == 1 ? "torch.ops.aten.add.Tensor" : "torch.ops.aten.sub.Tensor",
                          {{"self", TensorArg{sum}, 1}, {"other", TensorArg{value}, 1}}, name + "_part", whole,
                          Role::kCandidate);
    }
    values.push_back(builder_.expand(sum, full, Role::kCandidate));
  }
  return builder_.reshape(builder_.cat(values, parts.dim, Role::kCandidate), meta.sizes, Role::kCandidate);
}

// ---- Terms --------------------------------------------------------------------------------------------------------

std::string Rewriter::apply_to_term(const Node& node, const std::string& self, const Term& term,
                                    const std::vector<Expr>& sizes) {
  std::vector<graph::NamedArgument> inputs;
  for (const graph::NamedArgument& a : node.inputs) {
    if (a.value == Argument(TensorArg{self})) {
      inputs.push_back({a.name, TensorArg{term.value}, a.kind});
      continue;
    }
    // Or it is the only index of a list. Names of both programs may be the same: a replaced one is never looked up
    // again.
    Argument own = a.value;
    bool replaced = false;
    if (auto* indices = std::get_if<graph::OptionalTensorListArg>(&own)) {
      for (auto& name : indices->names) {
        if (name != self) continue;
        name = term.value;
        replaced = true;
      }
    } else if (auto* list = std::get_if<graph::TensorListArg>(&own); list != nullptr && list->names[0] == self) {
      list->names = {term.value};
      replaced = true;
    }
    inputs.push_back({a.name, replaced ? std::move(own) : translate(a.value, Where::kShared), a.kind});
  }
  graph::TensorMeta meta = original_.tensors.at(graph::output_names(node)[0]);
  meta.sizes.clear();
  for (const Expr& e : sizes) meta.sizes.push_back(builder_.at(e, term.where));
  meta.strides = graph::contiguous_strides(meta.sizes);
  meta.storage_offset = 0;
  return builder_.emit(node.target, std::move(inputs), node.name + "_part", std::move(meta), role_of(term.where),
                       &node);
}

std::string Rewriter::reshape_term(const Term& term, const std::vector<Expr>& sizes) {
  std::vector<Expr> placed;
  for (const Expr& e : sizes) placed.push_back(builder_.at(e, term.where));
  return builder_.reshape(term.value, placed, role_of(term.where));
}

std::string Rewriter::expand_term(const Term& term, const std::vector<Expr>& sizes) {
  std::vector<Expr> placed;
  for (const Expr& e : sizes) placed.push_back(builder_.at(e, term.where));
  return builder_.expand(term.value, placed, role_of(term.where));
}

}  // namespace ikbo::transform
