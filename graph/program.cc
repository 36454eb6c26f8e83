#include "graph/program.h"

#include <algorithm>
#include <array>
#include <utility>

#include "graph/error.h"

namespace ikbo::graph {
namespace {

struct DTypeInfo {
  DType dtype;
  const char* name;
  int bytes;
  bool floating;
  bool integral;
};

constexpr std::array<DTypeInfo, 16> kDTypes{{
    {DType::kUInt8, "uint8", 1, false, true},
    {DType::kInt8, "int8", 1, false, true},
    {DType::kInt16, "int16", 2, false, true},
    {DType::kInt32, "int32", 4, false, true},
    {DType::kInt64, "int64", 8, false, true},
    {DType::kFloat16, "float16", 2, true, false},
    {DType::kFloat32, "float32", 4, true, false},
    {DType::kFloat64, "float64", 8, true, false},
    {DType::kComplex32, "complex32", 4, false, false},
    {DType::kComplex64, "complex64", 8, false, false},
    {DType::kComplex128, "complex128", 16, false, false},
    {DType::kBool, "bool", 1, false, false},
    {DType::kBFloat16, "bfloat16", 2, true, false},
    {DType::kUInt16, "uint16", 2, false, true},
    {DType::kFloat8E4M3, "float8_e4m3fn", 1, true, false},
    {DType::kFloat8E5M2, "float8_e5m2", 1, true, false},
}};

const DTypeInfo* info(DType dtype) {
  const auto* it = std::find_if(kDTypes.begin(), kDTypes.end(), [&](const DTypeInfo& i) { return i.dtype == dtype; });
  return it == kDTypes.end() ? nullptr : it;
}

}  // namespace

std::string dtype_name(DType dtype) {
  const DTypeInfo* i = info(dtype);
  return i != nullptr ? i->name : fmt::format("dtype {}", static_cast<int>(dtype));
}
bool is_floating(DType dtype) {
  const DTypeInfo* i = info(dtype);
  return i != nullptr && i->floating;
}
bool is_integral(DType dtype) {
  const DTypeInfo* i = info(dtype);
  return i != nullptr && i->integral;
}
std::int64_t dtype_bytes(DType dtype) {
  const DTypeInfo* i = info(dtype);
  return i != nullptr ? i->bytes : 0;
}

std::string describe(const TensorMeta& meta) {
  std::vector<std::string> sizes;
  for (const Expr& s : meta.sizes) sizes.push_back(s.str());
  return fmt::format("{} [{}]", dtype_name(meta.dtype), fmt::join(sizes, ", "));
}

std::vector<Expr> contiguous_strides(const std::vector<Expr>& sizes) {
  std::vector<Expr> strides(sizes.size());
  Expr step = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    strides[i] = step;
    step = step * sizes[i];
  }
  return strides;
}

const Argument* Node::find(const std::string& argument) const {
  for (const NamedArgument& a : inputs) {
    if (a.name == argument) return &a.value;
  }
  return nullptr;
}

std::vector<std::string> value_names(const Argument& argument) {
  std::vector<std::string> names;
  if (const auto* t = std::get_if<TensorArg>(&argument)) {
    names.push_back(t->name);
  } else if (const auto* list = std::get_if<TensorListArg>(&argument)) {
    names = list->names;
  } else if (const auto* optional = std::get_if<OptionalTensorListArg>(&argument)) {
    for (const auto& n : optional->names) {
      if (n) names.push_back(*n);
    }
  } else if (const auto* i = std::get_if<SymInt>(&argument)) {
    if (i->name() != nullptr) names.push_back(*i->name());
  } else if (const auto* is = std::get_if<SymIntListArg>(&argument)) {
    for (const SymInt& s : is->values) {
      if (s.name() != nullptr) names.push_back(*s.name());
    }
  } else if (const auto* f = std::get_if<SymFloatArg>(&argument)) {
    if (const auto* n = std::get_if<std::string>(&f->value)) names.push_back(*n);
  } else if (const auto* b = std::get_if<SymBoolArg>(&argument)) {
    if (const auto* n = std::get_if<std::string>(&b->value)) names.push_back(*n);
  }
  return names;
}

std::vector<std::string> input_names(const Node& node) {
  std::vector<std::string> names;
  for (const NamedArgument& a : node.inputs) {
    for (std::string& n : value_names(a.value)) names.push_back(std::move(n));
  }
  return names;
}

std::vector<std::string> output_names(const Node& node) {
  std::vector<std::string> names;
  for (const Argument& a : node.outputs) {
    for (std::string& n : value_names(a)) names.push_back(std::move(n));
  }
  return names;
}

}  // namespace ikbo::graph
