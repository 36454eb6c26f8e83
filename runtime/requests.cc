#include "runtime/requests.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <set>

#include "graph/error.h"
#include "graph/jagged.h"

namespace ikbo::runtime {
namespace {

using graph::Json;
using graph::Side;

// Where in the file something is, for messages.
std::string place(const std::string& input, const std::vector<std::int64_t>& position) {
  std::string text = "'" + input + "'";
  for (const std::int64_t p : position) text += fmt::format("[{}]", p);
  return text;
}

struct Limits {
  std::int64_t min;
  std::int64_t max;
};

Limits limits(at::ScalarType type) {
  switch (type) {
    case at::kByte:
      return {0, 255};
    case at::kChar:
      return {-128, 127};
    case at::kShort:
      return {-32768, 32767};
    case at::kUInt16:
      return {0, 65535};
    case at::kInt:
      return {std::numeric_limits<std::int32_t>::min(), std::numeric_limits<std::int32_t>::max()};
    default:
      return {std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max()};
  }
}

/// Turns nested JSON arrays into a tensor of a given type, checking every length and number on the way.
class TensorReader {
 public:
  TensorReader(const std::string& input, graph::DType dtype, std::vector<std::int64_t> sizes)
      : input_(input),
        type_(graph::scalar_type(dtype)),
        type_name_(graph::dtype_name(dtype)),
        sizes_(std::move(sizes)),
        floating_(at::isFloatingType(type_)),
        limits_(limits(type_)) {
    if (at::isComplexType(type_)) fail("input '{}' is {}, which a request file cannot give", input_, type_name_);
  }

  at::Tensor read(const Json& json) {
    walk(json, 0);
    // A dimension below an empty list was never seen.
    for (std::int64_t& size : sizes_) size = std::max<std::int64_t>(size, 0);
    const at::Tensor values = floating_ ? at::tensor(at::ArrayRef<double>(doubles_), at::kDouble)
                                        : at::tensor(at::ArrayRef<std::int64_t>(integers_), at::kLong);
    return values.reshape(sizes_).to(type_);
  }

 private:
  void walk(const Json& json, std::size_t depth) {
    if (depth == sizes_.size()) return number(json);
    std::int64_t& size = sizes_[depth];
    if (!json.is_array()) {
      fail("{}: expected a list of {}, given {}", place(input_, position_), expected(depth), shown(json));
    }
    const auto given = static_cast<std::int64_t>(json.size());
    if (size >= 0 && given != size) {
      fail("{}: expected {}, given {}", place(input_, position_), expected(depth), given);
    }
    size = given;
    position_.push_back(0);
    for (const Json& element : json) {
      walk(element, depth + 1);
      ++position_.back();
    }
    position_.pop_back();
  }

  std::string expected(std::size_t depth) const {
    const std::string what = depth + 1 == sizes_.size() ? "values" : "lists";
    return sizes_[depth] >= 0 ? fmt::format("{} {}", sizes_[depth], what) : what;
  }

  static std::string shown(const Json& json) {
    std::string text = json.dump();
    return text.size() > 40 ? text.substr(0, 37) + "..." : text;
  }

  void number(const Json& json) {
    if (json.is_array()) fail("{}: expected one value, given a list of {}", place(input_, position_), json.size());
    if (floating_) {
      if (!json.is_number()) fail("{}: expected a number, given {}", place(input_, position_), shown(json));
      const auto value = json.get<double>();
      if (type_ != at::kDouble && std::abs(value) > largest()) {
        fail("{}: {} does not fit {}", place(input_, position_), shown(json), type_name_);
      }
      doubles_.push_back(value);
    } else {
      integers_.push_back(type_ == at::kBool ? boolean(json) : integer(json));
    }
  }

  double largest() const {
    return type_ == at::kHalf ? 65504.0 : type_ == at::kFloat || type_ == at::kBFloat16 ? 3.38953139e38 : 448.0;
  }

  std::int64_t boolean(const Json& json) {
    if (json.is_boolean()) return json.get<bool>() ? 1 : 0;
    if (json.is_number_integer() && (json.get<std::int64_t>() == 0 || json.get<std::int64_t>() == 1)) {
      return json.get<std::int64_t>();
    }
    fail("{}: expected true or false, given {}", place(input_, position_), shown(json));
  }

  std::int64_t integer(const Json& json) {
    std::int64_t value = 0;
    if (json.is_number_float() && json.get<double>() == std::trunc(json.get<double>()) &&
        std::abs(json.get<double>()) < 9e15) {
      value = static_cast<std::int64_t>(json.get<double>());  // 3.0 is an integer all the same
    } else if (json.is_number_unsigned() && json.get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX)) {
      fail("{}: {} does not fit {}", place(input_, position_), shown(json), type_name_);
    } else if (json.is_number_integer()) {
      value = json.get<std::int64_t>();
    } else {
      fail("{}: expected an integer, given {}", place(input_, position_), shown(json));
    }
    if (value < limits_.min || value > limits_.max) {
      fail("{}: {} does not fit {}", place(input_, position_), value, type_name_);
    }
    return value;
  }

  std::string input_;
  at::ScalarType type_;
  std::string type_name_;
  std::vector<std::int64_t> sizes_;
  bool floating_;
  Limits limits_;
  std::vector<std::int64_t> position_;
  std::vector<double> doubles_;
  std::vector<std::int64_t> integers_;
};

const char* section_name(Side side) {
  return side == Side::kRequestOnly ? "user" : side == Side::kCandidate ? "candidates" : "shared";
}

/// Reads one entry of "requests".
class RequestReader {
 public:
  RequestReader(const RequestLayout& layout, const Json& json, const Json& shared)
      : layout_(layout), json_(json), file_shared_(shared) {}

  Request read(Request request) {
    if (!json_.is_object()) fail("expected an object with \"user\" and \"candidates\"");
    for (const auto& [key, value] : json_.items()) {
      static const std::set<std::string> known = {"id",     "user",      "candidates", "shared",       "count",
                                                  "labels", "baselines", "names",      "history_names"};
      if (!known.contains(key)) fail("'{}' is not a part of a request: expected {}", key, fmt::join(known, ", "));
    }
    check_unknown(Side::kRequestOnly);
    check_unknown(Side::kCandidate);
    check_unknown(Side::kShared);
    request.count = -1;
    if (json_.contains("count")) request.count = json_["count"].get<std::int64_t>();
    for (const RequestInput& input : layout_.inputs()) {
      if (input.side == Side::kIndex || input.bags == RequestInput::Bags::kOffsets) continue;
      if (input.side == Side::kCandidate && input.bags == RequestInput::Bags::kValues) {
        read_bags(input, request);
      } else {
        read_input(input, request);
      }
    }
    if (request.count < 0) fail("the model has no candidate input, so give the number of candidates as \"count\"");
    read_extras(request);
    return request;
  }

 private:
  const Json& section(Side side) const {
    static const Json kEmpty = Json::object();
    const char* name = section_name(side);
    if (json_.contains(name)) {
      if (!json_[name].is_object()) fail("\"{}\" must be an object of inputs", name);
      return json_[name];
    }
    return side == Side::kShared && file_shared_.is_object() ? file_shared_ : kEmpty;
  }

  void check_unknown(Side side) const {
    for (const auto& [key, value] : section(side).items()) {
      const auto names_it = [&](const RequestInput& input) {
        return std::find(input.accepted.begin(), input.accepted.end(), key) != input.accepted.end();
      };
      std::vector<std::string> here;
      const RequestInput* elsewhere = nullptr;
      bool found = false;
      for (const RequestInput& input : layout_.inputs()) {
        if (input.side == side && input.bags != RequestInput::Bags::kOffsets) here.push_back(input.name);
        if (!names_it(input)) continue;
        if (input.bags == RequestInput::Bags::kOffsets) {
          fail("'{}' is not given: offsets of bags follow from the lengths of their lists", input.name);
        }
        found = found || input.side == side;
        elsewhere = &input;
      }
      if (found) continue;
      if (elsewhere != nullptr && elsewhere->side != Side::kIndex) {
        fail("'{}' is given in \"{}\", but the model takes it in \"{}\"", key, section_name(side),
             section_name(elsewhere->side));
      }
      fail("the model has no input '{}' for \"{}\": it takes {}", key, section_name(side), fmt::join(here, ", "));
    }
  }

  const Json& given(const RequestInput& input) const {
    const Json* json = nullptr;
    for (const std::string& name : input.accepted) {
      if (section(input.side).contains(name)) json = &section(input.side)[name];
    }
    if (json == nullptr) fail("input '{}' is missing in \"{}\"", input.name, section_name(input.side));
    return *json;
  }

  // One list of values a candidate. All inputs of the same bags must have the same lengths.
  void read_bags(const RequestInput& input, Request& request) {
    const Json& json = given(input);
    if (!json.is_array()) fail("'{}': expected one list of values a candidate", input.name);
    const auto count = static_cast<std::int64_t>(json.size());
    if (request.count >= 0 && count != request.count) {
      fail("'{}': expected {} lists, given {}", input.name, request.count, count);
    }
    request.count = count;
    std::vector<std::int64_t> sizes = input.row;
    sizes.insert(sizes.begin(), -1);
    std::vector<std::int64_t> bounds{0};
    std::vector<at::Tensor> lists;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::string name = fmt::format("{}[{}]", input.name, i);
      lists.push_back(TensorReader(name, input.dtype, sizes).read(json[static_cast<std::size_t>(i)]));
      bounds.push_back(bounds.back() + lists.back().size(0));
    }
    for (std::int64_t& size : sizes) size = std::max<std::int64_t>(size, 0);
    if (lists.empty()) lists.push_back(at::empty(sizes, graph::scalar_type(input.dtype)));
    request.candidates[input.value] = at::cat(lists);
    const graph::JaggedInput& bags = *layout_.bags_of(input.value);
    const RequestInput& offsets = layout_.inputs()[layout_.position(bags.offsets)];
    at::Tensor made = graph::bag_offsets(bags, at::tensor(bounds, at::kLong), graph::scalar_type(offsets.dtype));
    const auto [other, added] = request.candidates.emplace(bags.offsets, made);
    if (added || at::equal(other->second, made)) return;
    fail("'{}': its lists have other lengths than those of '{}'", input.name, bags.values.front());
  }

  void read_input(const RequestInput& input, Request& request) {
    std::vector<std::int64_t> sizes = input.row;
    if (input.side == Side::kCandidate) {
      sizes.insert(sizes.begin(), request.count);
    } else if (input.bags == RequestInput::Bags::kValues) {
      sizes.insert(sizes.begin(), -1);
    }
    at::Tensor tensor = TensorReader(input.name, input.dtype, sizes).read(given(input));
    if (input.side == Side::kCandidate) {
      request.count = tensor.size(0);
      request.candidates[input.value] = std::move(tensor);
    } else if (input.side == Side::kRequestOnly) {
      request.user[input.value] = std::move(tensor);
    } else {
      request.shared[input.value] = std::move(tensor);
    }
  }

  void read_extras(Request& request) const {
    const auto numbers = [&](const Json& json, const std::string& what) {
      const at::Tensor values = TensorReader(what, graph::DType::kFloat64, {request.count}).read(json);
      return std::vector<double>(values.const_data_ptr<double>(), values.const_data_ptr<double>() + request.count);
    };
    const auto texts = [&](const Json& json, const std::string& what) {
      if (!json.is_array()) fail("'{}': expected a list of texts", what);
      std::vector<std::string> values;
      for (const Json& element : json) {
        if (!element.is_string()) fail("'{}'[{}]: expected a text, given {}", what, values.size(), element.dump());
        values.push_back(element.get<std::string>());
      }
      return values;
    };
    if (json_.contains("labels")) request.labels = numbers(json_["labels"], "labels");
    if (json_.contains("baselines")) {
      for (const auto& [name, values] : json_["baselines"].items()) {
        request.baselines[name] = numbers(values, "baselines." + name);
      }
    }
    if (json_.contains("names")) {
      request.names = texts(json_["names"], "names");
      if (static_cast<std::int64_t>(request.names.size()) != request.count) {
        fail("'names': expected {} values, given {}", request.count, request.names.size());
      }
    }
    if (json_.contains("history_names")) request.history_names = texts(json_["history_names"], "history_names");
  }

  const RequestLayout& layout_;
  const Json& json_;
  const Json& file_shared_;
};

std::string request_id(const Json& json, std::size_t position) {
  if (!json.is_object() || !json.contains("id")) return fmt::format("#{}", position);
  return json["id"].is_string() ? json["id"].get<std::string>() : json["id"].dump();
}

void add_name(std::vector<std::string>& names, const std::string& name) {
  if (!name.empty() && std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
}

}  // namespace

RequestLayout::RequestLayout(const graph::Program& program, const graph::Specification& specification)
    : jagged_(specification.jagged) {
  for (const graph::UserInput& user : graph::user_inputs(program)) {
    const auto entry = std::find_if(specification.inputs.begin(), specification.inputs.end(),
                                    [&](const graph::InputEntry& e) { return e.value == user.value; });
    if (entry == specification.inputs.end()) fail("the specification does not mention input '{}'", user.path);
    const auto meta = program.graph.tensors.find(user.value);
    if (meta == program.graph.tensors.end()) fail("the archive does not describe input '{}'", user.path);
    RequestInput input;
    input.value = user.value;
    input.name = entry->name.empty() ? user.name : entry->name;
    for (const std::string& name : {entry->name, entry->path, user.name, user.path, user.value}) {
      add_name(input.accepted, name);
    }
    for (const graph::PackedInput& packed : specification.packed) {
      if (packed.user_value == user.value || packed.candidate_value == user.value) {
        add_name(input.accepted, packed.name);
      }
    }
    input.side = entry->side;
    for (const graph::JaggedInput& bags : specification.jagged) {
      if (bags.offsets == user.value) input.bags = RequestInput::Bags::kOffsets;
      if (std::find(bags.values.begin(), bags.values.end(), user.value) != bags.values.end()) {
        input.bags = RequestInput::Bags::kValues;
      }
    }
    input.dtype = meta->second.dtype;
    const bool batched = input.side == graph::Side::kRequestOnly || input.side == graph::Side::kCandidate;
    if (batched && meta->second.sizes.empty()) fail("input '{}' has no batch axis", user.path);
    for (std::size_t d = batched ? 1 : 0; d < meta->second.sizes.size(); ++d) {
      input.row.push_back(meta->second.sizes[d].as_integer().value_or(-1));
    }
    inputs_.push_back(std::move(input));
  }
}

const graph::JaggedInput* RequestLayout::bags_of(const std::string& value) const {
  const auto found = std::find_if(jagged_.begin(), jagged_.end(), [&](const graph::JaggedInput& bags) {
    return std::find(bags.values.begin(), bags.values.end(), value) != bags.values.end();
  });
  return found == jagged_.end() ? nullptr : &*found;
}

std::size_t RequestLayout::position(const std::string& value) const {
  const auto found = std::find_if(inputs_.begin(), inputs_.end(), [&](const auto& i) { return i.value == value; });
  if (found == inputs_.end()) fail("the transformed archive has no input '{}'", value);
  return static_cast<std::size_t>(found - inputs_.begin());
}

std::vector<Request> parse_requests(const graph::Json& json, const RequestLayout& layout) {
  if (!json.is_object() || !json.contains("requests") || !json["requests"].is_array()) {
    fail("expected an object with a list \"requests\"");
  }
  static const Json kNone;
  const Json& shared = json.contains("shared") ? json["shared"] : kNone;
  std::vector<Request> requests;
  for (const Json& entry : json["requests"]) {
    Request request;
    request.id = request_id(entry, requests.size());
    try {
      requests.push_back(RequestReader(layout, entry, shared).read(request));
    } catch (const Error& error) {
      fail("request \"{}\" (number {}): {}", request.id, requests.size() + 1, error.what());
    } catch (const Json::exception& error) {
      fail("request \"{}\" (number {}): {}", request.id, requests.size() + 1, error.what());
    }
  }
  return requests;
}

std::vector<Request> read_requests(const std::filesystem::path& path, const RequestLayout& layout) {
  std::ifstream file(path);
  if (!file) fail("{}: cannot be opened", path.string());
  Json json;
  try {
    json = Json::parse(file);
  } catch (const Json::exception& error) {
    fail("{}: not JSON: {}", path.string(), error.what());
  }
  try {
    return parse_requests(json, layout);
  } catch (const Error& error) {
    fail("{}: {}", path.string(), error.what());
  }
}

}  // namespace ikbo::runtime
