#pragma once

#include <string>
#include <vector>

#include "graph/program.h"
#include "graph/specification.h"

namespace ikbo::transform {

/// Bags given as values and offsets. Values have no rows: their number, a symbol of its own, is that of all bags
/// together.
struct JaggedBags {
  graph::JaggedInput input;  // by the values of the graph
  std::string total;         // symbol of the number of values
  std::string batch;         // symbol of the number of bags
};

/// Every embedding_bag, whatever its form after export.
bool is_bag(const graph::Node& node);
bool includes_last_offset(const graph::Node& bag);
/// What an argument shows; nullptr for none, a list or another kind.
const std::string* tensor_argument(const graph::Node& node, const char* argument);
/// The same numbers in the same order, of another type or copied; of offsets also all but the end.
bool keeps_offsets(const graph::Graph& graph, const graph::Node& node);

/// The inputs that embedding_bag takes as values and offsets. Throws ikbo::Error, with the operator and the remedy, for
/// values of no fixed number whose offsets are no input, or no input of their own.
std::vector<JaggedBags> find_jagged(const graph::Program& program, const std::vector<graph::UserInput>& inputs);

}  // namespace ikbo::transform
