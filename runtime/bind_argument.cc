#include "runtime/bind_argument.h"

#include <ATen/ScalarOps.h>

#include "graph/error.h"

namespace ikbo::runtime {
namespace {

using c10::IValue;
using c10::TypeKind;
using graph::Argument;

Source constant(IValue value) {
  Source source;
  source.constant = std::move(value);
  return source;
}

Source lookup(const std::string& name, const Bindings& bindings) {
  const auto found = bindings.find(name);
  if (found == bindings.end()) fail("value '{}' is not defined before it is read", name);
  return found->second;
}

// The element type of a list, or the type itself, without "optional".
c10::TypePtr strip_optional(c10::TypePtr type) {
  while (type->kind() == TypeKind::OptionalType) type = type->castRaw<c10::OptionalType>()->getElementType();
  return type;
}

class Binder {
 public:
  Binder(c10::TypePtr type, const Bindings& bindings, const PlanOptions& options)
      : type_(strip_optional(type)),
        optional_(type->kind() == TypeKind::OptionalType),
        bindings_(bindings),
        options_(options) {
    if (type_->kind() == TypeKind::ListType) element_ = type_->castRaw<c10::ListType>()->getElementType();
  }

  Source operator()(const graph::NoneArg&) const {
    if (!optional_ && type_->kind() == TypeKind::TensorType) return constant(at::Tensor());
    return constant(IValue());
  }
  Source operator()(const graph::TensorArg& a) const {
    Source source = lookup(a.name, bindings_);
    // A single tensor where the schema has a list is not something torch.export writes.
    if (element_) fail("one tensor where the operator takes {}", type_->str());
    return source;
  }
  Source operator()(const graph::TensorListArg& a) const {
    std::vector<std::optional<std::string>> names(a.names.begin(), a.names.end());
    return tensors(names);
  }
  Source operator()(const graph::OptionalTensorListArg& a) const { return tensors(a.names); }
  Source operator()(const graph::SymInt& a) const {
    return a.name() ? number_slot(*a.name()) : number(std::get<std::int64_t>(a.value));
  }
  Source operator()(const graph::SymFloatArg& a) const {
    if (const auto* name = std::get_if<std::string>(&a.value)) return number_slot(*name);
    return number(std::get<double>(a.value));
  }
  Source operator()(const graph::SymBoolArg& a) const {
    if (const auto* name = std::get_if<std::string>(&a.value)) return number_slot(*name);
    return number(std::get<bool>(a.value));
  }
  Source operator()(const graph::SymIntListArg& a) const {
    bool all_known = true;
    for (const graph::SymInt& v : a.values) all_known = all_known && !v.name();
    if (all_known) {
      std::vector<std::int64_t> values;
      for (const graph::SymInt& v : a.values) values.push_back(std::get<std::int64_t>(v.value));
      return (*this)(values);
    }
    Source source;
    source.kind = element_kind() == TypeKind::FloatType ? Source::Kind::kDoubles : Source::Kind::kInts;
    for (const graph::SymInt& v : a.values) {
      source.elements.push_back(v.name() ? lookup(*v.name(), bindings_) : constant(std::get<std::int64_t>(v.value)));
    }
    return source;
  }
  Source operator()(bool v) const { return number(v); }
  Source operator()(std::int64_t v) const { return number(v); }
  Source operator()(double v) const { return number(v); }
  Source operator()(const std::vector<bool>& values) const {
    c10::List<bool> list;
    for (const bool v : values) list.push_back(v);
    return constant(std::move(list));
  }
  Source operator()(const std::vector<std::int64_t>& values) const {
    switch (element_kind()) {
      case TypeKind::FloatType:
        return (*this)(std::vector<double>(values.begin(), values.end()));
      case TypeKind::TensorType:
      case TypeKind::OptionalType:
        // An empty list has no type of its own in the archive.
        if (values.empty()) return tensors({});
        break;
      case TypeKind::BoolType:
        if (values.empty()) return (*this)(std::vector<bool>());
        break;
      case TypeKind::NumberType: {
        c10::impl::GenericList list(c10::NumberType::get());
        for (const std::int64_t v : values) list.push_back(IValue(v));
        return constant(std::move(list));
      }
      default:
        break;
    }
    return constant(c10::List<std::int64_t>(values));
  }
  Source operator()(const std::vector<double>& values) const {
    if (element_kind() == TypeKind::NumberType) {
      c10::impl::GenericList list(c10::NumberType::get());
      for (const double v : values) list.push_back(IValue(v));
      return constant(std::move(list));
    }
    return constant(c10::List<double>(values));
  }
  Source operator()(const std::string& v) const { return constant(v); }
  Source operator()(const std::vector<std::string>& values) const { return constant(c10::List<std::string>(values)); }
  Source operator()(const graph::DTypeArg& a) const {
    at::ScalarType type = graph::scalar_type(a.dtype);
    if (options_.float64 && graph::is_floating(a.dtype)) type = at::kDouble;
    return constant(static_cast<std::int64_t>(type));
  }
  Source operator()(const graph::MemoryFormatArg& a) const {
    switch (a.code) {
      case 1:
        return constant(static_cast<std::int64_t>(c10::MemoryFormat::Contiguous));
      case 2:
        return constant(static_cast<std::int64_t>(c10::MemoryFormat::ChannelsLast));
      case 3:
        return constant(static_cast<std::int64_t>(c10::MemoryFormat::ChannelsLast3d));
      case 4:
        return constant(static_cast<std::int64_t>(c10::MemoryFormat::Preserve));
      default:
        fail("memory format {} is not known", a.code);
    }
  }
  Source operator()(const graph::LayoutArg& a) const {
    if (a.code != 7) fail("layout {} is not supported: only strided tensors are", a.code);
    return constant(static_cast<std::int64_t>(c10::kStrided));
  }
  Source operator()(const graph::Device&) const {
    // The device the model was exported on means nothing here: everything lives on the engine's.
    return constant(options_.device);
  }
  Source operator()(const graph::RawArg& a) const {
    if (a.json.is_object() && a.json.contains("as_complex")) {
      const graph::Json& value = a.json["as_complex"];
      return constant(c10::complex<double>(value.at("real").get<double>(), value.at("imag").get<double>()));
    }
    const std::string kind = a.json.is_object() && !a.json.empty() ? a.json.begin().key() : "?";
    fail("arguments of kind '{}' are not supported", kind);
  }

 private:
  TypeKind element_kind() const { return element_ ? element_->kind() : TypeKind::AnyType; }

  template <typename Number>
  Source number(Number value) const {
    switch (type_->kind()) {
      case TypeKind::TensorType: {
        // Python makes a 0-d tensor that does not take part in type promotion; so does this.
        const at::Tensor tensor = at::native::wrapped_scalar_tensor(at::Scalar(value));
        if (options_.device.is_cpu()) return constant(tensor);
        const at::Tensor moved = tensor.to(options_.device);  // which forgets that it is a number
        moved.unsafeGetTensorImpl()->set_wrapped_number(true);
        return constant(moved);
      }
      case TypeKind::FloatType:
        return constant(static_cast<double>(value));
      case TypeKind::ListType:
        // "int[1] dim" takes a plain integer.
        if (element_kind() == TypeKind::FloatType) return constant(c10::List<double>({static_cast<double>(value)}));
        if constexpr (std::is_same_v<Number, std::int64_t>) return constant(c10::List<std::int64_t>({value}));
        fail("one number where the operator takes {}", type_->str());
      default:
        return constant(value);
    }
  }

  Source number_slot(const std::string& name) const {
    Source source = lookup(name, bindings_);
    switch (type_->kind()) {
      case TypeKind::TensorType:
        source.kind = Source::Kind::kNumberTensor;
        break;
      case TypeKind::FloatType:
        source.kind = Source::Kind::kDouble;
        break;
      case TypeKind::ListType: {
        Source list;
        list.kind = element_kind() == TypeKind::FloatType ? Source::Kind::kDoubles : Source::Kind::kInts;
        list.elements.push_back(std::move(source));
        return list;
      }
      default:
        break;
    }
    return source;
  }

  Source tensors(const std::vector<std::optional<std::string>>& names) const {
    const bool optional = element_kind() == TypeKind::OptionalType;
    Source source;
    source.kind = optional ? Source::Kind::kOptionalTensors : Source::Kind::kTensors;
    for (const auto& name : names) {
      if (!name && !optional) fail("a missing tensor where the operator takes {}", type_->str());
      source.elements.push_back(name ? lookup(*name, bindings_) : constant(IValue()));
    }
    return source;
  }

  c10::TypePtr type_;
  bool optional_;
  c10::TypePtr element_;
  const Bindings& bindings_;
  const PlanOptions& options_;
};

}  // namespace

Source bind_argument(const Argument& argument, const c10::TypePtr& type, const Bindings& bindings,
                     const PlanOptions& options) {
  return std::visit(Binder(type, bindings, options), argument);
}

Source bind_untyped(const Argument& argument, const Bindings& bindings) {
  return std::visit(Binder(c10::AnyType::get(), bindings, PlanOptions{}), argument);
}

}  // namespace ikbo::runtime
