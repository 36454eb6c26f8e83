// Products of a value with a weight that all rows share, in the forms that models write them.
#include <algorithm>

#include "transform/rewriter.h"

namespace ikbo::transform {

using graph::Argument;
using graph::Node;
using graph::TensorArg;

const graph::Weight* Rewriter::weight_of(const std::string& name) const {
  const auto target = parameter_targets_.find(name);
  if (target == parameter_targets_.end()) return nullptr;
  for (const auto* table : {&archive_.weights, &archive_.constants}) {
    const auto it = table->find(target->second);
    if (it != table->end()) return &it->second;
  }
  return nullptr;
}

// The contents of a parameter, or of views of one. What is expanded to the batch keeps its one row.
std::optional<Rewriter::SharedWeight> Rewriter::shared_weight(const std::string& name) const {
  if (const graph::Weight* weight = weight_of(name)) {
    return SharedWeight{name, parameter_targets_.at(name), graph::weight_tensor(*weight)};
  }
  const auto it = values_.find(name);
  if (it == values_.end() || it->second.node == nullptr) return std::nullopt;
  if (it->second.level != Level::kShared && it->second.level != Level::kUniform) return std::nullopt;
  const Node& node = *it->second.node;
  const std::map<std::string, Batch> none;
  const RuleInput in(original_, node, builder_.candidate_symbol(), none);
  if (in.operands().size() != 1) return std::nullopt;
  auto base = shared_weight(in.operands()[0]);
  if (!base) return std::nullopt;
  base->key = name;
  at::Tensor& t = base->contents;
  const auto rank = static_cast<int>(t.dim());
  const std::string op = aten_name(node.target);
  if (keeps_values(op)) return base;
  if (op == "t" && rank == 2) {
    t = t.transpose(0, 1);
    return base;
  }
  if (op == "transpose") {
    const auto d0 = in.dim("dim0", rank);
    const auto d1 = in.dim("dim1", rank);
    if (!d0 || !d1) return std::nullopt;
    t = t.transpose(*d0, *d1);
    return base;
  }
  if (op == "permute") {
    const auto dims = in.integers("dims");
    if (!dims) return std::nullopt;
    t = t.permute(*dims);
    return base;
  }
  if (op == "unsqueeze") {
    const auto d = in.dim("dim", rank + 1);
    if (!d) return std::nullopt;
    t = t.unsqueeze(*d);
    return base;
  }
  if (op == "expand" || op == "repeat") {
    const auto& sizes = original_.tensors.at(name).sizes;
    while (t.dim() < static_cast<std::int64_t>(sizes.size())) t = t.unsqueeze(0);
    for (std::size_t d = 1; d < sizes.size(); ++d) {
      if (!sizes[d].is_integer(t.size(static_cast<std::int64_t>(d)))) return std::nullopt;
    }
    if (t.dim() == 0 || t.size(0) != 1) return std::nullopt;
    return base;
  }
  return std::nullopt;
}

// y = W x, contracted along one axis of the input.
std::optional<Rewriter::Product> Rewriter::product_of(const Node& node) const {
  const std::map<std::string, Batch> none;
  const RuleInput in(original_, node, builder_.candidate_symbol(), none);
  const std::string op = aten_name(node.target);
  if (in.results().size() != 1) return std::nullopt;
  std::optional<Product> product;
  if (op == "linear") {
    const std::string* input = in.tensor("input");
    const std::string* weight = in.tensor("weight");
    if (input == nullptr || weight == nullptr) return std::nullopt;
    product = product_with(*input, in.rank(*input) - 1, *weight, 1);
    if (product && in.tensor("bias") != nullptr) product->bias = *in.tensor("bias");
  } else if (op == "matmul" || op == "mm" || op == "bmm") {
    const auto operands = in.operands();
    if (operands.size() != 2) return std::nullopt;
    product = product_with(operands[0], in.rank(operands[0]) - 1, operands[1], 0);
    if (!product && in.rank(operands[1]) > 2) {
      product = product_with(operands[1], in.rank(operands[1]) - 2, operands[0], 1);
    }
  } else if (op == "addmm") {
    const auto operands = in.operands();
    const auto factor = [&](const char* n) { return node.find(n) == nullptr || in.number(n) == 1.0; };
    if (operands.size() != 3 || !factor("alpha") || !factor("beta") || in.rank(operands[0]) != 1) return std::nullopt;
    product = product_with(operands[1], 1, operands[2], 0);
    if (product) product->bias = operands[0];
  } else if (op == "conv1d") {
    product = product_of_convolution(in);
  } else if (op == "einsum") {
    product = product_of_einsum(in);
  }
  if (!product) return std::nullopt;
  static const std::set<graph::DType> kTypes{graph::DType::kFloat64, graph::DType::kFloat32, graph::DType::kBFloat16,
                                             graph::DType::kFloat16};
  const graph::DType dtype = original_.tensors.at(in.results()[0]).dtype;
  const bool same_type = original_.tensors.at(product->input).dtype == dtype &&
                         graph::dtype_of(product->weight.contents.scalar_type()) == dtype;
  if (!same_type || !kTypes.contains(dtype)) return std::nullopt;
  if (!product->bias.empty() && values_.at(product->bias).level != Level::kShared) return std::nullopt;
  return product;
}

// `contracted` is the axis of the weight that is summed over, among its last two.
std::optional<Rewriter::Product> Rewriter::product_with(const std::string& input, int axis, const std::string& weight,
                                                        int contracted) const {
  const auto it = values_.find(input);
  if (it == values_.end() || !it->second.parts || axis < 1) return std::nullopt;
  auto shared = shared_weight(weight);
  if (!shared) return std::nullopt;
  at::Tensor& t = shared->contents;
  while (t.dim() > 2 && t.size(0) == 1) t = t.squeeze(0);
  if (t.dim() != 2) return std::nullopt;
  if (contracted == 0) {
    t = t.transpose(0, 1);
    shared->key += " transposed";
  }
  return Product{input, axis, std::move(*shared), {}, false};
}

// A convolution of width 1 over (B, K, N).
std::optional<Rewriter::Product> Rewriter::product_of_convolution(const RuleInput& in) const {
  const std::string* input = in.tensor("input");
  const std::string* weight = in.tensor("weight");
  if (input == nullptr || weight == nullptr || in.rank(*input) != 3) return std::nullopt;
  if (!in.meta(*weight).sizes[2].is_integer(1)) return std::nullopt;
  const auto is = [&](const char* name, std::int64_t value) {
    if (in.node().find(name) == nullptr) return true;
    const auto values = in.integers(name);
    return values && values->size() == 1 && values->front() == value;
  };
  if (!is("stride", 1) || !is("padding", 0) || !is("groups", 1)) return std::nullopt;
  auto shared = shared_weight(*weight);
  const auto it = values_.find(*input);
  if (!shared || it == values_.end() || !it->second.parts) return std::nullopt;
  shared->contents = shared->contents.squeeze(2);
  Product product{*input, 1, std::move(*shared), {}, false};
  if (in.tensor("bias") != nullptr) product.bias = *in.tensor("bias");
  return product;
}

std::optional<Rewriter::Product> Rewriter::product_of_einsum(const RuleInput& in) const {
  const auto equation = parse_einsum(in);
  const auto operands = in.tensors("tensors");
  if (!equation || operands.size() != 2) return std::nullopt;
  for (const std::size_t at : {0, 1}) {
    const std::string& labels = equation->terms[at];
    const std::string& of_weight = equation->terms[1 - at];
    if (of_weight.size() != 2 || labels.size() < 2) continue;
    for (const std::size_t contracted : {0, 1}) {
      const char k = of_weight[contracted];
      const char m = of_weight[1 - contracted];
      const std::size_t axis = labels.find(k);
      const bool plain = std::count(labels.begin(), labels.end(), k) == 1 && labels.find(m) == std::string::npos;
      if (axis == std::string::npos || axis == 0 || k == m || !plain) continue;
      std::string in_place = labels;
      in_place[axis] = m;
      std::string moved = labels;
      moved.erase(axis, 1);
      moved.push_back(m);
      if (equation->result != in_place && equation->result != moved) continue;
      auto product = product_with(operands[at], static_cast<int>(axis), operands[1 - at], static_cast<int>(contracted));
      if (product) product->moved = equation->result != in_place;
      return product;
    }
  }
  return std::nullopt;
}

bool Rewriter::lower_product(const Node& node) {
  const auto product = product_of(node);
  if (!product) return false;
  const auto rank = static_cast<int>(original_.tensors.at(product->input).sizes.size());
  const bool rows = product->axis == rank - 1;
  if ((!rows || is_transposed_stack(product->input)) && lower_compression(node, *product)) return true;
  return rows && lower_linear(node, *product);
}

}  // namespace ikbo::transform
