// Embedding bags of one length as lookups and reductions.
#include "transform/bags.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "graph/error.h"
#include "transform/editor.h"
#include "transform/jagged.h"
#include "transform/rules.h"

namespace ikbo::transform {
namespace {

using graph::Argument;
using graph::Expr;
using graph::Node;
using graph::TensorArg;

class Bags : GraphEditor {
 public:
  explicit Bags(graph::Archive archive) : GraphEditor(std::move(archive)), read_(values_read()) {}

  graph::Archive run() {
    const std::vector<Node> nodes = std::exchange(graph_.nodes, {});
    for (const Node& node : nodes) {
      if (is_bag(node) && even(node)) {
        offsets_.insert(*tensor_argument(node, "offsets"));
      } else {
        keep(node);
      }
    }
    drop_unread();
    return std::move(archive_);
  }

 private:
  std::set<std::string> values_read() const {
    std::set<std::string> read;
    for (const Node& node : graph_.nodes) {
      for (std::string& name : graph::input_names(node)) read.insert(std::move(name));
    }
    for (const Argument& a : graph_.outputs) {
      for (std::string& name : graph::value_names(a)) read.insert(std::move(name));
    }
    return read;
  }

  // Offsets depend on the number of rows as a number, which models that broadcast inside may not read.
  void drop_unread() {
    const std::set<std::string> read = values_read();
    std::erase_if(graph_.nodes, [&](const Node& node) {
      const auto made = graph::output_names(node);
      return made.size() == 1 && offsets_.contains(made[0]) && !read.contains(made[0]);
    });
  }

  static bool from_the_end(const Node& node) {
    return node.target == "torch.ops.aten.embedding_bag.padding_idx" &&
           integer_argument(node, "padding_idx").value_or(0) < 0;
  }

  // The matrix (batch, length) that the indices are, row after row; nothing where bags have other lengths.
  std::optional<std::string> matrix(const Node& node) const {
    const std::string* indices = tensor_argument(node, "indices");
    const std::string* offsets = tensor_argument(node, "offsets");
    if (indices == nullptr || offsets == nullptr || !makers_.contains(*indices) || !makers_.contains(*offsets))
      return std::nullopt;
    const Node& view = makers_.at(*indices);
    const Node& steps = makers_.at(*offsets);
    if (!one_of(aten_name(view.target), {"reshape", "view", "flatten", "_unsafe_view"}) ||
        steps.target != "torch.ops.aten.arange.start_step") {
      return std::nullopt;
    }
    std::string self = graph::input_names(view)[0];
    const auto& sizes = graph_.tensors.at(self).sizes;
    const auto length = sizes.size() == 2 ? sizes[1].as_integer() : std::nullopt;
    const bool whole = length && graph_.tensors.at(*indices).sizes == std::vector<Expr>{sizes[0] * sizes[1]};
    const bool even = whole && integer_argument(steps, "start") == 0 && integer_argument(steps, "step") == length &&
                      graph_.tensors.at(*offsets).sizes == std::vector<Expr>{sizes[0]};
    return even ? std::optional(std::move(self)) : std::nullopt;
  }

  bool even(const Node& node) {
    const auto results = graph::output_names(node);
    const std::string* weight = tensor_argument(node, "weight");
    const std::optional<std::string> ids = matrix(node);
    const std::int64_t mode = integer_argument(node, "mode").value_or(0);
    const std::int64_t padding = integer_argument(node, "padding_idx").value_or(-1);
    if (weight == nullptr || !ids || results.empty() || mode < 0 || mode > 2) return false;
    if (std::any_of(results.begin() + 1, results.end(), [&](const auto& r) { return read_.contains(r); })) return false;
    const bool weighted = tensor_argument(node, "per_sample_weights") != nullptr;
    if (weighted || boolean_argument(node, "include_last_offset") == true ||
        boolean_argument(node, "scale_grad_by_freq") == true) {
      return false;
    }
    if (padding >= 0 && mode == 2) return false;
    // Counted from the end of the table, where the operator takes it; -1 means none to the others.
    if (padding < -1 || from_the_end(node)) return false;
    const auto& table = graph_.tensors.at(*weight).sizes;
    const auto& sizes = graph_.tensors.at(*ids).sizes;
    const std::vector<Expr> entries{sizes[0], sizes[1], table[1]};
    const std::vector<Expr> bags{sizes[0], table[1]};
    std::string rows = emit("torch.ops.aten.embedding.default",
                            {{"weight", TensorArg{*weight}, 1}, {"indices", TensorArg{*ids}, 1}}, entries, *weight);
    std::string count;  // of entries that are no padding
    if (padding >= 0) {
      const std::string kept = emit("torch.ops.aten.ne.Scalar", {{"self", TensorArg{*ids}, 1}, {"other", padding, 1}},
                                    sizes, *ids, graph::DType::kBool);
      const std::string mask =
          emit("torch.ops.aten.unsqueeze.default", {{"self", TensorArg{kept}, 1}, {"dim", std::int64_t{2}, 1}},
               {sizes[0], sizes[1], 1}, kept);
      rows = emit("torch.ops.aten.where.ScalarOther",
                  {{"condition", TensorArg{mask}, 1}, {"self", TensorArg{rows}, 1}, {"other", 0.0, 1}}, entries, rows);
      if (mode == 1) {
        const std::string total =
            emit("torch.ops.aten.sum.dim_IntList", over_length(mask), {sizes[0], 1}, mask, graph::DType::kInt64);
        count = emit("torch.ops.aten.clamp.default", {{"self", TensorArg{total}, 1}, {"min", std::int64_t{1}, 1}},
                     {sizes[0], 1}, total);
      }
    }
    const bool mean = mode == 1 && count.empty();
    const char* reduction = mode == 2 ? "amax.default" : mean ? "mean.dim" : "sum.dim_IntList";
    std::string result = emit(std::string("torch.ops.aten.") + reduction, over_length(rows), bags, rows);
    if (!count.empty()) {
      result = emit("torch.ops.aten.div.Tensor", {{"self", TensorArg{result}, 1}, {"other", TensorArg{count}, 1}}, bags,
                    result);
    }
    // The last node makes the value that the original did.
    Node& last = graph_.nodes.back();
    graph_.tensors.erase(result);
    last.outputs = {TensorArg{results[0]}};
    last.name = results[0];
    return true;
  }

  static std::vector<graph::NamedArgument> over_length(const std::string& value) {
    return {{"self", TensorArg{value}, 1}, {"dim", std::vector<std::int64_t>{1}, 1}};
  }

  const std::set<std::string> read_;  // of the original's values
  std::set<std::string> offsets_;     // of bags that were replaced
};

}  // namespace

graph::Archive even_bags(graph::Archive archive) {
  return Bags(std::move(archive)).run();
}

}  // namespace ikbo::transform
