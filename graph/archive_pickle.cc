// Sample inputs as torch.save writes them, so that torch.load reads them without being asked to trust the file.
#include <caffe2/serialize/inline_container.h>

#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "graph/archive.h"
#include "graph/archive_samples.h"
#include "graph/call_spec.h"
#include "graph/error.h"

namespace ikbo::graph {
namespace {

/// A container that only its Python class can make.
struct NotPlain {};

/// Storage classes that every PyTorch has; newer element types are stored as bytes with the type beside them.
std::optional<const char*> storage_class(at::ScalarType type) {
  switch (type) {
    case at::kByte:
      return "ByteStorage";
    case at::kChar:
      return "CharStorage";
    case at::kShort:
      return "ShortStorage";
    case at::kInt:
      return "IntStorage";
    case at::kLong:
      return "LongStorage";
    case at::kHalf:
      return "HalfStorage";
    case at::kFloat:
      return "FloatStorage";
    case at::kDouble:
      return "DoubleStorage";
    case at::kBool:
      return "BoolStorage";
    case at::kBFloat16:
      return "BFloat16Storage";
    case at::kComplexFloat:
      return "ComplexFloatStorage";
    case at::kComplexDouble:
      return "ComplexDoubleStorage";
    default:
      return std::nullopt;
  }
}

/// Writes pickle protocol 2. Nothing is memoized: every value stands where it is used.
class Pickler {
 public:
  Pickler(const std::vector<at::Tensor>& tensors, const Program& program)
      : tensors_(tensors), program_(program), places_(caller_inputs(program)) {}

  std::string write(const CallSpec& call) {
    out_ = "\x80\x02";
    value(call.args);
    value(call.kwargs);
    out_ += "\x86.";
    return std::move(out_);
  }

 private:
  template <typename T>
  void raw(T number) {
    out_.append(reinterpret_cast<const char*>(&number), sizeof(T));
  }
  void text(const std::string& text) {
    out_ += 'X';
    raw(static_cast<std::uint32_t>(text.size()));
    out_ += text;
  }
  void integer(std::int64_t number) {
    if (number >= std::numeric_limits<std::int32_t>::min() && number <= std::numeric_limits<std::int32_t>::max()) {
      out_ += 'J';
      raw(static_cast<std::int32_t>(number));
    } else {
      out_ += "\x8a\x08";
      raw(number);
    }
  }
  void floating(double number) {
    out_ += 'G';
    std::uint64_t bits = std::bit_cast<std::uint64_t>(number);
    for (int shift = 56; shift >= 0; shift -= 8) out_ += static_cast<char>((bits >> shift) & 0xff);
  }
  void boolean(bool value) { out_ += value ? '\x88' : '\x89'; }
  void global(const char* module, const std::string& name) { out_ += fmt::format("c{}\n{}\n", module, name); }
  void integers(at::IntArrayRef values) {
    out_ += '(';
    for (const std::int64_t v : values) integer(v);
    out_ += 't';
  }

  void tensor(const at::Tensor& tensor, std::size_t index) {
    const auto name = storage_class(tensor.scalar_type());
    global("torch._utils", name ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
    out_ += "((";
    text("storage");
    if (name) {
      global("torch", *name);
    } else {
      global("torch.storage", "UntypedStorage");
    }
    text(std::to_string(index));
    text("cpu");
    integer(name ? tensor.numel() : static_cast<std::int64_t>(tensor.nbytes()));
    out_ += "tQ";
    integer(0);
    integers(tensor.sizes());
    integers(tensor.strides());
    boolean(false);
    global("collections", "OrderedDict");
    out_ += ")R";
    if (!name) global("torch", dtype_name(dtype_of(tensor.scalar_type())));
    out_ += "tR";
  }

  void constant(const InputSpec& spec) {
    const Json& value = spec.json.at("constant_input").at("value");
    if (!value.is_object() || value.size() != 1) throw NotPlain{};
    const auto entry = value.begin();
    const std::string& kind = entry.key();
    const Json& content = entry.value();
    if (kind == "as_none") {
      out_ += 'N';
    } else if (kind == "as_int") {
      integer(content.get<std::int64_t>());
    } else if (kind == "as_bool") {
      boolean(content.get<bool>());
    } else if (kind == "as_string") {
      text(content.get<std::string>());
    } else if (kind == "as_float" && content.is_number()) {
      floating(content.get<double>());
    } else {
      throw NotPlain{};
    }
  }

  void leaf() {
    const InputSpec& spec = program_.input_specs[places_.at(leaves_++)];
    if (spec.kind == InputKind::kConstantInput) {
      constant(spec);
    } else if (std::holds_alternative<TensorArg>(spec.value)) {
      tensor(tensors_.at(written_), written_);
      ++written_;
    } else {
      throw NotPlain{};  // a symbolic number, whose value is not kept
    }
  }

  void value(const CallTree& tree) {
    if (tree.kind == CallTree::Kind::kLeaf) {
      leaf();
    } else if (tree.kind == CallTree::Kind::kTuple) {
      out_ += '(';
      for (const CallTree& child : tree.children) value(child);
      out_ += 't';
    } else if (tree.kind == CallTree::Kind::kList) {
      out_ += "](";
      for (const CallTree& child : tree.children) value(child);
      out_ += 'e';
    } else if (tree.kind == CallTree::Kind::kDict) {
      if (tree.type == "collections.OrderedDict") {
        global("collections", "OrderedDict");
        out_ += ")R(";
      } else {
        out_ += "}(";
      }
      for (std::size_t i = 0; i < tree.children.size(); ++i) {
        if (const auto* name = std::get_if<std::string>(&tree.keys[i])) {
          text(*name);
        } else {
          integer(std::get<std::int64_t>(tree.keys[i]));
        }
        value(tree.children[i]);
      }
      out_ += 'u';
    } else {
      throw NotPlain{};
    }
  }

  const std::vector<at::Tensor>& tensors_;
  const Program& program_;
  std::vector<std::size_t> places_;
  std::string out_;
  std::size_t leaves_ = 0;
  std::size_t written_ = 0;
};

}  // namespace

std::vector<char> write_samples(const std::vector<at::Tensor>& tensors, const Program& program) {
  if (tensors.empty()) return {};
  const std::vector<UserInput> inputs = user_inputs(program);
  if (inputs.size() != tensors.size()) {
    fail("{} sample inputs for a program with {} tensor inputs", tensors.size(), inputs.size());
  }
  std::vector<at::Tensor> plain;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TensorMeta& meta = program.graph.tensors.at(inputs[i].value);
    if (dtype_of(tensors[i].scalar_type()) != meta.dtype ||
        tensors[i].dim() != static_cast<std::int64_t>(meta.sizes.size())) {
      fail("sample input '{}' is {} with {} dimensions, expected {}", inputs[i].name,
           dtype_name(dtype_of(tensors[i].scalar_type())), tensors[i].dim(), describe(meta));
    }
    plain.push_back(tensors[i].detach().to(at::kCPU).contiguous());
  }
  std::string pickle;
  try {
    pickle = Pickler(plain, program).write(call_spec(program));
  } catch (const NotPlain&) {
    return {};
  }
  std::vector<char> file;
  caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, std::size_t size) {
    const char* bytes = static_cast<const char*>(data);
    file.insert(file.end(), bytes, bytes + size);
    return size;
  });
  writer.writeRecord("data.pkl", pickle.data(), pickle.size());
  for (std::size_t i = 0; i < plain.size(); ++i) {
    const void* data = plain[i].numel() == 0 ? static_cast<const void*>("") : plain[i].const_data_ptr();
    writer.writeRecord(fmt::format("data/{}", i), data, plain[i].nbytes());
  }
  writer.writeEndOfFile();
  return file;
}

}  // namespace ikbo::graph
