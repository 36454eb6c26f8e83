// Sample inputs: a file of torch.save within the archive. Its pickle is read by a machine of our own that knows
// containers, numbers and tensors and builds nothing else, because a pickle can ask for any code to be run.
#include "graph/archive_samples.h"

#include <ATen/ops/from_blob.h>

#include <bit>
#include <cstring>
#include <deque>
#include <map>
#include <unordered_map>
#include <utility>

#include "graph/archive.h"
#include "graph/archive_extent.h"
#include "graph/call_spec.h"
#include "graph/error.h"

namespace ikbo::graph {
namespace {

struct Value {
  enum class Kind { kNone, kInteger, kOther, kText, kTuple, kList, kDict, kGlobal, kObject, kStorage, kTensor, kMark };
  Kind kind = Kind::kOther;
  std::int64_t integer = 0;
  std::string text;                               // text; a global's "module name"; a storage's key
  std::vector<Value*> items;                      // of a tuple or list; an object's arguments and state
  std::vector<std::pair<Value*, Value*>> fields;  // of a dict
  std::string dtype;                              // a storage's class
  at::Tensor tensor;
};
using Kind = Value::Kind;

/// Storage classes and dtypes as pickles name them.
const std::map<std::string, at::ScalarType>& pickled_types() {
  static const std::map<std::string, at::ScalarType> types{
      {"torch ByteStorage", at::kByte},
      {"torch CharStorage", at::kChar},
      {"torch ShortStorage", at::kShort},
      {"torch IntStorage", at::kInt},
      {"torch LongStorage", at::kLong},
      {"torch HalfStorage", at::kHalf},
      {"torch FloatStorage", at::kFloat},
      {"torch DoubleStorage", at::kDouble},
      {"torch BoolStorage", at::kBool},
      {"torch BFloat16Storage", at::kBFloat16},
      {"torch ComplexFloatStorage", at::kComplexFloat},
      {"torch ComplexDoubleStorage", at::kComplexDouble},
      {"torch complex32", at::kComplexHalf},
      {"torch uint16", at::kUInt16},
      {"torch float8_e4m3fn", at::kFloat8_e4m3fn},
      {"torch float8_e5m2", at::kFloat8_e5m2},
  };
  return types;
}

constexpr const char* kRebuild2 = "torch._utils _rebuild_tensor_v2";
constexpr const char* kRebuild3 = "torch._utils _rebuild_tensor_v3";
// A name that a pickle uses again and again is copied each time: it must not make much out of little.
constexpr std::size_t kMaxName = 200;
constexpr std::size_t kMaxDimensions = 64;

class Unpickler {
 public:
  explicit Unpickler(const ZipDirectory& zip) : zip_(zip) {}

  /// The pickled value; it lives as long as this. Throws ikbo::Error where the pickle is damaged.
  const Value* read(Bytes pickle) {
    in_ = pickle;
    while (true) {
      const auto code = static_cast<unsigned char>(take(1).front());
      if (code == '.') return pop();
      step(code);
    }
  }

 private:
  Bytes take(std::uint64_t count) {
    if (count > in_.size()) fail("the pickle is cut off");
    const Bytes taken = in_.first(count);
    in_ = in_.subspan(count);
    return taken;
  }
  template <typename T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::string line() {
    const std::string_view rest = as_text(in_);
    const auto end = rest.find('\n');
    if (end == std::string_view::npos) fail("the pickle is cut off");
    std::string text(rest.substr(0, end));
    take(end + 1);
    return text;
  }

  Value* make(Kind kind) {
    Value& value = arena_.emplace_back();
    value.kind = kind;
    return &value;
  }
  Value* push(Kind kind) { return stack_.emplace_back(make(kind)); }
  void push_integer(std::int64_t integer) { push(Kind::kInteger)->integer = integer; }
  void push_text(std::uint64_t size) { push(Kind::kText)->text = as_text(take(size)); }
  Value* top() {
    if (stack_.empty()) fail("the pickle takes from an empty stack");
    return stack_.back();
  }
  Value* pop() {
    Value* value = top();
    stack_.pop_back();
    return value;
  }
  std::vector<Value*> pop_mark() {
    std::size_t at = stack_.size();
    while (at > 0 && stack_[at - 1]->kind != Kind::kMark) --at;
    if (at == 0) fail("the pickle has no mark");
    std::vector<Value*> items(stack_.begin() + static_cast<std::ptrdiff_t>(at), stack_.end());
    stack_.resize(at - 1);
    return items;
  }
  void push_tuple(std::vector<Value*> items) { push(Kind::kTuple)->items = std::move(items); }
  void pop_tuple(std::size_t count) {
    std::vector<Value*> items(count);
    for (std::size_t i = count; i-- > 0;) items[i] = pop();
    push_tuple(std::move(items));
  }
  void get(std::uint32_t index) {
    const auto it = memo_.find(index);
    if (it == memo_.end()) fail("the pickle recalls what it never kept");
    stack_.push_back(it->second);
  }
  void set_items(const std::vector<Value*>& items) {
    if (items.size() % 2 != 0) fail("the pickle sets a key without a value");
    Value* dict = top();
    for (std::size_t i = 0; i < items.size(); i += 2) dict->fields.emplace_back(items[i], items[i + 1]);
  }
  void append(const std::vector<Value*>& items) {
    Value* list = top();
    list->items.insert(list->items.end(), items.begin(), items.end());
  }

  void step(unsigned char code) {
    switch (code) {
      case 0x80:
        take(1);
        break;  // PROTO
      case 0x95:
        take(8);
        break;  // FRAME
      case '(':
        push(Kind::kMark);
        break;  // MARK
      case '0':
        pop();
        break;  // POP
      case 'N':
        push(Kind::kNone);
        break;  // NONE
      case 0x88:
        push_integer(1);
        break;  // NEWTRUE
      case 0x89:
        push_integer(0);
        break;  // NEWFALSE
      case 'K':
        push_integer(number<std::uint8_t>());
        break;  // BININT1
      case 'M':
        push_integer(number<std::uint16_t>());
        break;  // BININT2
      case 'J':
        push_integer(number<std::int32_t>());
        break;  // BININT
      case 0x8a:
        long1();
        break;  // LONG1
      case 'G':
        take(8);
        push(Kind::kOther);
        break;  // BINFLOAT: no tensor, so nobody asks for it
      case 'X':
        push_text(number<std::uint32_t>());
        break;  // BINUNICODE
      case 0x8c:
        push_text(number<std::uint8_t>());
        break;  // SHORT_BINUNICODE
      case ')':
        push(Kind::kTuple);
        break;  // EMPTY_TUPLE
      case 't':
        push_tuple(pop_mark());
        break;  // TUPLE
      case 0x85:
        pop_tuple(1);
        break;  // TUPLE1
      case 0x86:
        pop_tuple(2);
        break;  // TUPLE2
      case 0x87:
        pop_tuple(3);
        break;  // TUPLE3
      case ']':
        push(Kind::kList);
        break;  // EMPTY_LIST
      case 'a':
        append({pop()});
        break;  // APPEND
      case 'e':
        append(pop_mark());
        break;  // APPENDS
      case '}':
        push(Kind::kDict);
        break;  // EMPTY_DICT
      case 's':
        set_item();
        break;  // SETITEM
      case 'u':
        set_items(pop_mark());
        break;  // SETITEMS
      case 'q':
        memo_[number<std::uint8_t>()] = top();
        break;  // BINPUT
      case 'r':
        memo_[number<std::uint32_t>()] = top();
        break;  // LONG_BINPUT
      case 0x94:
        memoize();
        break;  // MEMOIZE
      case 'h':
        get(number<std::uint8_t>());
        break;  // BINGET
      case 'j':
        get(number<std::uint32_t>());
        break;  // LONG_BINGET
      case 'c':
        global();
        break;  // GLOBAL
      case 0x93:
        stack_global();
        break;  // STACK_GLOBAL
      case 'Q':
        storage();
        break;  // BINPERSID
      case 'R':
        reduce();
        break;  // REDUCE
      case 0x81:
        new_object();
        break;  // NEWOBJ
      case 'b':
        build();
        break;  // BUILD
      default:
        fail("the pickle has an operation {:#x} that is not plain", code);
    }
  }

  void long1() {
    const Bytes digits = take(number<std::uint8_t>());
    if (digits.size() > 8) fail("the pickle has an integer of more than 64 bits");
    std::uint64_t value = 0;
    std::memcpy(&value, digits.data(), digits.size());
    const std::size_t bits = digits.size() * 8;
    if (bits > 0 && bits < 64 && (value >> (bits - 1)) != 0) value |= ~std::uint64_t{0} << bits;
    push_integer(std::bit_cast<std::int64_t>(value));
  }
  void set_item() {
    Value* value = pop();
    Value* key = pop();
    set_items({key, value});
  }
  void memoize() {
    Value* value = top();
    memo_[static_cast<std::uint32_t>(memo_.size())] = value;
  }
  void global() {
    const std::string module = line();
    push(Kind::kGlobal)->text = module + " " + line();
  }
  void stack_global() {
    const Value* name = pop();
    const Value* module = pop();
    if (module->text.size() + name->text.size() > kMaxName) fail("the pickle names something too long");
    push(Kind::kGlobal)->text = module->text + " " + name->text;
  }
  /// ('storage', class, key, location, elements)
  void storage() {
    const Value* id = pop();
    if (id->kind != Kind::kTuple || id->items.size() < 3 || id->items[1]->kind != Kind::kGlobal ||
        id->items[2]->kind != Kind::kText || id->items[1]->text.size() > kMaxName ||
        id->items[2]->text.size() > kMaxName) {
      fail("the pickle refers to something that is no storage");
    }
    Value* result = push(Kind::kStorage);
    result->dtype = id->items[1]->text;
    result->text = id->items[2]->text;
  }
  void reduce() {
    const Value* arguments = pop();
    const Value* function = pop();
    if (function->kind == Kind::kGlobal && arguments->kind == Kind::kTuple) {
      if (function->text == kRebuild2 || function->text == kRebuild3) {
        const at::Tensor tensor = rebuild(arguments->items, function->text == kRebuild3);
        push(Kind::kTensor)->tensor = tensor;
        return;
      }
      if (function->text == "torch._utils _rebuild_parameter" && !arguments->items.empty()) {
        stack_.push_back(arguments->items.front());
        return;
      }
      if (function->text == "collections OrderedDict" || function->text == "collections defaultdict") {
        push(Kind::kDict);
        return;
      }
    }
    push(Kind::kOther);
  }
  void new_object() {
    Value* arguments = pop();
    pop();  // the class
    push(Kind::kObject)->items = {arguments};
  }
  void build() {
    Value* state = pop();
    Value* object = top();
    if (object->kind != Kind::kObject) return;
    object->items.resize(1);
    object->items.push_back(state);
  }

  static std::vector<std::int64_t> integers(const Value* value) {
    std::vector<std::int64_t> result;
    if (value->items.size() > kMaxDimensions) fail("the pickle has a tensor with a damaged shape");
    for (const Value* item : value->items) {
      if (item->kind != Kind::kInteger || item->integer < 0) fail("the pickle has a tensor with a damaged shape");
      result.push_back(item->integer);
    }
    return result;
  }

  at::Tensor rebuild(const std::vector<Value*>& arguments, bool has_dtype) {
    if (arguments.size() < (has_dtype ? 7U : 4U) || arguments[0]->kind != Kind::kStorage ||
        arguments[1]->kind != Kind::kInteger || arguments[1]->integer < 0 || arguments[2]->kind != Kind::kTuple ||
        arguments[3]->kind != Kind::kTuple) {
      fail("the pickle has a damaged tensor");
    }
    const std::string& type = has_dtype ? arguments[6]->text : arguments[0]->dtype;
    const auto dtype = pickled_types().find(type);
    if (dtype == pickled_types().end()) fail("the pickle has a tensor of type '{}'", type);
    const auto sizes = integers(arguments[2]);
    const auto strides = integers(arguments[3]);
    if (sizes.size() != strides.size()) fail("the pickle has a tensor with a damaged shape");
    const auto bytes = static_cast<std::int64_t>(c10::elementSize(dtype->second));
    const auto end = bytes_reached(sizes, strides, arguments[1]->integer, bytes);
    const auto& data = storage_bytes(arguments[0]->text);
    if (!end || *end > data->size() * sizeof(std::max_align_t)) fail("the pickle has a tensor without its data");
    auto* first = reinterpret_cast<std::byte*>(data->data()) + (*end == 0 ? 0 : arguments[1]->integer * bytes);
    return at::from_blob(
        first, sizes, strides, [keep = data](void*) {}, at::TensorOptions().dtype(dtype->second));
  }

  using Buffer = std::shared_ptr<std::vector<std::max_align_t>>;

  /// A copy of a storage, so that samples can be written to and do not hold the file; shared as the storage was. It
  /// ends in a padding of less than one unit, and has a unit at least, so that it has an address.
  const Buffer& storage_bytes(const std::string& key) {
    const auto [it, is_new] = storages_.try_emplace(key);
    if (is_new) {
      const ZipMember* member = zip_.find("data/" + key);
      if (member == nullptr) fail("the pickle has a tensor without its data");
      it->second = std::make_shared<std::vector<std::max_align_t>>(member->bytes.size() / sizeof(std::max_align_t) + 1);
      if (!member->bytes.empty()) std::memcpy(it->second->data(), member->bytes.data(), member->bytes.size());
    }
    return it->second;
  }

  const ZipDirectory& zip_;
  Bytes in_;
  std::deque<Value> arena_;  // owns every value: a damaged pickle can make cycles
  std::vector<Value*> stack_;
  std::unordered_map<std::uint32_t, Value*> memo_;
  std::map<std::string, Buffer> storages_;
};

const Value* child(const Value* value, const CallTree& tree, std::size_t i) {
  if (value->kind == Kind::kObject) value = value->items.back();  // its state where it has one, else its arguments
  if (value->kind == Kind::kTuple || value->kind == Kind::kList) {
    if (value->items.size() != tree.children.size()) fail("a sample input has another number of items than the call");
    return value->items[i];
  }
  if (value->kind == Kind::kDict) {
    const auto* text = std::get_if<std::string>(&tree.keys[i]);
    const auto* integer = std::get_if<std::int64_t>(&tree.keys[i]);
    for (const auto& [key, item] : value->fields) {
      if (text != nullptr && key->kind == Kind::kText && key->text == *text) return item;
      if (integer != nullptr && key->kind == Kind::kInteger && key->integer == *integer) return item;
    }
  }
  fail("a sample input has no item for '{}'", tree.type);
}

void flatten(const Value* value, const CallTree& tree, std::vector<const Value*>& leaves) {
  if (tree.kind == CallTree::Kind::kLeaf) {
    leaves.push_back(value);
    return;
  }
  for (std::size_t i = 0; i < tree.children.size(); ++i) flatten(child(value, tree, i), tree.children[i], leaves);
}

bool fits(const at::Tensor& tensor, const TensorMeta& meta) {
  if (dtype_of(tensor.scalar_type()) != meta.dtype) return false;
  if (tensor.dim() != static_cast<std::int64_t>(meta.sizes.size())) return false;
  for (std::size_t i = 0; i < meta.sizes.size(); ++i) {
    const auto size = meta.sizes[i].as_integer();
    if (size && *size != tensor.size(static_cast<std::int64_t>(i))) return false;
  }
  return true;
}

}  // namespace

std::vector<at::Tensor> read_samples(Bytes file, const Program& program) {
  if (file.empty()) return {};
  try {
    const ZipDirectory zip(file, "sample inputs");
    zip.require_stored();
    const ZipMember* pickle = zip.find("data.pkl");
    if (pickle == nullptr) return {};
    Unpickler unpickler(zip);
    const Value* call = unpickler.read(pickle->bytes);
    if (call->kind != Kind::kTuple || call->items.size() != 2) return {};
    const CallSpec spec = call_spec(program);
    std::vector<const Value*> leaves;
    flatten(call->items[0], spec.args, leaves);
    flatten(call->items[1], spec.kwargs, leaves);
    const std::vector<std::size_t> places = caller_inputs(program);
    if (leaves.size() != places.size()) return {};
    std::vector<at::Tensor> tensors;
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      const InputSpec& input = program.input_specs[places[i]];
      if (input.kind == InputKind::kConstantInput) continue;
      const auto* name = std::get_if<TensorArg>(&input.value);
      if (name == nullptr || leaves[i]->kind != Kind::kTensor) return {};
      const auto meta = program.graph.tensors.find(name->name);
      if (meta == program.graph.tensors.end() || !fits(leaves[i]->tensor, meta->second)) return {};
      tensors.push_back(leaves[i]->tensor);
    }
    return tensors;
  } catch (const Error&) {
    return {};  // samples help, but nothing depends on them
  }
}

}  // namespace ikbo::graph
