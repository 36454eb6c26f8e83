// Operators that contract: linear layers, matrix products, convolutions, attention, recurrences.
#include <algorithm>

#include "transform/rules.h"

namespace ikbo::transform {
namespace {

RuleResult one(const Batch& batch) {
  return std::vector<std::optional<Batch>>{batch};
}

RuleResult linear(const RuleInput& in) {
  const Batch* b = in.batch_of("input");
  if (b == nullptr || !in.shared("weight") || !in.shared("bias")) return std::nullopt;
  if (b->axis >= in.rank(*in.tensor("input")) - 1) return std::nullopt;
  return one(*b);
}

// Where a product of `left` and `right` carries the batch; nothing where it is contracted or stands on two axes.
std::optional<Batch> product_batch(const RuleInput& in, const std::string& left, const std::string& right, int rank) {
  const int rl = in.rank(left);
  const int rr = in.rank(right);
  std::optional<Batch> out;
  if (const Batch* b = in.batch(left)) {
    if (b->axis == rl - 1) return std::nullopt;  // contracted
    // (..., n, k) @ (..., k, p): rows and leading axes count from the right; a vector on the right drops the last axis
    out = Batch{rank - (rl - b->axis) + (rr == 1 ? 1 : 0), b->inner};
  }
  if (const Batch* b = in.batch(right)) {
    if (rr == 1 || b->axis == rr - 2) return std::nullopt;
    const int dropped = rl == 1 && b->axis < rr - 2 ? 1 : 0;  // a vector on the left drops the rows' axis
    const Batch mine{rank - (rr - b->axis) + dropped, b->inner};
    if (out && !(*out == mine)) return std::nullopt;
    out = mine;
  }
  if (!out || out->axis < 0) return std::nullopt;
  return out;
}

// A shared operand must not span the batch's axis among the leading ones with more than one entry.
bool spans_only_one(const RuleInput& in, const std::string& operand, int axis, int rank) {
  if (in.batch(operand) != nullptr) return true;
  const int own = axis - (rank - in.rank(operand));
  const bool leading = own < in.rank(operand) - 2;
  return own < 0 || !leading || in.meta(operand).sizes[static_cast<std::size_t>(own)].is_integer(1);
}

RuleResult matmul(const RuleInput& in) {
  const auto operands = in.operands();
  if (operands.size() != 2) return std::nullopt;
  const int rank = in.rank(in.results()[0]);
  const auto out = product_batch(in, operands[0], operands[1], rank);
  if (!out) return std::nullopt;
  const int full = std::max({in.rank(operands[0]), in.rank(operands[1]), 2});
  if (full == rank) {
    for (const std::string& name : operands) {
      if (!spans_only_one(in, name, out->axis, rank)) return std::nullopt;
    }
  }
  return one(*out);
}

// addmm, baddbmm: a bias that broadcasts, and a product.
RuleResult add_product(const RuleInput& in) {
  const auto operands = in.operands();
  if (operands.size() != 3) return std::nullopt;
  const int rank = in.rank(in.results()[0]);
  const auto out = product_batch(in, operands[1], operands[2], rank);
  if (!out) return std::nullopt;
  if (const Batch* b = in.batch(operands[0])) {
    if (!(Batch{b->axis + rank - in.rank(operands[0]), b->inner} == *out)) return std::nullopt;
  } else {
    const int own = out->axis - (rank - in.rank(operands[0]));
    if (own >= 0 && !in.meta(operands[0]).sizes[static_cast<std::size_t>(own)].is_integer(1)) return std::nullopt;
  }
  return one(*out);
}

RuleResult einsum(const RuleInput& in) {
  const auto equation = parse_einsum(in);
  const auto operands = in.tensors("tensors");
  if (!equation || operands.empty() || equation->terms.size() != operands.size()) return std::nullopt;
  const auto& [terms, result] = *equation;
  std::optional<char> label;
  graph::Expr inner = 1;
  for (std::size_t i = 0; i < terms.size(); ++i) {
    const Batch* b = in.batch(operands[i]);
    if (b == nullptr) continue;
    if (static_cast<int>(terms[i].size()) != in.rank(operands[i])) return std::nullopt;
    const char mine = terms[i][static_cast<std::size_t>(b->axis)];
    if (label && (*label != mine || !(inner == b->inner))) return std::nullopt;
    label = mine;
    inner = b->inner;
  }
  if (!label) return std::nullopt;
  for (std::size_t i = 0; i < terms.size(); ++i) {
    const auto count = std::count(terms[i].begin(), terms[i].end(), *label);
    if (count != (in.batch(operands[i]) != nullptr ? 1 : 0)) return std::nullopt;
  }
  const std::size_t axis = result.find(*label);
  if (axis == std::string::npos) return std::nullopt;
  return one({static_cast<int>(axis), inner});
}

RuleResult convolution(const RuleInput& in) {
  const Batch* b = in.batch_of("input");
  if (b == nullptr || b->axis != 0 || !in.shared("weight") || !in.shared("bias")) return std::nullopt;
  if (in.rank(*in.tensor("input")) != in.rank(*in.tensor("weight"))) return std::nullopt;  // an input without batch
  return one(*b);
}

// Pooling over the last `spatial` dimensions of (N, C, ...).
RuleResult pool(const RuleInput& in) {
  const Batch* b = in.batch_of("self");
  const std::string name = aten_name(in.node().target);
  const int spatial = name.ends_with("1d") ? 1 : name.ends_with("2d") || name.find("2d_") != std::string::npos ? 2 : 0;
  if (b == nullptr || spatial == 0 || in.operands().size() != 1) return std::nullopt;
  if (b->axis != 0 || in.rank(*in.tensor("self")) != spatial + 2) return std::nullopt;
  return std::vector<std::optional<Batch>>(in.results().size(), *b);
}

RuleResult attention(const RuleInput& in) {
  const std::string* query = in.tensor("query");
  const std::string* key = in.tensor("key");
  const std::string* value = in.tensor("value");
  if (query == nullptr || key == nullptr || value == nullptr) return std::nullopt;
  const Batch* b = in.batch(*query);
  const int rank = in.rank(*query);
  if (b == nullptr || b->axis >= rank - 2) return std::nullopt;
  for (const std::string* other : {key, value}) {
    const Batch* o = in.batch(*other);
    if (o == nullptr || !(*o == *b) || in.rank(*other) != rank) return std::nullopt;
  }
  if (const std::string* mask = in.tensor("attn_mask")) {
    const int own = b->axis - (rank - in.rank(*mask));
    if (const Batch* m = in.batch(*mask)) {
      if (!(Batch{m->axis + rank - in.rank(*mask), m->inner} == *b)) return std::nullopt;
    } else if (own >= 0 && !in.meta(*mask).sizes[static_cast<std::size_t>(own)].is_integer(1)) {
      return std::nullopt;
    }
  }
  return one(*b);
}

// gru.input, lstm.input, rnn_tanh.input, rnn_relu.input: (layers, batch, hidden) states, shared parameters.
RuleResult recurrence(const RuleInput& in) {
  const std::string* input = in.tensor("input");
  const Batch* b = input != nullptr ? in.batch(*input) : nullptr;
  if (b == nullptr || in.rank(*input) != 3 || in.node().find("batch_sizes") != nullptr) return std::nullopt;
  const auto batch_first = in.boolean("batch_first");
  const auto dropout = in.number("dropout");
  if (!batch_first || b->axis != (*batch_first ? 0 : 1) || !in.shared("params")) return std::nullopt;
  if (in.boolean("train") != false && dropout != 0.0) return std::nullopt;
  for (const std::string& state : in.tensors("hx")) {
    const Batch* s = in.batch(state);
    if (s == nullptr || s->axis != 1 || !(s->inner == b->inner)) return std::nullopt;
  }
  std::vector<std::optional<Batch>> results(in.results().size(), Batch{1, b->inner});
  results[0] = *b;
  return results;
}

// Letters in place of dots: they stand for the dimensions that a term has no letter for, aligned from the right.
bool spell_dots(const RuleInput& in, Einsum& equation, const std::string& used) {
  constexpr std::string_view kDots = "...";
  const auto operands = in.tensors("tensors");
  if (operands.size() != equation.terms.size()) return false;
  std::vector<std::size_t> counts;  // of dimensions that each term's dots stand for
  for (std::size_t i = 0; i < operands.size(); ++i) {
    const std::string& term = equation.terms[i];
    const auto rank = static_cast<std::size_t>(in.rank(operands[i]));
    const std::size_t letters = term.size() - (term.find(kDots) == std::string::npos ? 0 : kDots.size());
    if (letters > rank) return false;
    counts.push_back(rank - letters);
  }
  const std::size_t most = *std::max_element(counts.begin(), counts.end());
  std::string spelled;
  for (const char c : std::string_view("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")) {
    if (spelled.size() < most && used.find(c) == std::string::npos) spelled.push_back(c);
  }
  if (spelled.size() < most) return false;
  const auto spell = [&](std::string& term, std::size_t count) {
    const std::size_t at = term.find(kDots);
    if (at != std::string::npos) term.replace(at, kDots.size(), spelled.substr(most - count));
    return term.find('.') == std::string::npos;
  };
  for (std::size_t i = 0; i < operands.size(); ++i) {
    if (!spell(equation.terms[i], counts[i])) return false;
  }
  return spell(equation.result, most);
}

}  // namespace

std::optional<Einsum> parse_einsum(const RuleInput& in) {
  const auto* argument = in.node().find("equation");
  const auto* text = argument != nullptr ? std::get_if<std::string>(argument) : nullptr;
  if (text == nullptr) return std::nullopt;
  std::string equation;
  std::copy_if(text->begin(), text->end(), std::back_inserter(equation), [](char c) { return c != ' '; });
  const std::size_t arrow = equation.find("->");
  if (arrow == std::string::npos) return std::nullopt;
  Einsum parsed{{std::string()}, equation.substr(arrow + 2)};
  for (const char c : equation.substr(0, arrow)) {
    if (c == ',') {
      parsed.terms.emplace_back();
    } else {
      parsed.terms.back().push_back(c);
    }
  }
  if (equation.find('.') != std::string::npos && !spell_dots(in, parsed, equation)) return std::nullopt;
  return parsed;
}

void add_matmul_rules(RuleTable& table) {
  table["linear"] = {linear};
  for (const char* name : {"matmul", "mm", "bmm", "mv"}) table[name] = {matmul};
  for (const char* name : {"addmm", "baddbmm"}) table[name] = {add_product};
  table["einsum"] = {einsum};
  for (const char* name : {"conv1d", "conv2d", "conv3d", "convolution"}) table[name] = {convolution};
  for (const char* name :
       {"max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
        "_adaptive_avg_pool2d", "adaptive_max_pool1d", "adaptive_max_pool2d", "max_pool2d_with_indices"}) {
    table[name] = {pool};
  }
  table["scaled_dot_product_attention"] = {attention};
  for (const char* name : {"gru", "lstm", "rnn_tanh", "rnn_relu"}) table[name] = {recurrence};
}

}  // namespace ikbo::transform
