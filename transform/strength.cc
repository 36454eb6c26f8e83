// Strength reduction: operators replaced by cheaper ones that give the same.
#include "transform/strength.h"

#include <ATen/ops/nonzero.h>

#include <algorithm>
#include <set>

#include "transform/editor.h"
#include "transform/rules.h"

namespace ikbo::transform {
namespace {

using graph::Argument;
using graph::Expr;
using graph::Graph;
using graph::Node;
using graph::TensorArg;

class Strength : GraphEditor {
 public:
  Strength(graph::Archive archive, Strengths wanted) : GraphEditor(std::move(archive)), wanted_(wanted) {}

  graph::Archive run() {
    std::vector<Node> nodes = std::move(graph_.nodes);
    graph_.nodes.clear();
    for (Node& node : nodes) {
      const std::string op = aten_name(node.target);
      if (op == "masked_select" ? constant_mask(node) : op == "index_put" && writes_in_rows(node)) continue;
      if (wanted_ == Strengths::kAll && cheaper(node, op)) continue;
      keep(std::move(node));
    }
    if (!unbacked_.empty()) {
      for (const auto& [symbol, size] : unbacked_) {
        archive_.program.ranges.erase(symbol);
        archive_.program.hints.erase(symbol);
      }
      std::erase_if(graph_.nodes, [&](const Node& node) { return checks_unbacked(node); });
      for (auto& [name, meta] : graph_.tensors) {
        for (Expr& e : meta.sizes) e = e.substitute(unbacked_);
        for (Expr& e : meta.strides) e = e.substitute(unbacked_);
      }
      for (auto& [name, e] : graph_.sym_ints) e = e.substitute(unbacked_);
    }
    return std::move(archive_);
  }

 private:
  bool cheaper(const Node& node, const std::string& op) {
    if (op == "index") return constant_positions(node);
    return (op == "matmul" || op == "bmm") &&
           (outer_product(node) || matrix_times_columns(node) || matrix_a_field(node));
  }

  // The two tensors of a product of floating-point numbers.
  struct Pair {
    std::string left;
    std::string right;
  };
  std::optional<Pair> operands(const Node& node) const {
    const auto names = graph::input_names(node);
    if (names.size() != 2 || node.inputs.size() != 2 || !graph_.tensors.contains(names[1])) return std::nullopt;
    const auto& a = graph_.tensors.at(names[0]);
    const auto& b = graph_.tensors.at(names[1]);
    if (!graph::is_floating(a.dtype) || a.dtype != b.dtype) return std::nullopt;
    return Pair{names[0], names[1]};
  }
  static bool fixed(const std::vector<Expr>& sizes) {
    return std::all_of(sizes.begin(), sizes.end(), [](const Expr& e) { return e.as_integer().has_value(); });
  }

  bool outer_product(const Node& node) {
    const auto pair = operands(node);
    if (!pair) return false;
    const auto& a = sizes(pair->left);
    const auto& b = sizes(pair->right);
    if (a.size() < 2 || b.size() < 2 || !a.back().is_integer(1) || !b[b.size() - 2].is_integer(1)) return false;
    finish(node, "torch.ops.aten.mul.Tensor",
           {{"self", TensorArg{pair->left}, 1}, {"other", TensorArg{pair->right}, 1}});
    return true;
  }

  bool matrix_times_columns(const Node& node) {
    const auto pair = operands(node);
    if (!pair) return false;
    const auto& w = sizes(pair->left);
    const auto& x = sizes(pair->right);
    if (w.size() != 2 || x.size() < 3 || !x.back().is_integer(1) || !fixed(w)) return false;
    const std::string rows = without(pair->right, static_cast<int>(x.size()) - 1);
    std::vector<Expr> made = sizes(rows);
    made.back() = w[0];
    const std::string y = emit("torch.ops.aten.linear.default",
                               {{"input", TensorArg{rows}, 1}, {"weight", TensorArg{pair->left}, 1}}, made, rows);
    finish(node, "torch.ops.aten.unsqueeze.default",
           {{"self", TensorArg{y}, 1}, {"dim", static_cast<std::int64_t>(x.size()) - 1, 1}});
    return true;
  }

  // (B, P, 1, K) times (P, K, N), or (P, N, K) times (B, P, K, 1): matmul would copy the matrices for every row.
  bool matrix_a_field(const Node& node) {
    const auto pair = operands(node);
    if (!pair) return false;
    const bool columns = sizes(pair->left).size() == 3;
    const std::string& vectors = columns ? pair->right : pair->left;
    std::string matrices = columns ? pair->left : pair->right;
    const std::vector<Expr> x = sizes(vectors);
    const std::vector<Expr> w = sizes(matrices);
    const std::size_t one = columns ? 3 : 2;
    if (x.size() != 4 || w.size() != 3 || !fixed(w) || !x[one].is_integer(1) || !(x[1] == w[0])) return false;
    const std::string rows = without(vectors, static_cast<int>(one));  // (B, P, K)
    const std::string fields_first = transposed(rows, 0, 1);
    if (columns) matrices = transposed(matrices, 1, 2);
    const std::string y =
        emit("torch.ops.aten.bmm.default", {{"self", TensorArg{fields_first}, 1}, {"mat2", TensorArg{matrices}, 1}},
             {x[1], x[0], sizes(matrices)[2]}, rows);
    finish(node, "torch.ops.aten.unsqueeze.default",
           {{"self", TensorArg{transposed(y, 0, 1)}, 1}, {"dim", static_cast<std::int64_t>(one), 1}});
    return true;
  }

  // The mask may be repeated along the last dimensions: whole stretches are picked then.
  bool constant_mask(const Node& node) {
    const auto names = graph::input_names(node);
    if (names.size() != 2) return false;
    const auto mask = constant(names[1]);
    const auto& x = sizes(names[0]);
    const auto unbacked = sizes(graph::output_names(node)[0])[0].symbols();
    if (!mask || mask->scalar_type() != at::kBool || unbacked.size() != 1) return false;
    auto rank = static_cast<std::size_t>(mask->dim());
    if (rank == 0 || x.size() <= rank) return false;
    const std::size_t rows = x.size() - rank;
    while (rank > 1 && mask->size(static_cast<std::int64_t>(rank) - 1) == 1) --rank;
    for (std::size_t d = 0; d < rank; ++d) {
      if (!x[rows + d].is_integer(mask->size(static_cast<std::int64_t>(d)))) return false;
    }
    const at::Tensor positions = at::nonzero(mask->reshape({-1})).reshape({-1});
    const auto dim = static_cast<std::int64_t>(rows);
    std::vector<Expr> flat(x.begin(), x.begin() + dim);
    flat.emplace_back(mask->numel());
    flat.insert(flat.end(), x.begin() + dim + static_cast<std::ptrdiff_t>(rank), x.end());
    const std::string entries = rank == 1 ? names[0]
                                          : emit("torch.ops.aten.flatten.using_ints",
                                                 {{"self", TensorArg{names[0]}, 1},
                                                  {"start_dim", dim, 1},
                                                  {"end_dim", dim + static_cast<std::int64_t>(rank) - 1, 1}},
                                                 flat, names[0]);
    flat[rows] = positions.numel();
    Expr all = 1;
    for (const Expr& e : flat) all = all * e;
    const std::string chosen = emit("torch.ops.aten.index_select.default",
                                    {{"self", TensorArg{entries}, 1},
                                     {"dim", dim, 1},
                                     {"index", TensorArg{buffer(names[1] + "_positions", positions)}, 1}},
                                    flat, names[0]);
    unbacked_.emplace(*unbacked.begin(), all);
    finish(node, "torch.ops.aten.flatten.using_ints", {{"self", TensorArg{chosen}, 1}});
    return true;
  }

  // x[:, positions], which index_select reads a row at a time.
  bool constant_positions(const Node& node) {
    const auto* self = node.inputs.empty() ? nullptr : std::get_if<TensorArg>(&node.inputs[0].value);
    const auto* list =
        node.inputs.size() < 2 ? nullptr : std::get_if<graph::OptionalTensorListArg>(&node.inputs[1].value);
    if (self == nullptr || list == nullptr || list->names.empty() || !list->names.back()) return false;
    const std::size_t dim = list->names.size() - 1;
    const auto given =
        std::count_if(list->names.begin(), list->names.end(), [](const auto& n) { return n.has_value(); });
    const auto positions = constant(*list->names.back());
    const auto& x = sizes(self->name);
    if (given != 1 || dim == 0 || dim >= x.size() || !positions || positions->scalar_type() != at::kLong) return false;
    const auto extent = x[dim].as_integer();
    if (positions->dim() != 1 || positions->numel() == 0 || !extent) return false;
    if (positions->min().item<std::int64_t>() < 0 || positions->max().item<std::int64_t>() >= *extent) return false;
    const std::string index = *list->names.back();
    finish(node, "torch.ops.aten.index_select.default",
           {{"self", TensorArg{self->name}, 1},
            {"dim", static_cast<std::int64_t>(dim), 1},
            {"index", TensorArg{index}, 1}});
    return true;
  }

  // x[rows, columns] = values, where the rows are 0, 0, ..., 1, 1, ...: every row is written to on its own. Which of
  // several writes to one place counts is open in both.
  bool writes_in_rows(const Node& node) {
    const auto* self = node.inputs.empty() ? nullptr : std::get_if<TensorArg>(&node.inputs[0].value);
    const Argument* argument = node.find("indices");
    const Argument* written = node.find("values");
    const auto* values = written != nullptr ? std::get_if<TensorArg>(written) : nullptr;
    const auto indices = argument != nullptr ? graph::value_names(*argument) : std::vector<std::string>();
    const auto* list = argument != nullptr ? std::get_if<graph::OptionalTensorListArg>(argument) : nullptr;
    const bool whole = list == nullptr || list->names.size() == indices.size();
    if (self == nullptr || values == nullptr || indices.size() != 2 || !whole) return false;
    const auto& x = sizes(self->name);
    const Argument* flag = node.find("accumulate");
    if (x.size() != 2 || (flag != nullptr && *flag != Argument(false))) return false;
    const auto length = row_numbers(indices[0], x[0]);
    const auto columns = length ? matrix_of(indices[1], x[0], *length) : std::nullopt;
    const auto matrix = length ? matrix_of(values->name, x[0], *length) : std::nullopt;
    if (!columns || !matrix || graph_.tensors.at(*columns).dtype != graph::DType::kInt64) return false;
    if (graph_.tensors.at(*matrix).dtype != graph_.tensors.at(self->name).dtype) return false;
    // Negative columns count from the end, which scatter does not know.
    const auto width = x[1].as_integer();
    if (!width) return false;
    const std::vector<Expr> entries{x[0], length.value()};
    const std::string ends =
        emit("torch.ops.aten.add.Scalar", {{"self", TensorArg{*columns}, 1}, {"other", *width, 1}}, entries, *columns);
    const std::string negative =
        emit("torch.ops.aten.lt.Scalar", {{"self", TensorArg{*columns}, 1}, {"other", std::int64_t{0}, 1}}, entries,
             *columns, graph::DType::kBool);
    const std::string counted =
        emit("torch.ops.aten.where.self",
             {{"condition", TensorArg{negative}, 1}, {"self", TensorArg{ends}, 1}, {"other", TensorArg{*columns}, 1}},
             entries, *columns);
    finish(node, "torch.ops.aten.scatter.src",
           {{"self", TensorArg{self->name}, 1},
            {"dim", std::int64_t{1}, 1},
            {"index", TensorArg{counted}, 1},
            {"src", TensorArg{*matrix}, 1}});
    return true;
  }

  // How often each of 0, 1, ..., rows - 1 stands in a value, one after the other.
  std::optional<std::int64_t> row_numbers(const std::string& value, const Expr& rows) const {
    const auto repeats = makers_.find(value);
    if (repeats == makers_.end() || repeats->second.target != "torch.ops.aten.repeat_interleave.self_int")
      return std::nullopt;
    const auto count = integer_argument(repeats->second, "repeats");
    const std::string source = graph::input_names(repeats->second)[0];
    const auto numbers = makers_.find(source);
    const bool from_zero = numbers != makers_.end() && numbers->second.target == "torch.ops.aten.arange.default";
    if (!from_zero || !(sizes(source) == std::vector<Expr>{rows})) return std::nullopt;
    return count;
  }

  // The matrix (rows, length) that a vector is, row after row.
  std::optional<std::string> matrix_of(const std::string& value, const Expr& rows, std::int64_t length) const {
    const auto view = makers_.find(value);
    if (view == makers_.end()) return std::nullopt;
    if (!one_of(aten_name(view->second.target), {"view", "reshape", "flatten", "_unsafe_view"})) return std::nullopt;
    const std::string source = graph::input_names(view->second)[0];
    const bool whole =
        sizes(source) == std::vector<Expr>{rows, length} && sizes(value) == std::vector<Expr>{rows * length};
    if (!whole || view->second.target == "torch.ops.aten.view.dtype") return std::nullopt;
    return source;
  }

  // What the export checks of a size that depended on data holds of the one that is known.
  bool checks_unbacked(const Node& node) const {
    if (aten_name(node.target) != "_assert_scalar") return false;
    const auto names = graph::input_names(node);
    return std::any_of(names.begin(), names.end(), [&](const std::string& name) {
      if (!graph_.sym_bools.contains(name)) return false;
      return std::any_of(unbacked_.begin(), unbacked_.end(),
                         [&](const auto& known) { return is_written_with(graph_.sym_bools.at(name), known.first); });
    });
  }

  // ---- Nodes ----
  std::string without(const std::string& value, int dim) {
    const auto maker = makers_.find(value);
    if (maker != makers_.end() && maker->second.target == "torch.ops.aten.unsqueeze.default") {
      const auto* d = std::get_if<std::int64_t>(&maker->second.inputs[1].value);
      const auto rank = static_cast<std::int64_t>(sizes(value).size());
      if (d != nullptr && (*d < 0 ? *d + rank : *d) == dim) return graph::input_names(maker->second)[0];
    }
    std::vector<Expr> rest = sizes(value);
    rest.erase(rest.begin() + dim);
    return emit("torch.ops.aten.squeeze.dim", {{"self", TensorArg{value}, 1}, {"dim", std::int64_t{dim}, 1}}, rest,
                value);
  }
  std::string transposed(const std::string& value, int dim0, int dim1) {
    std::vector<Expr> wanted = sizes(value);
    std::swap(wanted[static_cast<std::size_t>(dim0)], wanted[static_cast<std::size_t>(dim1)]);
    return emit("torch.ops.aten.transpose.int",
                {{"self", TensorArg{value}, 1}, {"dim0", std::int64_t{dim0}, 1}, {"dim1", std::int64_t{dim1}, 1}},
                std::move(wanted), value);
  }

  const Strengths wanted_;
  std::map<std::string, Expr> unbacked_;  // sizes that are known now
};

}  // namespace

graph::Archive reduce_strength(const graph::Archive& archive, Strengths wanted) {
  return Strength(archive, wanted).run();
}

}  // namespace ikbo::transform
