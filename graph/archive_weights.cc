#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstring>
#include <utility>

#include "graph/archive.h"
#include "graph/error.h"

namespace ikbo::graph {
namespace {

constexpr std::array<std::pair<DType, at::ScalarType>, 16> kTypes{{
    {DType::kUInt8, at::kByte},
    {DType::kInt8, at::kChar},
    {DType::kInt16, at::kShort},
    {DType::kInt32, at::kInt},
    {DType::kInt64, at::kLong},
    {DType::kFloat16, at::kHalf},
    {DType::kFloat32, at::kFloat},
    {DType::kFloat64, at::kDouble},
    {DType::kComplex32, at::kComplexHalf},
    {DType::kComplex64, at::kComplexFloat},
    {DType::kComplex128, at::kComplexDouble},
    {DType::kBool, at::kBool},
    {DType::kBFloat16, at::kBFloat16},
    {DType::kUInt16, at::kUInt16},
    {DType::kFloat8E4M3, at::kFloat8_e4m3fn},
    {DType::kFloat8E5M2, at::kFloat8_e5m2},
}};

std::vector<std::int64_t> integers(const std::vector<Expr>& values, const char* what) {
  std::vector<std::int64_t> result;
  for (const Expr& e : values) {
    const auto value = e.as_integer();
    if (!value || *value < 0) fail("a weight's {} is '{}', expected an integer", what, e.str());
    result.push_back(*value);
  }
  return result;
}

}  // namespace

at::ScalarType scalar_type(DType dtype) {
  for (const auto& [code, type] : kTypes) {
    if (code == dtype) return type;
  }
  fail("element type {} is not supported", dtype_name(dtype));
}

DType dtype_of(at::ScalarType type) {
  for (const auto& [code, known] : kTypes) {
    if (known == type) return code;
  }
  fail("element type {} cannot be kept in an archive", c10::toString(type));
}

at::Tensor weight_tensor(const Weight& weight) {
  const auto sizes = integers(weight.meta.sizes, "size");
  const auto strides = integers(weight.meta.strides, "stride");
  const auto offset = integers({weight.meta.storage_offset}, "storage offset").front();
  const auto options = at::TensorOptions().dtype(scalar_type(weight.meta.dtype));
  for (const std::int64_t size : sizes) {
    // Nothing to point at: an empty storage has no address, and the offset need not lie within it.
    if (size == 0) return at::empty(sizes, options);
  }
  std::shared_ptr<const Storage> storage = weight.storage;
  // ATen has no tensors of constant data; nothing that runs a program writes to its weights.
  auto* data = const_cast<std::byte*>(storage->bytes.data()) + offset * dtype_bytes(weight.meta.dtype);
  return at::from_blob(
      data, sizes, strides, [storage](void*) {}, options);
}

Weight make_weight(const at::Tensor& tensor, bool is_parameter, bool keep_strides) {
  Weight weight;
  weight.is_parameter = is_parameter;
  weight.meta.dtype = dtype_of(tensor.scalar_type());
  weight.meta.requires_grad = is_parameter && tensor.requires_grad();
  const at::Tensor cpu = tensor.detach().to(at::kCPU);
  at::Tensor kept;
  if (keep_strides) {
    // The whole storage, so that padding between and after rows is kept.
    const auto element = static_cast<std::int64_t>(cpu.element_size());
    const auto count = static_cast<std::int64_t>(cpu.storage().nbytes()) / element;
    kept = at::from_blob(cpu.storage().mutable_data(), {count}, cpu.options()).clone();
  } else {
    kept = cpu.clone(at::MemoryFormat::Contiguous);
  }
  const auto sizes = cpu.sizes();
  const auto strides = keep_strides ? cpu.strides() : kept.strides();
  weight.meta.sizes.assign(sizes.begin(), sizes.end());
  weight.meta.strides.assign(strides.begin(), strides.end());
  weight.meta.storage_offset = keep_strides ? cpu.storage_offset() : 0;
  const auto* data = static_cast<const std::byte*>(kept.const_data_ptr());
  const auto owner = std::make_shared<const at::Tensor>(kept);
  weight.storage = std::make_shared<const Storage>(Storage{{data, kept.nbytes()}, owner});
  return weight;
}

}  // namespace ikbo::graph
