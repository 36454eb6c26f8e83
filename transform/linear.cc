// A linear layer over parts becomes ikbo::linear: each part is multiplied by its own columns of the weight, at its own
// batch, and the products meet through row indices. Source: linearity, W [a; b] = W_a a + W_b b. Where the whole is
// made for somebody else, the layer is only split if the user's columns save more than it costs.
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "graph/error.h"
#include "transform/rewriter.h"

namespace ikbo::transform {

using graph::Argument;
using graph::Expr;
using graph::Node;
using graph::Role;
using graph::TensorArg;

namespace {

constexpr std::int64_t kWorthSplitting = 130;

}  // namespace

// The given columns of a weight (N, K), block after block; a block is a signed sum of columns.
at::Tensor Rewriter::columns_of(const at::Tensor& weight, const std::vector<std::vector<WeightColumns>>& blocks) {
  std::vector<at::Tensor> columns;
  for (const auto& block : blocks) {
    if (block.size() == 1 && block[0].sign == 1) {
      columns.push_back(weight.slice(1, block[0].from, block[0].to));
      continue;
    }
    at::Tensor sum = at::zeros({weight.size(0), block[0].to - block[0].from}, at::kDouble);
    for (const WeightColumns& c : block) sum.add_(weight.slice(1, c.from, c.to).to(at::kDouble), c.sign);
    columns.push_back(sum.to(weight.scalar_type()));
  }
  return at::cat(columns, 1);
}

// A new parameter of columns_of; made once.
std::string Rewriter::weight_columns(const SharedWeight& weight,
                                     const std::vector<std::vector<WeightColumns>>& blocks) {
  std::string key = weight.key;
  for (const auto& block : blocks) {
    key += ";";
    for (const WeightColumns& c : block) key += fmt::format(" {}{}:{}", c.sign < 0 ? "-" : "+", c.from, c.to);
  }
  if (const auto it = weights_made_.find(key); it != weights_made_.end()) return it->second;

  const std::string wanted = fmt::format("{}_ikbo_{}", weight.target, weights_made_.size());
  return weights_made_[key] = builder_.parameter(wanted, columns_of(weight.contents, blocks));
}

// For row b * inner + j of the candidates' rows: the row of a tensor at `where` that belongs to it. Repeated tensors
// have one row for all j.
std::string Rewriter::row_index(Where where, bool repeated, const Expr& inner) {
  if (where == Where::kUser && inner.is_integer(1)) return index_;
  const std::string key = fmt::format("{}{}{}", where == Where::kUser ? "u" : "c", repeated ? "r" : "f", inner.srepr());
  if (const auto it = row_indices_.find(key); it != row_indices_.end()) return it->second;

  const Expr batch = Expr::symbol(builder_.candidate_symbol());
  const graph::TensorMeta like = builder_.meta(index_);
  const auto meta = [&](std::vector<Expr> sizes) {
    graph::TensorMeta m = like;
    m.strides = graph::contiguous_strides(sizes);
    m.sizes = std::move(sizes);
    return m;
  };
  const auto scalar = [&](const Expr& e) -> Argument {
    const graph::SymInt s = builder_.size(e);
    if (const auto* value = std::get_if<std::int64_t>(&s.value)) return *value;
    return s;
  };
  const auto arange = [&](const Expr& end) {
    return builder_.emit("torch.ops.aten.arange.default",
                         {{"end", scalar(end), 1},
                          {"dtype", graph::DTypeArg{like.dtype}, 2},
                          {"device", like.device, 2},
                          {"pin_memory", false, 2}},
                         "arange", meta({end}), Role::kCandidate);
  };
  const auto column = [&](const std::string& value) {
    return builder_.emit("torch.ops.aten.unsqueeze.default",
                         {{"self", TensorArg{value}, 1}, {"dim", std::int64_t{1}, 1}}, "row_index", meta({batch, 1}),
                         Role::kCandidate);
  };
  std::string rows;
  if (repeated) {
    rows = builder_.expand(column(where == Where::kUser ? index_ : arange(batch)), {batch, inner}, Role::kCandidate);
  } else {
    const std::string first = builder_.emit("torch.ops.aten.mul.Scalar",
                                            {{"self", TensorArg{column(index_)}, 1}, {"other", scalar(inner), 1}},
                                            "row_index", meta({batch, 1}), Role::kCandidate);
    rows = builder_.emit("torch.ops.aten.add.Tensor",
                         {{"self", TensorArg{first}, 1}, {"other", TensorArg{arange(inner)}, 1}}, "row_index",
                         meta({batch, inner}), Role::kCandidate);
  }
  return row_indices_[key] = builder_.reshape(rows, {batch * inner}, Role::kCandidate);
}

// Whether a value in parts, or what it is a view of, is put together for somebody else. An estimate: it decides about
// cost alone.
bool Rewriter::is_whole_anyway(const std::string& name) const {
  const auto is_view = [](const Node& node) {
    const std::string op = aten_name(node.target);
    return keeps_order(op) || one_of(op, {"transpose", "permute", "dropout"});
  };
  std::vector<std::string> same{name};
  for (const Node* node = values_.at(name).node; node != nullptr && is_view(*node);) {
    same.push_back(graph::input_names(*node)[0]);
    const auto source = values_.find(same.back());
    node = source == values_.end() ? nullptr : source->second.node;
  }
  while (!same.empty()) {
    const auto readers = readers_.find(same.back());
    const std::string read = std::move(same.back());
    same.pop_back();
    if (readers == readers_.end()) continue;
    for (const Node* reader : readers->second) {
      const std::string op = aten_name(reader->target);
      if (is_view(*reader) && reader->outputs.size() == 1) {
        const std::string result = graph::output_names(*reader)[0];
        if (result != name && read != result) same.push_back(result);
        continue;
      }
      const bool pairs = one_of(op, {"bmm", "matmul", "baddbmm"});
      if (op != "mul" && !pairs) continue;
      for (const std::string& other : graph::input_names(*reader)) {
        const auto it = values_.find(other);
        if (other == read || !is_tensor(other) || parameter_targets_.contains(other)) continue;
        if (it == values_.end() || (it->second.level != Level::kShared && (pairs || !it->second.parts))) return true;
      }
    }
  }
  return false;
}

bool Rewriter::lower_linear(const Node& node, const Product& product) {
  const Parts parts = *values_.at(product.input).parts;
  const std::size_t last = parts.shape.size() - 1;
  if (parts.dim != static_cast<int>(last) || last == 0) return false;
  // Rows: the batch outermost, `inner` rows for each of its entries.
  const auto first_inner = parts.shape[0].multiple_of(builder_.candidate_symbol());
  if (!first_inner) return false;
  Expr inner = *first_inner;
  for (std::size_t i = 1; i < last; ++i) inner = inner * parts.shape[i];
  const Expr batch = Expr::symbol(builder_.candidate_symbol());

  // Sort the terms by the batch that they are at and by whether they have one row for all `inner`.
  struct Block {
    Term term;
    std::vector<WeightColumns> columns;
  };
  std::map<std::pair<bool, bool>, std::vector<Block>> groups;  // (at the user batch, repeated)
  std::int64_t column = 0;
  for (const Piece& piece : parts.pieces) {
    const auto extent = piece.extent.as_integer();
    if (!extent) return false;
    for (Term term : piece.terms) {
      std::vector<Expr> full = parts.shape;
      full[last] = piece.extent;
      bool repeated = false;
      bool entry = first_inner->is_integer(1) && term.sizes[last] == piece.extent;  // one row an entry of the batch
      for (std::size_t i = 1; i < last; ++i) {
        if (!(term.sizes[i] == full[i])) repeated = true;
        entry = entry && term.sizes[i].is_integer(1);
      }
      if (!repeated || !entry) {
        term.value = expand_term(term, full);
        term.sizes = full;
        repeated = false;
      }
      auto& group = groups[{term.where == Where::kUser, repeated}];
      const auto same =
          std::find_if(group.begin(), group.end(), [&](const Block& b) { return b.term.value == term.value; });
      const WeightColumns columns{column, column + *extent, term.sign};
      if (same != group.end() && same->columns[0].to - same->columns[0].from == *extent) {
        same->columns.push_back(columns);
      } else {
        group.push_back({term, {columns}});
      }
    }
    column += *extent;
  }
  const bool whole = groups.size() == 1 && groups.contains({false, false});
  if (whole || product.weight.contents.size(1) != column) return false;
  // What is read and multiplied once a user instead of once a candidate, in entries read (eight multiplications take as
  // long), against what looking up and adding the user's sums costs: ikbo::linear over (1050, 48) and (15, 112) beats a
  // layer over (1050, 160) from 2 results on, over (1050, 57) and (15, 1) not with 64 (AVX-512, one core).
  std::int64_t saved = 0;
  for (const auto& [key, group] : groups) {
    for (const Block& block : group) {
      if (key.first || key.second)
        saved += (block.columns[0].to - block.columns[0].from) * (8 + product.weight.contents.size(0)) / 8;
    }
  }
  if (saved < kWorthSplitting && is_whole_anyway(product.input)) return false;
  if (!groups.contains({false, false})) {  // the candidates' rows, spelled out
    const auto repeated = groups.find({false, true});
    if (repeated == groups.end()) return false;
    for (Block& block : repeated->second) {
      std::vector<Expr> full = parts.shape;
      full[last] = block.term.sizes[last];
      block.term.value = expand_term(block.term, full);
      block.term.sizes = full;
    }
    groups[{false, false}] = std::move(repeated->second);
    groups.erase(repeated);
  }

  const auto gather = [&](std::vector<Block>& group, bool repeated) {
    std::vector<std::string> values;
    std::vector<std::vector<WeightColumns>> columns;
    for (Block& block : group) {
      values.push_back(reshape_term(block.term, {repeated ? batch : batch * inner, block.term.sizes[last]}));
      std::sort(block.columns.begin(), block.columns.end());
      columns.push_back(block.columns);
    }
    const Where where = group[0].term.where;
    return std::pair(builder_.cat(values, 1, role_of(where)), weight_columns(product.weight, columns));
  };
  const auto [x_cand, w_cand] = gather(groups.at({false, false}), false);
  graph::TensorListArg x_bcast;
  graph::TensorListArg w_bcast;
  graph::TensorListArg index;
  for (auto& [key, group] : groups) {
    if (key == std::pair(false, false)) continue;
    const auto [x, w] = gather(group, key.second);
    x_bcast.names.push_back(x);
    w_bcast.names.push_back(w);
    index.names.push_back(row_index(key.first ? Where::kUser : Where::kCandidate, key.second, inner));
  }

  const std::string result = graph::output_names(node)[0];
  graph::TensorMeta meta = original_.tensors.at(result);
  const std::vector<Expr> wanted = meta.sizes;
  meta.sizes = {batch * inner, product.weight.contents.size(0)};
  meta.strides = graph::contiguous_strides(meta.sizes);
  Argument placed_bias = graph::NoneArg{};
  if (!product.bias.empty()) placed_bias = TensorArg{at_candidate(product.bias)};
  const std::string made = builder_.emit("torch.ops.ikbo.linear.default",
                                         {{"x_cand", TensorArg{x_cand}, 1},
                                          {"w_cand", TensorArg{w_cand}, 1},
                                          {"x_bcast", x_bcast, 1},
                                          {"w_bcast", w_bcast, 1},
                                          {"index", index, 1},
                                          {"bias", placed_bias, 1},
                                          {"activation", std::string("none"), 1}},
                                         "ikbo_linear", std::move(meta), Role::kIkbo, &node,
                                         fmt::format("{} on parts at their own batches", node.name));
  Value value;
  value.level = Level::kCandidate;
  value.batch = batch_shown_by_sizes(result);
  value.at_candidate = builder_.reshape(made, wanted, Role::kCandidate);
  values_[result] = std::move(value);
  return true;
}

}  // namespace ikbo::transform
