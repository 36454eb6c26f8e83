#pragma once

#include "graph/archive.h"

namespace ikbo::transform {

/// embedding_bag over a matrix of ids (batch, length), which PyTorch flattens and gives offsets 0, length, 2 length,
/// ...: it becomes a lookup and a sum, mean or maximum over the length, whose rows are independent. Entries of
/// `padding_idx` are left out, as in the original. Throws ikbo::Error, with the operator and the remedy, for bags of
/// many lengths whose values are an input: the batch lies in their offsets alone.
graph::Archive even_bags(graph::Archive archive);

}  // namespace ikbo::transform
