// ikbo::aligned_cat: a concatenation whose rows begin at multiples of 16 bytes, as a GPU's copy engine needs them.
#include "ops/aligned_cat.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <vector>

#include "ops/checks.h"

namespace ikbo {
namespace {

constexpr const char* kAlignedCat = "ikbo::aligned_cat";
constexpr int64_t kAlignment = 16;  // bytes

struct Layout {
  int64_t dim = 0;                     // from 0
  std::vector<c10::SymInt> sizes;      // of the result
  std::vector<c10::SymInt> in_memory;  // the same with rows of a multiple of 16 bytes
};

Layout layout_of(at::TensorList tensors, int64_t dim) {
  TORCH_CHECK_VALUE(!tensors.empty(), kAlignedCat, ": tensors is empty, expected at least one tensor");
  const at::Tensor& first = tensors[0];
  const std::string first_name = element_name("tensors", 0);
  check_dense(kAlignedCat, first, first_name, first, first_name);
  const int64_t rank = first.dim();
  TORCH_CHECK_VALUE(rank >= 2, kAlignedCat, ": ", first_name, " has shape ", first.sym_sizes(),
                    ", expected two dimensions or more");
  TORCH_CHECK_VALUE(dim >= -rank && dim < rank, kAlignedCat, ": dim is ", dim, ", expected ", -rank, " to ", rank - 1);
  Layout layout{.dim = dim < 0 ? dim + rank : dim, .sizes = first.sym_sizes().vec(), .in_memory = {}};
  TORCH_CHECK_VALUE(layout.dim != rank - 1, kAlignedCat, ": dim is ", dim,
                    ", the last one, along which rows lie, expected another");
  const auto along = static_cast<size_t>(layout.dim);
  for (size_t i = 1; i < tensors.size(); ++i) {
    const std::string name = element_name("tensors", i);
    check_dense(kAlignedCat, tensors[i], name, first, first_name);
    check_same_dtype(kAlignedCat, tensors[i], name, first, first_name);
    TORCH_CHECK_VALUE(tensors[i].dim() == rank, kAlignedCat, ": ", name, " has shape ", tensors[i].sym_sizes(),
                      ", expected ", rank, " dimensions, as ", first_name, " has");
    for (int64_t d = 0; d < rank; ++d) {
      if (d == layout.dim) continue;
      IKBO_CHECK_SIZE(tensors[i].sym_size(d).sym_eq(first.sym_size(d)), kAlignedCat, ": ", name, " has size ",
                      tensors[i].sym_size(d), " in dimension ", d, ", expected ", first.sym_size(d), ", that of ",
                      first_name);
    }
    layout.sizes[along] = layout.sizes[along] + tensors[i].sym_size(layout.dim);
  }
  const int64_t multiple = std::max<int64_t>(kAlignment / static_cast<int64_t>(first.element_size()), 1);
  layout.in_memory = layout.sizes;
  layout.in_memory.back() = (layout.sizes.back() + (multiple - 1)) / multiple * multiple;
  return layout;
}

}  // namespace

AlignedCat empty_aligned_cat(at::TensorList tensors, int64_t dim) {
  const Layout layout = layout_of(tensors, dim);
  const auto options = tensors[0].options().memory_format(at::MemoryFormat::Contiguous);
  return {at::empty_symint(layout.in_memory, options).narrow_symint(-1, 0, layout.sizes.back()), layout.dim};
}

namespace {

// On the CPU, and wherever there is no kernel of its own; without tensors there is no device, and the message comes
// from here too.
at::Tensor aligned_cat(at::TensorList tensors, int64_t dim) {
  const auto [out, along] = empty_aligned_cat(tensors, dim);
  // What has a single row counts as contiguous, whatever its strides, which cat then takes for dense ones.
  at::Tensor to = out.is_contiguous() ? out.as_strided(out.sizes(), c10::contiguous_strides(out.sizes())) : out;
  at::cat_out(to, tensors, along);
  return out;
}

at::Tensor aligned_cat_meta(at::TensorList tensors, int64_t dim) {
  const Layout layout = layout_of(tensors, dim);
  const at::Tensor in_memory = at::empty_symint(layout.in_memory, tensors[0].options());
  return at::empty_strided_symint(layout.sizes, in_memory.sym_strides(), tensors[0].options());
}

}  // namespace

TORCH_LIBRARY_IMPL(ikbo, CompositeExplicitAutograd, m) {
  m.impl("aligned_cat", aligned_cat);
}
TORCH_LIBRARY_IMPL(ikbo, Meta, m) {
  m.impl("aligned_cat", aligned_cat_meta);
}

}  // namespace ikbo
