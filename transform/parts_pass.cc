// Operators over a value in parts that work on every piece alone: what is independent along the dimension that the
// pieces stand in can be computed piece by piece, each at its own batch.
#include <algorithm>

#include "graph/error.h"
#include "transform/rewriter.h"

namespace ikbo::transform {

using graph::Argument;
using graph::Expr;
using graph::Node;
using graph::TensorArg;

namespace {

// More pieces than this cost more in calls than the user's share can give back.
constexpr std::size_t kMostPieces = 8;

bool single_terms(const Parts& parts) {
  return std::all_of(parts.pieces.begin(), parts.pieces.end(),
                     [](const Piece& p) { return p.terms.size() == 1 && p.terms[0].sign == 1; });
}

bool has_user_piece(const Parts& parts) {
  return std::any_of(parts.pieces.begin(), parts.pieces.end(), [](const Piece& p) {
    return std::any_of(p.terms.begin(), p.terms.end(), [](const Term& t) { return t.where == Where::kUser; });
  });
}

}  // namespace

// Neighbours at the same batch become one tensor: fewer, larger operators.
void Rewriter::merge_neighbours(Parts& parts) {
  const auto d = static_cast<std::size_t>(parts.dim);
  std::vector<Piece> merged;
  for (std::size_t i = 0; i < parts.pieces.size();) {
    std::size_t end = i + 1;
    const Term& first = parts.pieces[i].terms[0];
    while (end < parts.pieces.size() && parts.pieces[end].terms[0].where == first.where) ++end;
    Piece piece{{}, 0};
    std::vector<std::string> values;
    for (std::size_t j = i; j < end; ++j) {
      const Piece& p = parts.pieces[j];
      std::vector<Expr> full = parts.shape;
      full[d] = p.extent;
      values.push_back(expand_term(p.terms[0], full));
      piece.extent = piece.extent + p.extent;
    }
    Term term = first;
    term.sizes = parts.shape;
    term.sizes[d] = piece.extent;
    term.value = builder_.cat(values, parts.dim, role_of(term.where));
    piece.terms.push_back(std::move(term));
    merged.push_back(std::move(piece));
    i = end;
  }
  parts.pieces = std::move(merged);
}

// A view that adds or drops dimensions of size 1, (B, 1, K) -> (B, K): the same of each piece.
std::optional<Parts> Rewriter::unit_dimensions(const Parts& parts, const std::vector<Expr>& before,
                                               const std::vector<Expr>& after) {
  std::vector<std::size_t> from;  // dimensions with more than one entry
  for (std::size_t i = 0; i < before.size(); ++i) {
    if (!before[i].is_integer(1)) from.push_back(i);
  }
  Parts out{-1, after, parts.pieces, parts.join};
  std::vector<int> source(after.size(), -1);
  std::size_t seen = 0;
  for (std::size_t i = 0; i < after.size(); ++i) {
    if (after[i].is_integer(1)) continue;
    if (seen == from.size() || !(before[from[seen]] == after[i])) return std::nullopt;
    source[i] = static_cast<int>(from[seen++]);
    if (source[i] == parts.dim) out.dim = static_cast<int>(i);
  }
  if (seen != from.size() || out.dim < 0) return std::nullopt;
  for (Piece& piece : out.pieces) {
    for (Term& term : piece.terms) {
      std::vector<Expr> sizes;
      for (const int s : source) sizes.push_back(s < 0 ? Expr(1) : term.sizes[static_cast<std::size_t>(s)]);
      term.value = reshape_term(term, sizes);
      term.sizes = std::move(sizes);
    }
  }
  return out;
}

// Entries at constant positions along the pieces' dimension: columns of a packed input, pairs of fields.
std::optional<Parts> Rewriter::picked(const Parts& parts, const RuleInput& in) {
  const bool selects = aten_name(in.node().target) == "index_select";
  std::optional<std::string> position;
  if (selects) {
    const auto d = in.dim("dim", static_cast<int>(parts.shape.size()));
    if (!d || *d != parts.dim || in.tensor("index") == nullptr) return std::nullopt;
    position = *in.tensor("index");
  } else {
    const auto* argument = in.node().find("indices");
    const auto* list = argument != nullptr ? std::get_if<graph::OptionalTensorListArg>(argument) : nullptr;
    if (list == nullptr || static_cast<int>(list->names.size()) != parts.dim + 1) return std::nullopt;
    for (std::size_t i = 0; i + 1 < list->names.size(); ++i) {
      if (list->names[i]) return std::nullopt;
    }
    position = list->names.back();
  }
  const auto constant = position ? shared_weight(*position) : std::nullopt;  // a list in the code is a clone of one
  if (!constant || constant->contents.scalar_type() != at::kLong || constant->contents.dim() != 1) return std::nullopt;
  std::int64_t extent = 0;
  for (const Piece& piece : parts.pieces) {
    const auto size = piece.extent.as_integer();
    if (!size) return std::nullopt;
    extent += *size;
  }
  const at::Tensor positions = constant->contents.contiguous();
  const auto* at = positions.const_data_ptr<std::int64_t>();
  Parts out{parts.dim, parts.shape, {}, true};
  for (std::int64_t i = 0; i < positions.numel();) {
    std::int64_t end = i + 1;
    while (end < positions.numel() && at[end] == at[end - 1] + 1) ++end;
    const std::int64_t from = at[i] < 0 ? at[i] + extent : at[i];
    if (from < 0 || from + (end - i) > extent) return std::nullopt;
    auto run = cut_parts(parts, from, from + (end - i));
    if (!run) return std::nullopt;
    for (Piece& piece : run->pieces) out.pieces.push_back(std::move(piece));
    if (out.pieces.size() > kMostPieces) return std::nullopt;
    i = end;
  }
  if (out.pieces.empty()) return std::nullopt;
  out.shape[static_cast<std::size_t>(parts.dim)] = positions.numel();
  return out;
}

// split, chunk, unbind: every result takes the pieces it needs, or a cut of each piece along another dimension.
bool Rewriter::split_parts(const Node& node, const RuleInput& in, const std::string& self) {
  const Parts& parts = *values_.at(self).parts;
  const auto& before = original_.tensors.at(self).sizes;
  const std::string op = aten_name(node.target);
  const bool drops = op == "unbind";
  if (!drops && !one_of(op, {"split", "split_with_sizes", "chunk"})) return false;
  const auto d = node.find("dim") == nullptr ? std::optional<int>(0) : in.dim("dim", static_cast<int>(before.size()));
  const auto batch = batch_shown_by_sizes(self);
  if (!d || !batch || batch->axis == *d || !(parts.shape == before)) return false;
  const auto axis = static_cast<std::size_t>(*d);
  std::vector<std::pair<std::string, Parts>> results;
  std::int64_t from = 0;
  for (const std::string& name : in.results()) {
    const auto& after = original_.tensors.at(name).sizes;
    const auto extent = drops ? std::optional<std::int64_t>(1) : after[axis].as_integer();
    if (!extent) return false;
    auto cut = *d == parts.dim ? cut_parts(parts, from, from + *extent) : cut_across(parts, *d, from, from + *extent);
    from += *extent;
    if (!cut) return false;
    if (*extent == 0 && *d == parts.dim) cut->pieces = {nothing_of(parts)};
    cut->shape[axis] = *extent;
    if (drops) {
      if (*d == parts.dim && (cut->pieces.size() != 1 || cut->pieces[0].terms.size() != 1)) return false;
      for (Piece& piece : cut->pieces) {
        for (Term& term : piece.terms) {
          std::vector<Expr> sizes = term.sizes;
          sizes.erase(sizes.begin() + *d);
          term.value = reshape_term(term, sizes);
          term.sizes = std::move(sizes);
        }
      }
      cut->shape = after;
      cut->dim = *d == parts.dim ? 0 : parts.dim - (*d < parts.dim ? 1 : 0);
    }
    results.emplace_back(name, std::move(*cut));
  }
  for (auto& [name, cut] : results) {
    if (bind_single_piece(name, cut)) continue;
    cut.join = cut.join || values_.at(self).node == nullptr;  // of a packed input, which is nowhere whole
    values_[name] = Value{Level::kCandidate, batch_shown_by_sizes(name), {}, {}, &node, cut};
  }
  return true;
}

// A piece of no entries, with the user where any piece is: it then keeps nobody at the candidate batch.
Piece Rewriter::nothing_of(const Parts& parts) {
  const auto user = std::find_if(parts.pieces.begin(), parts.pieces.end(),
                                 [](const Piece& p) { return p.terms[0].where == Where::kUser; });
  Term term = (user != parts.pieces.end() ? *user : parts.pieces.front()).terms[0];
  term.value = builder_.slice(term.value, parts.dim, 0, 0, role_of(term.where));
  term.sizes[static_cast<std::size_t>(parts.dim)] = 0;
  term.sign = 1;
  return {{std::move(term)}, 0};
}

// A stretch of another dimension than the one that the pieces stand in: of every piece.
std::optional<Parts> Rewriter::cut_across(const Parts& parts, int dim, std::int64_t from, std::int64_t to) {
  Parts out = parts;
  const auto d = static_cast<std::size_t>(dim);
  for (Piece& piece : out.pieces) {
    for (Term& term : piece.terms) {
      if (!(term.sizes[d] == parts.shape[d])) return std::nullopt;  // repeated along it
      term.value = builder_.slice(term.value, dim, from, to, role_of(term.where));
      term.sizes[d] = to - from;
    }
  }
  return out;
}

// f(cat(a, b)) == cat(f(a), f(b)): a rule that calls the rows along the pieces' dimension independent says so.
std::optional<Parts> Rewriter::piece_by_piece(const Node& node, const std::string& self) {
  const Rule* rule = find_rule(node.target);
  const Value& value = values_.at(self);
  if (rule == nullptr || rule->sizes_follow || is_random(node) || !value.batch) return std::nullopt;
  Parts parts = *value.parts;
  const auto& before = original_.tensors.at(self).sizes;
  const std::string result = graph::output_names(node)[0];
  const auto& after = original_.tensors.at(result).sizes;
  if (!(parts.shape == before) || value.batch->axis == parts.dim) return std::nullopt;
  if (!single_terms(parts) || !has_user_piece(parts)) return std::nullopt;
  if (!only_sizes_depend_on_batch(node)) return std::nullopt;
  if (node.outputs.size() != 1 || !std::holds_alternative<TensorArg>(node.outputs[0])) return std::nullopt;
  for (const graph::NamedArgument& a : node.inputs) {  // alone, or the only index: in a list it would not be replaced
    const auto names = graph::value_names(a.value);
    const bool read = std::find(names.begin(), names.end(), self) != names.end();
    const bool index = names.size() == 1 && (std::holds_alternative<graph::OptionalTensorListArg>(a.value) ||
                                             std::holds_alternative<graph::TensorListArg>(a.value));
    if (read && !index && !std::holds_alternative<TensorArg>(a.value)) return std::nullopt;
  }
  for (const std::string& name : graph::input_names(node)) {
    const auto it = values_.find(name);
    if (name != self && it != values_.end() && it->second.level != Level::kShared) return std::nullopt;
  }
  const std::map<std::string, Batch> along{{self, Batch{parts.dim, 1}}};
  const std::map<std::string, Batch> rows{{self, *value.batch}};
  const RuleResult pieces = rule->rows(RuleInput(original_, node, builder_.candidate_symbol(), along));
  std::string why;
  const RuleResult batch = apply_rule(RuleInput(original_, node, builder_.candidate_symbol(), rows), why);
  if (!pieces || pieces->size() != 1 || !(*pieces)[0] || !batch || !(*batch)[0]) return std::nullopt;
  const Batch moved = *(*pieces)[0];
  if (!moved.inner.is_integer(1) || moved.axis >= static_cast<int>(after.size()) || moved.axis == (*batch)[0]->axis) {
    return std::nullopt;
  }
  const auto axis = static_cast<std::size_t>(moved.axis);
  if (!(after[axis] == before[static_cast<std::size_t>(parts.dim)])) return std::nullopt;
  merge_neighbours(parts);
  if (parts.pieces.size() > kMostPieces) return std::nullopt;
  Parts out{moved.axis, after, {}, true};
  for (const Piece& piece : parts.pieces) {
    std::vector<Expr> sizes = after;
    sizes[axis] = piece.extent;
    const Term& term = piece.terms[0];
    out.pieces.push_back({{Term{term.where, apply_to_term(node, self, term, sizes), sizes}}, piece.extent});
  }
  return out;
}

// sum and mean over the pieces' dimension: each piece is summed alone, and the sums meet. A mean is one of means, each
// weighted by its share of the entries: sums of 16-bit values could overflow.
std::optional<Parts> Rewriter::reduced(const Node& node, const RuleInput& in, const std::string& self) {
  const Value& value = values_.at(self);
  Parts parts = *value.parts;
  const auto& meta = original_.tensors.at(self);
  const std::string result = graph::output_names(node)[0];
  const auto& result_meta = original_.tensors.at(result);
  const auto batch = batch_shown_by_sizes(result);
  const int rank = static_cast<int>(meta.sizes.size());
  const auto dims = in.integers("dim");
  if (!dims || dims->empty() || !(parts.shape == meta.sizes) || !value.batch || !batch) return std::nullopt;
  if (!graph::is_floating(meta.dtype) || result_meta.dtype != meta.dtype) return std::nullopt;
  if (!single_terms(parts) || !has_user_piece(parts)) return std::nullopt;
  bool over_pieces = false;
  for (std::int64_t d : *dims) {
    if (d < 0) d += rank;
    if (d < 0 || d >= rank || d == value.batch->axis) return std::nullopt;
    over_pieces = over_pieces || d == parts.dim;
  }
  const bool mean = aten_name(node.target) == "mean";
  const auto total = meta.sizes[static_cast<std::size_t>(parts.dim)].as_integer();
  if (!over_pieces || (mean && (!total || *total == 0))) return std::nullopt;
  merge_neighbours(parts);
  if (parts.pieces.size() > kMostPieces) return std::nullopt;
  if (mean) {
    std::erase_if(parts.pieces, [](const Piece& piece) { return piece.extent.is_integer(0); });
    for (const Piece& piece : parts.pieces) {
      if (!piece.extent.as_integer()) return std::nullopt;
    }
  }

  const auto emit = [&](const char* target, const std::string& a, const char* argument, Argument b, Where where) {
    return builder_.emit(target, {{"self", TensorArg{a}, 1}, {argument, std::move(b), 1}}, node.name + "_part",
                         builder_.meta(a), role_of(where), &node);
  };
  const int last = static_cast<int>(result_meta.sizes.size()) - 1;
  Parts out{last, result_meta.sizes, {Piece{{}, result_meta.sizes.back()}}, true};
  for (const Piece& piece : parts.pieces) {
    Term term{piece.terms[0].where, apply_to_term(node, self, piece.terms[0], result_meta.sizes), result_meta.sizes};
    if (mean) {
      const double share = static_cast<double>(*piece.extent.as_integer()) / static_cast<double>(*total);
      term.value = emit("torch.ops.aten.mul.Scalar", term.value, "other", share, term.where);
    }
    const auto same = std::find_if(out.pieces[0].terms.begin(), out.pieces[0].terms.end(),
                                   [&](const Term& t) { return t.where == term.where; });
    if (same != out.pieces[0].terms.end()) {
      same->value = emit("torch.ops.aten.add.Tensor", same->value, "other", TensorArg{term.value}, term.where);
    } else {
      out.pieces[0].terms.push_back(std::move(term));
    }
  }
  return out;
}

// A pointwise operator over several values whose pieces end at the same places: user pieces stay with the user.
std::optional<Parts> Rewriter::aligned(const Node& node) {
  const std::string result = graph::output_names(node)[0];
  const auto& meta = original_.tensors.at(result);
  if (!is_pointwise(node.target) || is_random(node) || !only_sizes_depend_on_batch(node)) return std::nullopt;
  std::optional<int> dim;
  std::vector<std::int64_t> ends;
  std::map<std::string, Parts> operands;
  std::vector<std::string> shared;
  for (const std::string& name : graph::input_names(node)) {
    if (!is_tensor(name)) continue;
    const Value& value = values_.at(name);
    if (value.level == Level::kShared) {
      shared.push_back(name);
      continue;
    }
    if (!value.parts || !(value.parts->shape == original_.tensors.at(name).sizes) ||
        !(value.parts->shape == meta.sizes) || !single_terms(*value.parts) || (dim && *dim != value.parts->dim)) {
      return std::nullopt;
    }
    dim = value.parts->dim;
    operands.emplace(name, *value.parts);
  }
  const auto batch = batch_shown_by_sizes(result);
  if (operands.empty() || !batch || batch->axis == *dim || operands.size() + shared.size() < 2) return std::nullopt;
  const auto d = static_cast<std::size_t>(*dim);
  for (const std::string& name : shared) {  // one entry along the batch, one or all along the pieces
    const auto& sizes = original_.tensors.at(name).sizes;
    const int shift = static_cast<int>(meta.sizes.size() - sizes.size());
    const int axis = batch->axis - shift;
    if (axis >= 0 && !sizes[static_cast<std::size_t>(axis)].is_integer(1)) return std::nullopt;
  }
  // Where pieces end in any operand.
  std::set<std::int64_t> cuts;
  for (auto& [name, parts] : operands) {
    merge_neighbours(parts);
    std::int64_t at = 0;
    for (const Piece& piece : parts.pieces) {
      const auto extent = piece.extent.as_integer();
      if (!extent) return std::nullopt;
      cuts.insert(at += *extent);
    }
  }
  if (cuts.size() > kMostPieces) return std::nullopt;
  struct Cell {
    std::map<std::string, Term> terms;
    std::int64_t from = 0;
    std::int64_t to = 0;
    bool user = true;
  };
  std::vector<Cell> cells;
  bool useful = false;
  std::int64_t from = 0;
  for (const std::int64_t to : cuts) {
    Cell cell{{}, from, to, true};
    for (const auto& [name, parts] : operands) {
      auto cut = cut_parts(parts, from, to);
      if (!cut || cut->pieces.size() != 1) return std::nullopt;
      const Term& term = cut->pieces[0].terms[0];
      cell.user = cell.user && term.where == Where::kUser;
      cell.terms.emplace(name, term);
    }
    useful = useful || cell.user;
    cells.push_back(std::move(cell));
    from = to;
  }
  if (!useful) return std::nullopt;
  Parts out{*dim, meta.sizes, {}, true};
  for (Cell& cell : cells) {
    const Where where = cell.user ? Where::kUser : Where::kCandidate;
    std::map<std::string, std::string> names;
    for (auto& [name, term] : cell.terms) {
      names[name] = cell.user ? term.value : at_candidate(term, original_.tensors.at(name), *batch);
    }
    for (const std::string& name : shared) {
      const auto& sizes = original_.tensors.at(name).sizes;
      const int axis = *dim - static_cast<int>(meta.sizes.size() - sizes.size());
      std::string value = values_.at(name).at_candidate;
      if (axis >= 0 && !sizes[static_cast<std::size_t>(axis)].is_integer(1)) {
        value = builder_.slice(value, axis, cell.from, cell.to, graph::Role::kConstant);
      }
      names[name] = value;
    }
    std::vector<Expr> sizes = meta.sizes;
    sizes[d] = cell.to - cell.from;
    out.pieces.push_back({{Term{where, apply_to_pieces(node, names, where, sizes), sizes}}, cell.to - cell.from});
  }
  return out;
}

std::string Rewriter::apply_to_pieces(const Node& node, const std::map<std::string, std::string>& operands, Where where,
                                      const std::vector<Expr>& sizes) {
  std::vector<graph::NamedArgument> inputs;
  for (const graph::NamedArgument& a : node.inputs) {
    const auto* t = std::get_if<TensorArg>(&a.value);
    const auto it = t != nullptr ? operands.find(t->name) : operands.end();
    inputs.push_back(
        {a.name, it != operands.end() ? Argument(TensorArg{it->second}) : translate(a.value, where), a.kind});
  }
  graph::TensorMeta meta = original_.tensors.at(graph::output_names(node)[0]);
  meta.sizes.clear();
  for (const Expr& e : sizes) meta.sizes.push_back(builder_.at(e, where));
  meta.strides = graph::contiguous_strides(meta.sizes);
  meta.storage_offset = 0;
  return builder_.emit(node.target, std::move(inputs), node.name + "_part", std::move(meta), role_of(where), &node);
}

// A term where the candidates are.
std::string Rewriter::at_candidate(const Term& term, const graph::TensorMeta& original, const Batch& batch) {
  if (term.where != Where::kUser) return term.value;
  graph::TensorMeta meta = original;
  meta.sizes = term.sizes;
  return broadcast(term.value, batch, meta);
}

}  // namespace ikbo::transform
