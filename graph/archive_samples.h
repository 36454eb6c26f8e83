#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "graph/archive_zip.h"
#include "graph/program.h"

namespace ikbo::graph {

/// The tensors of `data/sample_inputs/model.pt` in the order of the program's inputs. Empty where there are none, or
/// where they are not made of tuples, lists, dicts, numbers, strings and tensors alone, or do not fit the program.
std::vector<at::Tensor> read_samples(Bytes file, const Program& program);

/// What torch.load reads back as (args, kwargs). Empty where `tensors` is, or where the call needs a container that
/// cannot be made without its Python class.
std::vector<char> write_samples(const std::vector<at::Tensor>& tensors, const Program& program);

}  // namespace ikbo::graph
