// Embedding bags of one length as lookups and reductions.
#include "transform/bags.h"

#include <algorithm>
#include <optional>
#include <set>

#include "graph/error.h"
#include "transform/jagged.h"
#include "transform/rules.h"

namespace ikbo::transform {
namespace {

using graph::Argument;
using graph::Expr;
using graph::Node;
using graph::TensorArg;

class Bags {
 public:
  explicit Bags(const graph::Graph& graph) : graph_(graph) {
    for (const auto& [name, meta] : graph_.tensors) taken_.insert(name);
    for (const auto& [name, e] : graph_.sym_ints) taken_.insert(name);
    for (const Node& node : graph_.nodes) {
      for (const std::string& name : graph::input_names(node)) read_.insert(name);
      for (const std::string& name : graph::output_names(node)) makers_[name] = &node;
    }
    for (const Argument& a : graph_.outputs) {
      for (const std::string& name : graph::value_names(a)) read_.insert(name);
    }
  }

  graph::Graph run() {
    graph::Graph result = graph_;
    result.nodes.clear();
    made_ = &result;
    for (const Node& node : graph_.nodes) {
      if (is_bag(node) && even(node)) {
        offsets_.insert(*tensor_argument(node, "offsets"));
        continue;
      }
      result.nodes.push_back(node);
    }
    drop_unread(result);
    return result;
  }

 private:
  // Offsets depend on the number of rows as a number, which models that broadcast inside may not read.
  void drop_unread(graph::Graph& result) const {
    std::set<std::string> read;
    for (const Node& node : result.nodes) {
      for (std::string& name : graph::input_names(node)) read.insert(std::move(name));
    }
    for (const Argument& a : result.outputs) {
      for (std::string& name : graph::value_names(a)) read.insert(std::move(name));
    }
    std::erase_if(result.nodes, [&](const Node& node) {
      const auto made = graph::output_names(node);
      return made.size() == 1 && offsets_.contains(made[0]) && !read.contains(made[0]);
    });
  }
  static std::int64_t integer(const Node& node, const char* argument, std::int64_t otherwise) {
    const Argument* a = node.find(argument);
    const auto* i = a != nullptr ? std::get_if<std::int64_t>(a) : nullptr;
    return i != nullptr ? *i : otherwise;
  }
  static bool from_the_end(const Node& node) {
    return node.target == "torch.ops.aten.embedding_bag.padding_idx" && integer(node, "padding_idx", 0) < 0;
  }
  static bool flag(const Node& node, const char* argument) {
    const Argument* a = node.find(argument);
    const auto* b = a != nullptr ? std::get_if<bool>(a) : nullptr;
    return b != nullptr && *b;
  }

  // The matrix (batch, length) that the indices are, row after row; nothing where bags have other lengths.
  std::optional<std::string> matrix(const Node& node) const {
    const std::string* indices = tensor_argument(node, "indices");
    const std::string* offsets = tensor_argument(node, "offsets");
    if (indices == nullptr || offsets == nullptr || !makers_.contains(*indices) || !makers_.contains(*offsets))
      return std::nullopt;
    const Node& view = *makers_.at(*indices);
    const Node& steps = *makers_.at(*offsets);
    if (!one_of(aten_name(view.target), {"reshape", "view", "flatten", "_unsafe_view"}) ||
        steps.target != "torch.ops.aten.arange.start_step") {
      return std::nullopt;
    }
    std::string self = graph::input_names(view)[0];
    const auto& sizes = graph_.tensors.at(self).sizes;
    const auto length = sizes.size() == 2 ? sizes[1].as_integer() : std::nullopt;
    const bool whole = length && graph_.tensors.at(*indices).sizes == std::vector<Expr>{sizes[0] * sizes[1]};
    const bool even = whole && integer(steps, "start", -1) == 0 && integer(steps, "step", -1) == *length &&
                      graph_.tensors.at(*offsets).sizes == std::vector<Expr>{sizes[0]};
    return even ? std::optional(std::move(self)) : std::nullopt;
  }

  bool even(const Node& node) {
    const auto results = graph::output_names(node);
    const std::string* weight = tensor_argument(node, "weight");
    const std::optional<std::string> ids = matrix(node);
    const std::int64_t mode = integer(node, "mode", 0);
    const std::int64_t padding = integer(node, "padding_idx", -1);
    if (weight == nullptr || !ids || results.empty() || mode < 0 || mode > 2) return false;
    if (std::any_of(results.begin() + 1, results.end(), [&](const auto& r) { return read_.contains(r); })) return false;
    const bool weighted = tensor_argument(node, "per_sample_weights") != nullptr;
    if (weighted || includes_last_offset(node) || flag(node, "scale_grad_by_freq")) return false;
    if (padding >= 0 && mode == 2) return false;
    // Counted from the end of the table, where the operator takes it; -1 means none to the others.
    if (padding < -1 || from_the_end(node)) return false;
    const auto& table = graph_.tensors.at(*weight).sizes;
    const auto& sizes = graph_.tensors.at(*ids).sizes;
    const std::vector<Expr> entries{sizes[0], sizes[1], table[1]};
    const std::vector<Expr> bags{sizes[0], table[1]};
    std::string rows = emit("embedding.default", {{"weight", TensorArg{*weight}, 1}, {"indices", TensorArg{*ids}, 1}},
                            entries, *weight);
    std::string count;  // of entries that are no padding
    if (padding >= 0) {
      const std::string kept =
          emit("ne.Scalar", {{"self", TensorArg{*ids}, 1}, {"other", padding, 1}}, sizes, *ids, graph::DType::kBool);
      const std::string mask = emit("unsqueeze.default", {{"self", TensorArg{kept}, 1}, {"dim", std::int64_t{2}, 1}},
                                    {sizes[0], sizes[1], 1}, kept);
      rows = emit("where.ScalarOther",
                  {{"condition", TensorArg{mask}, 1}, {"self", TensorArg{rows}, 1}, {"other", 0.0, 1}}, entries, rows);
      if (mode == 1) {
        const std::string total = emit("sum.dim_IntList", over_length(mask), {sizes[0], 1}, mask, graph::DType::kInt64);
        count =
            emit("clamp.default", {{"self", TensorArg{total}, 1}, {"min", std::int64_t{1}, 1}}, {sizes[0], 1}, total);
      }
    }
    const bool mean = mode == 1 && count.empty();
    const char* reduction = mode == 2 ? "amax.default" : mean ? "mean.dim" : "sum.dim_IntList";
    std::string result = emit(reduction, over_length(rows), bags, rows);
    if (!count.empty()) {
      result = emit("div.Tensor", {{"self", TensorArg{result}, 1}, {"other", TensorArg{count}, 1}}, bags, result);
    }
    // The last node makes the value that the original did.
    Node& last = made_->nodes.back();
    made_->tensors.erase(result);
    last.outputs = {TensorArg{results[0]}};
    last.name = results[0];
    return true;
  }

  static std::vector<graph::NamedArgument> over_length(const std::string& value) {
    return {{"self", TensorArg{value}, 1}, {"dim", std::vector<std::int64_t>{1}, 1}};
  }

  std::string emit(const char* target, std::vector<graph::NamedArgument> inputs, std::vector<Expr> sizes,
                   const std::string& like, std::optional<graph::DType> dtype = std::nullopt) {
    Node node;
    node.target = fmt::format("torch.ops.aten.{}", target);
    node.inputs = std::move(inputs);
    node.name = like + "_bag";
    for (int i = 1; !taken_.insert(node.name).second; ++i) node.name = fmt::format("{}_bag_{}", like, i);
    node.outputs = {TensorArg{node.name}};
    graph::TensorMeta meta = made_->tensors.at(like);
    meta.strides = graph::contiguous_strides(sizes);
    meta.sizes = std::move(sizes);
    meta.storage_offset = 0;
    meta.requires_grad = false;
    meta.dtype = dtype.value_or(meta.dtype);
    made_->tensors.emplace(node.name, std::move(meta));
    made_->nodes.push_back(std::move(node));
    return made_->nodes.back().name;
  }

  const graph::Graph& graph_;
  graph::Graph* made_ = nullptr;
  std::map<std::string, const Node*> makers_;
  std::set<std::string> read_;
  std::set<std::string> offsets_;  // of bags that were replaced
  std::set<std::string> taken_;
};

}  // namespace

graph::Graph even_bags(const graph::Graph& graph) {
  return Bags(graph).run();
}

}  // namespace ikbo::transform
