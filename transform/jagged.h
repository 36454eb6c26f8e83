#pragma once

#include <set>
#include <string>
#include <vector>

#include "graph/program.h"
#include "graph/specification.h"

namespace ikbo::transform {

/// Bags given as values and offsets. Values have no rows: their number, a symbol of its own, is that of all bags
/// together.
struct JaggedBags {
  graph::JaggedInput input;      // by the values of the graph
  std::set<std::string> totals;  // symbols of the number of values: one for each that the export names apart
  std::string batch;             // symbol of the number of bags
};

/// Bags that no operator reads, of which the graph shows the sizes alone.
struct UnreadBags {
  std::vector<JaggedBags> offsets;  // with the last one included, and without values
  std::set<std::string> values;     // vectors of an own length; nothing says whose
};

/// Every embedding_bag, whatever its form after export.
bool is_bag(const graph::Node& node);
/// The same whole numbers in the same order, of another type or copied. The type is one that holds ids.
bool keeps_integers(const graph::Graph& graph, const graph::Node& node);
/// The same, and of offsets also all but the end.
bool keeps_offsets(const graph::Graph& graph, const graph::Node& node);

/// The inputs that embedding_bag takes as values and offsets. Throws ikbo::Error, with the operator and the remedy, for
/// values of no fixed number whose offsets are no input, or no input of their own.
std::vector<JaggedBags> find_jagged(const graph::Program& program, const std::vector<graph::UserInput>& inputs);
/// Integers with an entry more than another input has rows are offsets; where there are some, vectors of a length that
/// nothing else has are values.
UnreadBags find_unread_bags(const graph::Program& program, const std::vector<graph::UserInput>& inputs);

}  // namespace ikbo::transform
