#pragma once

#include <functional>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "graph/program.h"

namespace ikbo::transform {

/// Where a tensor carries the batch: dimension `axis` has B * inner entries and entry b * inner + j belongs to row b.
/// inner is 1 for a plain batch axis, L after [B, L, ...] was flattened to [B * L, ...].
struct Batch {
  int axis = 0;
  graph::Expr inner = 1;
  bool operator==(const Batch& other) const { return axis == other.axis && inner == other.inner; }
};

/// One operator as a rule sees it: the node, and which of its operands carry the batch.
class RuleInput {
 public:
  RuleInput(const graph::Graph& graph, const graph::Node& node, std::string batch_symbol,
            const std::map<std::string, Batch>& batched)
      : graph_(graph), node_(node), batch_symbol_(std::move(batch_symbol)), batched_(batched) {}

  const graph::Node& node() const { return node_; }
  const std::string& batch_symbol() const { return batch_symbol_; }
  const graph::TensorMeta& meta(const std::string& value) const { return graph_.tensors.at(value); }
  int rank(const std::string& value) const { return static_cast<int>(meta(value).sizes.size()); }

  /// The tensor bound to an argument; nullptr for none, a list or another kind.
  const std::string* tensor(std::string_view argument) const;
  /// The tensors of a list argument, or the single tensor of a tensor argument.
  std::vector<std::string> tensors(std::string_view argument) const;
  /// All tensor operands in order.
  std::vector<std::string> operands() const;
  /// Names of all tensor results.
  std::vector<std::string> results() const;
  /// Where a value carries the batch; nullptr for values that do not.
  const Batch* batch(const std::string& value) const;
  const Batch* batch_of(std::string_view argument) const;
  /// No tensor of the argument carries the batch (true where the argument is absent).
  bool shared(std::string_view argument) const;

  std::optional<std::int64_t> integer(std::string_view argument) const;
  std::optional<std::vector<std::int64_t>> integers(std::string_view argument) const;  // a single integer counts as one
  std::optional<bool> boolean(std::string_view argument) const;
  std::optional<double> number(std::string_view argument) const;
  /// A dimension argument, counted from the front; nothing where absent or out of range.
  std::optional<int> dim(std::string_view argument, int rank) const;

 private:
  const graph::Argument* find(std::string_view argument) const { return node_.find(std::string(argument)); }

  const graph::Graph& graph_;
  const graph::Node& node_;
  std::string batch_symbol_;
  const std::map<std::string, Batch>& batched_;
};

/// What a rule says: for each tensor result the batch it carries (nothing for one without), in the order of results().
/// No value: the rows of the results are not known to depend on the same rows of the operands alone.
using RuleResult = std::optional<std::vector<std::optional<Batch>>>;

struct Rule {
  std::function<RuleResult(const RuleInput&)> rows;
  /// Size arguments may contain the batch (view, expand, zeros, ...): they follow it to the user batch. For all other
  /// operators an integer argument that depends on the batch is a number, and the rule does not hold.
  bool sizes_follow = false;
};

/// "add" for "torch.ops.aten.add.Tensor"; empty for what is no ATen operator.
std::string aten_name(std::string_view target);
/// "Tensor" for "torch.ops.aten.add.Tensor".
std::string aten_overload(std::string_view target);

bool one_of(std::string_view op, std::initializer_list<std::string_view> names);

/// What a node is given for an argument; nothing where it is absent, another kind, or known at run time alone.
const std::string* tensor_argument(const graph::Node& node, std::string_view argument);
std::optional<std::int64_t> integer_argument(const graph::Node& node, std::string_view argument);
std::optional<bool> boolean_argument(const graph::Node& node, std::string_view argument);
/// Whether a symbolic float or Boolean, kept as the archive has it, is written with the symbol.
bool is_written_with(const graph::Json& scalar, const std::string& symbol);

/// Operators (by name without overload) of one tensor that give its entries in their order. With its sizes too:
bool keeps_values(std::string_view op);
/// Perhaps with others. `view` to another type is among them: no such view keeps the entries.
bool keeps_order(std::string_view op);

/// The rule of an operator's family; nullptr where there is none.
const Rule* find_rule(std::string_view target);

/// Where the operator's results carry the batch if it is applied to each row alone, checked against the archive's own
/// symbolic sizes; nothing where no rule says so. `why` then gets the reason.
RuleResult apply_rule(const RuleInput& input, std::string& why);

/// Pointwise operators without a memory of position: f(cat(a, b)) == cat(f(a), f(b)).
bool is_pointwise(std::string_view target);
/// Draws random numbers as called.
bool is_random(const graph::Node& node);
/// Writes into an operand ("relu_", "index_put_").
bool is_in_place(std::string_view target);

/// "bi,oi->bo" apart, with letters in place of dots; nothing where the equation has no arrow.
struct Einsum {
  std::vector<std::string> terms;
  std::string result;
};
std::optional<Einsum> parse_einsum(const RuleInput& input);

// The families, one file each; registered by name without overload.
using RuleTable = std::map<std::string, Rule, std::less<>>;
void add_pointwise_rules(RuleTable& table);
void add_shape_rules(RuleTable& table);
void add_reduction_rules(RuleTable& table);
void add_matmul_rules(RuleTable& table);
void add_lookup_rules(RuleTable& table);

/// The common case: results keep the axis and inner factor of the operands, aligned from the right as broadcasting
/// does.
RuleResult broadcasting_rows(const RuleInput& input, const std::vector<std::string>& operands);

}  // namespace ikbo::transform
