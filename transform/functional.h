#pragma once

#include "graph/archive.h"

namespace ikbo::transform {

/// Whether the program holds operators that work in place, or regions of another gradient mode: a raw export.
bool needs_functional(const graph::Program& program);

/// The same program without them. Views are tracked: what was written through one view is seen through all. Regions of
/// another gradient mode are inlined, since gradients mean nothing here. Throws ikbo::Error, with the operator and the
/// remedy, where a write reaches an input or a parameter, or where it is not known what shares memory with what.
graph::Program functional(const graph::Program& program);

/// Operators that take nothing but an operand's type from it (new_zeros) become ones that do not read it.
void forget_templates(graph::Graph& graph);

}  // namespace ikbo::transform
