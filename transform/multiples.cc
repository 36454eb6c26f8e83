#include "transform/multiples.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/matmul.h>

#include <algorithm>

#include "transform/editor.h"
#include "transform/rules.h"

namespace ikbo::transform {
namespace {

using graph::Argument;
using graph::Expr;
using graph::Node;
using graph::TensorArg;

// How a matrix (R, D) lies in a value.
enum class Layout {
  kRows,        // (R, D)
  kColumns,     // (R, D, 1)
  kTransposed,  // (D, R)
};

// scale * base + offset, row by row. It is written where somebody else needs it, by one operator.
struct Multiple {
  std::string base;   // (R, D)
  std::string scale;  // (R, 1); empty: 1
  at::Tensor offset;  // (D), in float64; undefined: 0
  Layout layout = Layout::kRows;
  Node node;  // of the original

  bool is_base() const { return scale.empty() && !offset.defined(); }
};

at::Tensor sum(const at::Tensor& a, const at::Tensor& b) {
  return !a.defined() ? b : !b.defined() ? a : a + b;
}

class Multiples : GraphEditor {
 public:
  // `bases`: the values whose multiples are followed.
  Multiples(graph::Archive archive, std::optional<std::set<std::string>> bases)
      : GraphEditor(std::move(archive)), bases_(std::move(bases)) {}

  graph::Archive run() {
    std::vector<Node> nodes = std::move(graph_.nodes);
    graph_.nodes.clear();
    for (Node& node : nodes) {
      if (follow(node)) continue;
      for (const std::string& name : graph::input_names(node)) write(name);
      keep(std::move(node));
    }
    for (const Argument& out : graph_.outputs) {
      for (const std::string& name : graph::value_names(out)) write(name);
    }
    for (auto& [base, product] : products_) {
      const std::string weight = buffer(base + "_weights", at::cat(product.weights, 0));
      const auto node = std::find_if(graph_.nodes.begin(), graph_.nodes.end(),
                                     [&](const Node& n) { return n.name == product.value; });
      node->inputs[1].value = TensorArg{weight};
      auto& meta = graph_.tensors.at(product.value);
      meta.sizes[1] = product.features;
      meta.strides = graph::contiguous_strides(meta.sizes);
    }
    return std::move(archive_);
  }

  // Of which a linear layer was taken before a multiplication or an addition.
  const std::set<std::string>& gains() const { return gains_; }

 private:
  bool follow(const Node& node) {
    const auto names = graph::input_names(node);
    if (node.outputs.size() != 1 || !std::holds_alternative<TensorArg>(node.outputs[0]) || names.empty()) return false;
    if (!graph_.tensors.contains(names[0])) return false;
    const std::string op = aten_name(node.target);
    if (op == "mul") return scaled(node, 0, 1) || scaled(node, 1, 0);
    if (op == "add") return added(node);
    if (op == "cat" || op == "concat") return joined(node);
    if (one_of(op, {"linear", "matmul", "mm", "tensordot"})) return multiplied(node);
    return viewed(node);
  }

  // ---- Values ----
  // What a value is a multiple of; itself, where it may have multiples.
  std::optional<Multiple> multiple(const std::string& name) const {
    if (const auto it = multiples_.find(name); it != multiples_.end()) return it->second;
    if (bases_ && !bases_->contains(name)) return std::nullopt;
    if (!graph_.tensors.contains(name) || targets_.contains(name) || joins_.contains(name)) return std::nullopt;
    const graph::TensorMeta& meta = graph_.tensors.at(name);
    const bool exact = meta.dtype == graph::DType::kFloat32 || meta.dtype == graph::DType::kFloat64;
    if (!exact || meta.sizes.size() != 2 || meta.sizes[1].as_integer().value_or(0) < 2) return std::nullopt;
    if (meta.sizes[0] == meta.sizes[1]) return std::nullopt;  // whether it is transposed would not show
    return Multiple{name, {}, {}, Layout::kRows, {}};
  }
  // Known as more than itself, and not written yet.
  bool is_open(const std::string& name) const {
    const auto it = multiples_.find(name);
    return it != multiples_.end() && !it->second.is_base() && !written_.contains(name);
  }
  std::int64_t width(const Multiple& m) const { return *sizes(m.base)[1].as_integer(); }
  std::vector<Expr> laid_out(const Multiple& m, const Expr& columns) const {
    const Expr& rows = sizes(m.base)[0];
    if (m.layout == Layout::kColumns) return {rows, columns, 1};
    return m.layout == Layout::kRows ? std::vector<Expr>{rows, columns} : std::vector<Expr>{columns, rows};
  }
  bool bind(const Node& node, Multiple m) {
    const std::string result = graph::output_names(node)[0];
    if (!(sizes(result) == laid_out(m, width(m)))) return false;
    if (graph_.tensors.at(result).dtype != graph_.tensors.at(m.base).dtype) return false;
    m.node = node;
    multiples_[result] = std::move(m);
    return true;
  }
  std::string parameter(const Multiple& m, const at::Tensor& contents) {
    return buffer(m.base + "_constant", contents.to(graph::scalar_type(graph_.tensors.at(m.base).dtype)));
  }

  // Writes a value under its own name, if it was left out.
  void write(const std::string& name) {
    if (written_.contains(name)) return;
    if (const auto it = joins_.find(name); it != joins_.end()) {
      written_.insert(name);
      for (const std::string& part : graph::input_names(it->second)) write(part);
      keep(it->second);
      return;
    }
    const auto it = multiples_.find(name);
    if (it == multiples_.end()) return;
    written_.insert(name);
    const Multiple& m = it->second;
    std::string target = "torch.ops.aten.alias.default";
    std::vector<graph::NamedArgument> inputs{{"self", TensorArg{m.base}, 1}};
    if (m.offset.defined()) {
      const std::string offset = parameter(m, m.offset);
      target = m.scale.empty() ? "torch.ops.aten.add.Tensor" : "torch.ops.aten.addcmul.default";
      inputs = {{"self", TensorArg{offset}, 1}};
      if (m.scale.empty()) {
        inputs.push_back({"other", TensorArg{m.base}, 1});
      } else {
        inputs.push_back({"tensor1", TensorArg{m.base}, 1});
        inputs.push_back({"tensor2", TensorArg{m.scale}, 1});
      }
    } else if (!m.scale.empty()) {
      target = "torch.ops.aten.mul.Tensor";
      inputs.push_back({"other", TensorArg{m.scale}, 1});
    }
    if (m.layout == Layout::kRows) {
      finish(m.node, target, std::move(inputs));
      return;
    }
    const std::string rows = m.is_base() ? m.base : emit(target, std::move(inputs), sizes(m.base), m.base);
    if (m.layout == Layout::kColumns) {
      finish(m.node, "torch.ops.aten.unsqueeze.default", {{"self", TensorArg{rows}, 1}, {"dim", std::int64_t{2}, 1}});
    } else {
      finish(m.node, "torch.ops.aten.transpose.int",
             {{"self", TensorArg{rows}, 1}, {"dim0", std::int64_t{0}, 1}, {"dim1", std::int64_t{1}, 1}});
    }
  }

  // ---- One number a row ----
  // (R, 1) of a value that meets a multiple's entries row by row.
  std::optional<std::string> number(const std::string& value, const Multiple& m) {
    const Expr& rows = sizes(m.base)[0];
    const std::vector<Expr>& shape = sizes(value);
    const std::vector<Expr> wanted = m.layout == Layout::kTransposed ? std::vector<Expr>{rows} : laid_out(m, 1);
    if (!(shape == wanted) || graph_.tensors.at(value).dtype != graph_.tensors.at(m.base).dtype) return std::nullopt;
    if (m.layout == Layout::kRows) return value;
    if (const auto it = numbers_.find(value); it != numbers_.end()) return it->second;
    const bool column = m.layout == Layout::kColumns;
    const std::int64_t dim = column ? 2 : 1;
    return numbers_[value] = emit(column ? "torch.ops.aten.squeeze.dim" : "torch.ops.aten.unsqueeze.default",
                                  {{"self", TensorArg{value}, 1}, {"dim", dim, 1}}, {rows, 1}, value);
  }
  std::string numbers(const char* target, const std::string& a, Argument b) {
    return emit(target, {{"self", TensorArg{a}, 1}, {"other", std::move(b), 1}}, sizes(a), a);
  }

  // ---- Operators ----
  bool scaled(const Node& node, std::size_t vector, std::size_t by) {
    const auto names = graph::input_names(node);
    if (names.size() != 2 || !graph_.tensors.contains(names[1])) return false;
    auto m = multiple(names[vector]);
    if (!m || m->offset.defined()) return false;
    if (!(sizes(graph::output_names(node)[0]) == laid_out(*m, width(*m)))) return false;
    const auto factor = number(names[by], *m);
    if (!factor) return false;
    m->scale = m->scale.empty() ? *factor : numbers("torch.ops.aten.mul.Tensor", m->scale, TensorArg{*factor});
    return bind(node, std::move(*m));
  }

  bool added(const Node& node) {
    const auto names = graph::input_names(node);
    if (names.size() != 2 || !graph_.tensors.contains(names[1])) return false;
    const Argument* alpha = node.find("alpha");
    if (alpha != nullptr && *alpha != Argument(std::int64_t{1})) return false;
    for (const std::size_t i : {0, 1}) {
      auto m = multiple(names[i]);
      if (!m) continue;
      if (const auto c = constant(names[1 - i])) {
        if (m->layout == Layout::kTransposed || c->numel() != width(*m)) return false;
        if (c->scalar_type() != graph::scalar_type(graph_.tensors.at(m->base).dtype)) return false;
        const std::int64_t last = m->layout == Layout::kColumns ? 2 : 1;  // D stands where the multiple's does
        if (c->dim() < last || c->size(c->dim() - last) != width(*m)) return false;
        m->offset = sum(m->offset, c->reshape({-1}).to(at::kDouble));
        return bind(node, std::move(*m));
      }
    }
    const auto a = multiple(names[0]);
    const auto b = multiple(names[1]);
    if (!a || !b || a->base != b->base || a->layout != b->layout) return false;
    if (a->scale.empty() && b->scale.empty()) return false;
    Multiple both = *a;
    const std::string& one = a->scale.empty() ? b->scale : a->scale;
    const Argument other = a->scale.empty() || b->scale.empty() ? Argument(1.0) : Argument(TensorArg{b->scale});
    both.scale = numbers("torch.ops.aten.add.Tensor", one, other);
    both.offset = sum(a->offset, b->offset);
    return bind(node, std::move(both));
  }

  bool viewed(const Node& node) {
    const std::string op = aten_name(node.target);
    if ((!keeps_order(op) && !one_of(op, {"transpose", "dropout"})) || is_random(node)) return false;
    const std::string self = graph::input_names(node)[0];
    const auto& shape = sizes(graph::output_names(node)[0]);
    if (const auto it = joins_.find(self); it != joins_.end()) {  // the same values in the same places
      if (written_.contains(self) || op == "transpose" || !(shape == sizes(self))) return false;
      Node copy = it->second;
      copy.name = node.name;
      copy.outputs = node.outputs;
      joins_[graph::output_names(node)[0]] = std::move(copy);
      return true;
    }
    auto m = multiple(self);
    if (!m) return false;
    const auto becomes = [&](Layout layout) {
      m->layout = layout;
      return shape == laid_out(*m, width(*m));
    };
    const Layout before = m->layout;
    if (op == "transpose") {
      const auto fits = before == Layout::kRows ? becomes(Layout::kTransposed)
                                                : before == Layout::kTransposed && becomes(Layout::kRows);
      return fits && bind(node, std::move(*m));
    }
    if (before == Layout::kTransposed) return becomes(before) && bind(node, std::move(*m));
    const bool fits = becomes(Layout::kRows) || becomes(Layout::kColumns);
    return fits && bind(node, std::move(*m));
  }

  // A concatenation waits for who reads it.
  bool joined(const Node& node) {
    const auto names = graph::input_names(node);
    const std::string result = graph::output_names(node)[0];
    const auto dim = integer_argument(node, "dim");
    if ((dim != 1 && dim != -1) || sizes(result).size() != 2) return false;
    const bool open = std::any_of(names.begin(), names.end(), [&](const auto& n) { return is_open(n); });
    const bool whole = std::all_of(names.begin(), names.end(), [&](const auto& n) {
      return graph_.tensors.contains(n) && sizes(n).size() == 2 && sizes(n)[1].as_integer() &&
             graph_.tensors.at(n).dtype == graph_.tensors.at(result).dtype;
    });
    if (!open || !whole) return false;
    joins_[result] = node;
    return true;
  }

  // The weight (N, D) of a product with all rows.
  struct Weight {
    at::Tensor contents;
    at::Tensor bias;  // undefined: none
  };
  std::optional<Weight> weight(const Node& node, Layout layout) const {
    const std::string op = aten_name(node.target);
    const auto names = graph::input_names(node);
    if (names.size() < 2 || !graph_.tensors.contains(names[1]) || names[0] == names[1]) return std::nullopt;
    auto w = constant(names[1]);
    if (!w || w->scalar_type() != graph::scalar_type(graph_.tensors.at(graph::output_names(node)[0]).dtype))
      return std::nullopt;
    if (op == "linear" && layout == Layout::kRows && w->dim() == 2) {
      if (names.size() == 2) return Weight{*w, {}};
      const auto bias = constant(names[2]);
      return bias ? std::optional(Weight{*w, bias->to(at::kDouble)}) : std::nullopt;
    }
    if ((op == "matmul" || op == "mm") && layout == Layout::kRows && names.size() == 2 && w->dim() == 2) {
      return Weight{w->transpose(0, 1), {}};
    }
    const auto over = [&](const char* argument, std::int64_t dim) {
      const Argument* dims = node.find(argument);
      return dims != nullptr && *dims == Argument(std::vector<std::int64_t>{dim});
    };
    if (op != "tensordot" || names.size() != 2 || !over("dims_self", 1) || !over("dims_other", 0)) return std::nullopt;
    const bool one = layout == Layout::kRows ? w->dim() == 1 : w->dim() == 2 && w->size(1) == 1;
    return one && layout != Layout::kTransposed ? std::optional(Weight{w->reshape({1, -1}), {}}) : std::nullopt;
  }

  bool multiplied(const Node& node) {
    const std::string input = graph::input_names(node)[0];
    const auto m = multiple(input);
    if (!m) {
      const auto join = joins_.find(input);
      const bool waits = join != joins_.end() && !written_.contains(input) && aten_name(node.target) != "tensordot";
      const auto w = waits ? weight(node, Layout::kRows) : std::nullopt;
      return w && multiplied_apart(node, join->second, *w);
    }
    const auto w = weight(node, m->layout);
    if (!w || w->contents.size(1) != width(*m)) return false;
    const std::int64_t features = w->contents.size(0);
    // With as many results as entries it costs no less; a layer of the base alone is only taken along.
    if (is_open(input) ? features >= width(*m) : features != 1 || !m->is_base()) return false;
    if (is_open(input)) gains_.insert(m->base);
    const at::Tensor constant = sum(of_offset(*m, w->contents), w->bias);
    Operator made = product(*m, w->contents, constant.defined() ? parameter(*m, constant) : std::string());
    if (aten_name(node.target) != "tensordot") {
      finish(node, made.target, std::move(made.inputs));
      return true;
    }
    const std::string rows = emit(made.target, std::move(made.inputs), {sizes(m->base)[0], 1}, m->base);
    const bool column = m->layout == Layout::kColumns;
    numbers_[graph::output_names(node)[0]] = rows;
    finish(node, column ? "torch.ops.aten.unsqueeze.default" : "torch.ops.aten.squeeze.dim",
           {{"self", TensorArg{rows}, 1}, {"dim", std::int64_t{column ? 2 : 1}, 1}});
    return true;
  }

  // The layer over a concatenation: multiples apart from the rest.
  bool multiplied_apart(const Node& node, const Node& join, const Weight& w) {
    std::vector<std::pair<Multiple, at::Tensor>> apart;
    graph::TensorListArg rest;
    std::vector<at::Tensor> weights;
    at::Tensor constant = w.bias;
    std::int64_t column = 0;
    Expr width_of_rest = 0;
    const auto parts = graph::input_names(join);
    for (const std::string& name : parts) width_of_rest = width_of_rest + sizes(name)[1];
    if (!width_of_rest.is_integer(w.contents.size(1))) return false;
    width_of_rest = 0;
    for (const std::string& name : parts) {
      const std::int64_t extent = *sizes(name)[1].as_integer();
      const at::Tensor columns = w.contents.slice(1, column, column + extent);
      column += extent;
      if (is_open(name) && w.contents.size(0) < extent) {
        apart.emplace_back(multiples_.at(name), columns);
        constant = sum(constant, of_offset(apart.back().first, columns));
        continue;
      }
      rest.names.push_back(name);
      weights.push_back(columns);
      width_of_rest = width_of_rest + Expr(extent);
    }
    if (apart.empty()) return false;
    const std::string base = apart[0].first.base;
    const Expr& rows = sizes(graph::output_names(node)[0])[0];
    std::string added = constant.defined() ? parameter(apart[0].first, constant) : std::string();
    if (!rest.names.empty()) {
      for (const std::string& name : rest.names) write(name);
      std::string x = rest.names[0];
      if (rest.names.size() > 1) {
        x = emit("torch.ops.aten.cat.default", {{"tensors", rest, 1}, {"dim", std::int64_t{1}, 1}},
                 {rows, width_of_rest}, base);
      }
      std::vector<graph::NamedArgument> inputs{{"input", TensorArg{x}, 1}};
      inputs.push_back({"weight", TensorArg{buffer(base + "_rest", at::cat(weights, 1))}, 1});
      if (!added.empty()) inputs.push_back({"bias", TensorArg{added}, 1});
      added = emit("torch.ops.aten.linear.default", std::move(inputs), {rows, w.contents.size(0)}, base);
    }
    for (std::size_t i = 0; i < apart.size(); ++i) {
      const auto& [m, columns] = apart[i];
      gains_.insert(m.base);
      Operator made = product(m, columns, added);
      if (i + 1 == apart.size()) {
        finish(node, made.target, std::move(made.inputs));
      } else {
        added = emit(made.target, std::move(made.inputs), {rows, w.contents.size(0)}, base);
      }
    }
    return true;
  }

  struct Operator {
    std::string target;
    std::vector<graph::NamedArgument> inputs;
  };
  // scale * W base, plus what is added.
  Operator product(const Multiple& m, const at::Tensor& w, const std::string& added) {
    const std::string columns = of_base(m.base, w);
    if (added.empty() && m.scale.empty()) return {"torch.ops.aten.alias.default", {{"self", TensorArg{columns}, 1}}};
    if (m.scale.empty()) {
      return {"torch.ops.aten.add.Tensor", {{"self", TensorArg{columns}, 1}, {"other", TensorArg{added}, 1}}};
    }
    if (added.empty()) {
      return {"torch.ops.aten.mul.Tensor", {{"self", TensorArg{columns}, 1}, {"other", TensorArg{m.scale}, 1}}};
    }
    return {"torch.ops.aten.addcmul.default",
            {{"self", TensorArg{added}, 1}, {"tensor1", TensorArg{columns}, 1}, {"tensor2", TensorArg{m.scale}, 1}}};
  }
  static at::Tensor of_offset(const Multiple& m, const at::Tensor& w) {
    return m.offset.defined() ? at::matmul(w.to(at::kDouble), m.offset) : at::Tensor();
  }

  // W base: its rows of the one product that all layers share.
  std::string of_base(const std::string& base, const at::Tensor& w) {
    const Expr& rows = sizes(base)[0];
    Product& shared = products_[base];
    if (shared.value.empty()) {
      shared.value = emit("torch.ops.aten.linear.default",
                          {{"input", TensorArg{base}, 1}, {"weight", TensorArg{base}, 1}}, {rows, 0}, base);
    }
    const std::int64_t from = shared.features;
    shared.features += w.size(0);
    shared.weights.push_back(w);
    return emit("torch.ops.aten.slice.Tensor",
                {{"self", TensorArg{shared.value}, 1},
                 {"dim", std::int64_t{1}, 1},
                 {"start", from, 1},
                 {"end", shared.features, 1}},
                {rows, w.size(0)}, base);
  }

  // One product with a value that several layers are taken of; the weight is made when all of them are known.
  struct Product {
    std::string value;
    std::vector<at::Tensor> weights;
    std::int64_t features = 0;
  };

  const std::optional<std::set<std::string>> bases_;
  std::map<std::string, Multiple> multiples_;
  std::map<std::string, Node> joins_;
  std::set<std::string> written_;               // of both
  std::map<std::string, std::string> numbers_;  // (R), (R, 1, 1) -> (R, 1)
  std::map<std::string, Product> products_;     // by base
  std::set<std::string> gains_;
};

}  // namespace

graph::Archive multiply_last(const graph::Archive& archive) {
  Multiples trial(archive, std::nullopt);
  trial.run();
  if (trial.gains().empty()) return archive;
  return Multiples(archive, trial.gains()).run();
}

}  // namespace ikbo::transform
