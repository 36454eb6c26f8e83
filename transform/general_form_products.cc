// Models that broadcast inside, in the general form: products in which a request-only value of one row takes part.
#include <algorithm>

#include "graph/error.h"
#include "transform/general_form.h"

namespace ikbo::transform {

using graph::Expr;
using graph::Node;
using graph::TensorArg;

// Products in which a request-only value is the matrix: candidates times the request's vector, keys or weights.
bool GeneralForm::product(const Node& node, std::string& why) {
  const std::string op = aten_name(node.target);
  const bool linear = op == "linear";
  const bool adds = op == "addmm";
  if (!linear && !adds && !one_of(op, {"mm", "mv", "matmul"})) return false;
  const auto results = graph::output_names(node);
  const auto operands = tensors_of(node);
  const std::map<std::string, Batch> none;
  const RuleInput in(before_, node, given_.batch, none);
  const auto factor = [&](const char* n) { return node.find(n) == nullptr || in.number(n) == 1.0; };
  if (results.size() != 1 || old_sizes(results[0]).empty() || !factor("alpha") || !factor("beta")) return false;
  if (operands.size() < 2U + (adds ? 1U : 0U)) return false;
  const std::string& left = operands[adds ? 1 : 0];
  const std::string& right = operands[adds ? 2 : 1];
  const std::string bias = adds ? operands[0] : linear && operands.size() == 3 ? operands[2] : "";
  if (!bias.empty() && (has_rows(bias) || old_sizes(bias).size() != 1)) return false;
  // Rows are never summed over, and stand on one side alone.
  const auto of_candidates = [&](const std::string& name) { return has_rows(name) && !is_single(name); };
  const auto summed = [&](const std::string& name, bool last) {
    const int rank = static_cast<int>(old_sizes(name).size());
    return of_candidates(name) && batches_.at(made(name)).axis == (last || rank == 1 ? rank - 1 : rank - 2);
  };
  const auto shown = shown_batch(results[0]);
  const bool mixed = of_candidates(left) || of_candidates(right);
  if (summed(left, true) || summed(right, linear) || (of_candidates(left) && of_candidates(right)) ||
      mixed != shown.has_value()) {
    why = "it sums over candidates, or pairs them";
    return false;
  }
  const int axis = shown ? shown->axis : 0;

  // Each as [B, matrix]: a vector on the left is a row, on the right a column; shared ones have no rows in front.
  const auto matrix = [&](const std::string& name, bool is_left) {
    std::string value = has_rows(name) ? stack(name) : made(name);
    std::vector<Expr> own = sizes(value);
    const std::size_t extra = has_rows(name) ? 1 : 0;
    if (own.size() != 1 + extra) return value;
    own.insert(is_left ? own.end() - 1 : own.end(), 1);
    return has_rows(name) ? reshape(value, own, {0, 1}) : std::string();
  };
  const std::string a = matrix(left, true);
  std::string b = matrix(right, false);
  if (a.empty() || b.empty() || !has_rows(right)) return false;  // a shared matrix on the right has a rule
  if (sizes(b).size() != 3 || (has_rows(left) && sizes(a).size() != 3) || (!has_rows(left) && sizes(a).size() != 2)) {
    why = "it multiplies with a request-only value of more than two dimensions";
    return false;
  }
  if (linear) b = permute(b, {0, 2, 1}, {0, 1});
  const std::vector<Expr> sizes_of_product{rows(), sizes(a)[sizes(a).size() - 2], sizes(b)[2]};
  std::string value = emit("torch.ops.aten.matmul.default", {{"self", TensorArg{a}, 1}, {"other", TensorArg{b}, 1}},
                           sizes_of_product, b, {0, 1});
  if (!bias.empty()) {
    value = emit("torch.ops.aten.add.Tensor", {{"self", TensorArg{value}, 1}, {"other", TensorArg{made(bias)}, 1}},
                 sizes_of_product, value, {0, 1});
  }
  std::vector<Expr> whole = old_sizes(results[0]);
  const auto at = static_cast<std::size_t>(axis);
  const Expr inner = shown ? shown->inner : whole[at];
  whole[at] = inner;
  whole.insert(whole.begin(), rows());
  if (!(product_of(whole, whole.size()) == product_of(sizes_of_product, 3))) return false;
  bind(results[0], unstack(reshape(value, whole, {0, 1}), axis), {axis, inner});
  return true;
}

// Sums of products by letters, in which every request-only operand gets its rows in front: with the letter of the
// candidates' rows where it meets them, else with one of its own. A batch of two matrices is one of these.
bool GeneralForm::einsum(const Node& node, std::string& why) {
  const std::map<std::string, Batch> none;
  const RuleInput in(before_, node, given_.batch, none);
  const auto equation = aten_name(node.target) == "bmm"      ? std::optional(Einsum{{"xij", "xjk"}, "xik"})
                        : aten_name(node.target) == "einsum" ? parse_einsum(in)
                                                             : std::nullopt;
  const auto operands = tensors_of(node);
  const std::string name = graph::output_names(node)[0];
  if (!equation || operands.size() != equation->terms.size()) return false;
  std::string letters = equation->result;
  for (const std::string& term : equation->terms) letters += term;
  const auto fresh_letter = [&] {
    char letter = 'a';
    while (letters.find(letter) != std::string::npos) letter = letter == 'z' ? 'A' : static_cast<char>(letter + 1);
    letters.push_back(letter);
    return letter;
  };
  std::optional<char> rows_of_candidates;
  bool any_single = false;
  for (std::size_t i = 0; i < operands.size(); ++i) {
    const std::string& term = equation->terms[i];
    if (term.size() != old_sizes(operands[i]).size()) return false;
    if (!has_rows(operands[i])) continue;
    any_single = any_single || is_single(operands[i]);
    if (is_single(operands[i])) continue;
    const Batch own = batches_.at(made(operands[i]));
    const char letter = term[static_cast<std::size_t>(own.axis)];
    if (rows_of_candidates.value_or(letter) != letter || !own.inner.is_integer(1) ||
        std::count(term.begin(), term.end(), letter) != 1 || equation->result.find(letter) == std::string::npos) {
      why = "it sums over candidates, or pairs them";
      return false;
    }
    rows_of_candidates = letter;
  }
  if (!any_single) return false;
  const char front = rows_of_candidates ? *rows_of_candidates : fresh_letter();
  const char one = fresh_letter();  // in place of the candidates' letter, where an operand has one entry for it
  std::string text;
  graph::TensorListArg list;
  for (std::size_t i = 0; i < operands.size(); ++i) {
    std::string term = equation->terms[i];
    const bool single = has_rows(operands[i]) && is_single(operands[i]);
    for (std::size_t d = 0; d < term.size(); ++d) {
      if (term[d] != front || (has_rows(operands[i]) && !single)) continue;
      if (!single || !old_sizes(operands[i])[d].is_integer(1)) return false;
      term[d] = one;
    }
    text += fmt::format("{}{}{}", i > 0 ? "," : "", single ? std::string(1, front) : "", term);
    list.names.push_back(single ? stack(operands[i]) : made(operands[i]));
  }
  const auto shown = shown_batch(name);
  std::vector<Expr> wanted = old_sizes(name);
  std::string result = equation->result;
  if (!rows_of_candidates) {
    result.insert(result.begin(), front);
    wanted.insert(wanted.begin(), rows());
  } else if (!(shown == Batch{static_cast<int>(result.find(front)), 1})) {
    return false;
  }
  const std::string like = list.names[0];
  const std::string value =
      emit("torch.ops.aten.einsum.default", {{"equation", text + "->" + result, 1}, {"tensors", std::move(list), 1}},
           wanted, like, {static_cast<int>(result.find(front)), 1});
  if (rows_of_candidates) {
    bind(name, value, *shown);
  } else {
    bind_stacked(name, value);
  }
  return true;
}

}  // namespace ikbo::transform
