// Names of a call's arguments. torch.export flattens (args, kwargs) into leaves and keeps the containers' shape as a
// JSON string, `in_spec`; the names of the arguments themselves stand in `forward_arg_names`.
#include "graph/call_spec.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "graph/error.h"

namespace ikbo::graph {
namespace {

constexpr int kProtocol = 1;        // of torch.utils._pytree.treespec_dumps
constexpr int kMaxTreeDepth = 100;  // far beyond any call; keeps recursion bounded

/// Parses JSON that stands in a string of the archive. Its depth is bounded before anything recurses over it.
Json parse_text(const std::string& text, const char* where) {
  const auto too_deep = [&](int depth, Json::parse_event_t, Json&) {
    if (depth > 3 * kMaxTreeDepth) fail("model.json: {} is nested too deep", where);
    return true;
  };
  try {
    return Json::parse(text, too_deep);
  } catch (const nlohmann::json::exception&) {
    fail("model.json: {} is no valid JSON", where);
  }
}

const Json& member(const Json& json, const char* key, const char* where) {
  const auto it = json.is_object() ? json.find(key) : json.end();
  if (!json.is_object() || it == json.end()) fail("model.json: {} has no '{}'", where, key);
  return *it;
}

/// Keys out of a JSON list; nothing where it is no list of `count` distinct strings and integers.
std::optional<std::vector<CallKey>> key_list(const Json& json, std::size_t count) {
  if (!json.is_array() || json.size() != count) return std::nullopt;
  std::vector<CallKey> keys;
  for (const Json& key : json) {
    if (key.is_string()) {
      keys.emplace_back(key.get<std::string>());
    } else if (key.is_number_integer() && !(key.is_number_unsigned() && key.get<std::uint64_t>() > INT64_MAX)) {
      keys.emplace_back(key.get<std::int64_t>());
    } else {
      return std::nullopt;
    }
  }
  if (std::set<CallKey>(keys.begin(), keys.end()).size() != count) return std::nullopt;
  return keys;
}

class TreeReader {
 public:
  explicit TreeReader(const Program& program) {
    const auto module = program.rest.is_object() ? program.rest.find("graph_module") : program.rest.end();
    if (!program.rest.is_object() || module == program.rest.end() || !module->is_object()) return;
    const auto fields = module->find("treespec_namedtuple_fields");
    if (fields != module->end() && fields->is_object()) namedtuple_fields_ = *fields;
  }

  CallTree read(const Json& json, int depth = 0) const {
    if (depth > kMaxTreeDepth) fail("model.json: in_spec is nested too deep");
    const Json& type = member(json, "type", "in_spec");
    const Json& children = member(json, "children_spec", "in_spec");
    if (!children.is_array()) fail("model.json: in_spec has children that are no list");
    CallTree tree;
    if (type.is_null()) {
      if (!children.empty()) fail("model.json: in_spec has a leaf with children");
      return tree;
    }
    if (!type.is_string()) fail("model.json: in_spec has a type that is no string");
    tree.type = type.get<std::string>();
    for (const Json& child : children) tree.children.push_back(read(child, depth + 1));
    name_children(tree, member(json, "context", "in_spec"));
    return tree;
  }

 private:
  void name_children(CallTree& tree, const Json& context) const {
    const std::size_t count = tree.children.size();
    for (std::size_t i = 0; i < count; ++i) tree.keys.emplace_back(static_cast<std::int64_t>(i));
    tree.kind = CallTree::Kind::kOther;
    if (tree.type == "builtins.tuple") {
      tree.kind = CallTree::Kind::kTuple;
      return;
    }
    if (tree.type == "builtins.list") {
      tree.kind = CallTree::Kind::kList;
      return;
    }
    if (tree.type == "collections.namedtuple") {
      const auto fields = context.is_string() ? namedtuple_fields_.find(text_of(context)) : namedtuple_fields_.end();
      if (fields == namedtuple_fields_.end() || !fields->is_object() || !fields->contains("field_names")) return;
      set_keys(tree, (*fields)["field_names"], true);
      return;
    }
    // A dict's context is its keys, as a JSON string; a defaultdict's is an object. Others write what they like: names
    // are taken where a list of the right length is found (registered dataclasses: [field names, names that are None]).
    const Json parsed = context.is_string() ? parse_text(text_of(context), "a context of in_spec") : context;
    const bool dict = tree.type == "builtins.dict" || tree.type == "collections.OrderedDict" ||
                      tree.type == "collections.defaultdict" || tree.type.ends_with("immutable_dict");
    bool named = false;
    if (parsed.is_object()) {
      if (parsed.contains("dict_context")) named = set_keys(tree, parsed["dict_context"], false);
    } else if (parsed.is_array()) {
      named = set_keys(tree, parsed, !dict);
      if (!named && !dict && !parsed.empty()) set_keys(tree, parsed.front(), true);
    }
    // A dict with keys that are neither text nor integers is one whose children are known by position alone.
    if (named && (tree.type == "builtins.dict" || tree.type == "collections.OrderedDict")) {
      tree.kind = CallTree::Kind::kDict;
    }
  }

  static std::string text_of(const Json& json) { return json.get<std::string>(); }

  static bool set_keys(CallTree& tree, const Json& names, bool attributes) {
    auto keys = key_list(names, tree.children.size());
    if (!keys) return false;
    tree.keys = std::move(*keys);
    tree.attributes = attributes;
    return true;
  }

  Json namedtuple_fields_ = Json::object();
};

/// The signature of the whole program, the entry without a name.
const Json& root_signature(const Program& program) {
  if (program.module_call_graph.is_array()) {
    for (const Json& entry : program.module_call_graph) {
      const Json& fqn = member(entry, "fqn", "module_call_graph");
      const auto signature = entry.find("signature");
      if (fqn.is_string() && fqn.get<std::string>().empty() && signature != entry.end() && signature->is_object()) {
        return *signature;
      }
    }
  }
  fail("model.json: module_call_graph does not say how the program is called");
}

Json in_spec_json(const Program& program) {
  const Json& text = member(root_signature(program), "in_spec", "module_call_graph");
  if (!text.is_string()) fail("model.json: in_spec is no string");
  Json spec = parse_text(text.get<std::string>(), "in_spec");
  if (!spec.is_array() || spec.size() != 2 || !spec[0].is_number_integer()) {
    fail("model.json: in_spec is no pair of a protocol and a tree");
  }
  if (spec[0].get<std::int64_t>() != kProtocol) {
    fail("model.json: in_spec has protocol {}, expected {}", spec[0].dump(), kProtocol);
  }
  return spec;
}

/// Names of positional and keyword arguments; empty where the archive does not tell.
std::vector<std::string> argument_names(const Program& program) {
  const Json& signature = root_signature(program);
  const auto it = signature.find("forward_arg_names");
  std::vector<std::string> names;
  if (it == signature.end() || it->is_null()) return names;
  if (!it->is_array()) fail("model.json: forward_arg_names is no list");
  for (const Json& name : *it) {
    if (!name.is_string()) fail("model.json: forward_arg_names holds something that is no string");
    names.push_back(name.get<std::string>());
  }
  return names;
}

struct Leaf {
  std::string argument;  // name of the argument it lies in
  std::string path;
  std::vector<CallKey> keys;
  bool keyword = false;
};

void append_key(std::string& path, const CallKey& key, bool attribute) {
  if (const auto* index = std::get_if<std::int64_t>(&key)) {
    path += fmt::format("[{}]", *index);
  } else if (attribute) {
    path += fmt::format(".{}", std::get<std::string>(key));
  } else {
    path += fmt::format("['{}']", std::get<std::string>(key));
  }
}

void collect(const CallTree& tree, const Leaf& here, std::vector<Leaf>& leaves) {
  if (tree.kind == CallTree::Kind::kLeaf) {
    leaves.push_back(here);
    return;
  }
  for (std::size_t i = 0; i < tree.children.size(); ++i) {
    Leaf child = here;
    child.keys.push_back(tree.keys[i]);
    append_key(child.path, tree.keys[i], tree.attributes);
    collect(tree.children[i], child, leaves);
  }
}

std::vector<Leaf> all_leaves(const Program& program) {
  const CallSpec call = call_spec(program);
  std::vector<std::string> names = argument_names(program);
  const std::size_t positional = call.args.children.size();
  const bool named = names.size() == positional + call.kwargs.children.size();
  std::vector<Leaf> leaves;
  for (std::size_t i = 0; i < positional; ++i) {
    Leaf leaf;
    leaf.argument = named ? names[i] : fmt::format("args[{}]", i);
    leaf.path = leaf.argument;
    leaf.keys.emplace_back(static_cast<std::int64_t>(i));
    collect(call.args.children[i], leaf, leaves);
  }
  for (std::size_t i = 0; i < call.kwargs.children.size(); ++i) {
    Leaf leaf;
    const auto* key = std::get_if<std::string>(&call.kwargs.keys[i]);
    if (key == nullptr) fail("model.json: in_spec has a keyword argument without a name");
    leaf.argument = *key;
    leaf.path = *key;
    leaf.keys.push_back(call.kwargs.keys[i]);
    leaf.keyword = true;
    collect(call.kwargs.children[i], leaf, leaves);
  }
  return leaves;
}

std::string key_text(const CallKey& key) {
  const auto* index = std::get_if<std::int64_t>(&key);
  return index != nullptr ? std::to_string(*index) : std::get<std::string>(key);
}

std::string plain_argument(const Leaf& leaf) {
  if (!leaf.argument.starts_with("args[")) return leaf.argument;
  return fmt::format("args_{}", key_text(leaf.keys.front()));
}

/// The last name of the path and the positions after it: x['user_id'] -> user_id, xs[0] -> xs_0, x['h'][1] -> h_1.
std::string short_name(const Leaf& leaf) {
  std::string name = plain_argument(leaf);
  for (std::size_t i = 1; i < leaf.keys.size(); ++i) {
    if (const auto* key = std::get_if<std::string>(&leaf.keys[i])) {
      name = *key;
    } else {
      name += fmt::format("_{}", key_text(leaf.keys[i]));
    }
  }
  return name;
}

std::string long_name(const Leaf& leaf) {
  std::string name = plain_argument(leaf);
  for (std::size_t i = 1; i < leaf.keys.size(); ++i) name += fmt::format("_{}", key_text(leaf.keys[i]));
  return name;
}

/// Names that occur more than once are replaced by `other`'s, which is asked with the input's place.
template <typename Other>
void make_unique(std::vector<UserInput>& inputs, Other other) {
  std::map<std::string, int> uses;
  for (const UserInput& input : inputs) ++uses[input.name];
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (uses[inputs[i].name] > 1) inputs[i].name = other(i);
  }
}

}  // namespace

CallSpec call_spec(const Program& program) {
  const Json spec = in_spec_json(program);
  CallTree tree = TreeReader(program).read(spec[1]);
  if (tree.kind != CallTree::Kind::kTuple || tree.children.size() != 2 ||
      tree.children[0].kind != CallTree::Kind::kTuple || tree.children[1].kind != CallTree::Kind::kDict) {
    fail("model.json: in_spec is no pair of a tuple of arguments and a dict of keyword arguments");
  }
  return {std::move(tree.children[0]), std::move(tree.children[1])};
}

std::vector<std::size_t> caller_inputs(const Program& program) {
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < program.input_specs.size(); ++i) {
    const InputKind kind = program.input_specs[i].kind;
    if (kind == InputKind::kUserInput || kind == InputKind::kConstantInput) places.push_back(i);
  }
  return places;
}

std::vector<UserInput> user_inputs(const Program& program) {
  const std::vector<Leaf> leaves = all_leaves(program);
  const std::vector<std::size_t> places = caller_inputs(program);
  if (leaves.size() != places.size()) {
    fail("model.json: in_spec has {} leaves, but the signature has {} inputs", leaves.size(), places.size());
  }
  std::vector<UserInput> inputs;
  std::vector<Leaf> of;
  for (std::size_t i = 0; i < places.size(); ++i) {
    const InputSpec& spec = program.input_specs[places[i]];
    const auto* tensor = std::get_if<TensorArg>(&spec.value);
    if (spec.kind != InputKind::kUserInput || tensor == nullptr) continue;  // numbers, text and None
    inputs.push_back({tensor->name, short_name(leaves[i]), leaves[i].path, leaves[i].keys, leaves[i].keyword});
    of.push_back(leaves[i]);
  }
  make_unique(inputs, [&](std::size_t i) { return long_name(of[i]); });
  make_unique(inputs, [&](std::size_t i) { return inputs[i].value; });
  make_unique(inputs, [&](std::size_t i) { return inputs[i].path; });
  return inputs;
}

void append_user_input(Program& program, const std::string& value) {
  if (!program.graph.tensors.contains(value)) fail("input '{}' has no shape in the graph", value);
  if (program.input_specs.size() != program.graph.inputs.size()) {
    fail("model.json: signature and graph disagree on inputs");
  }
  for (const Argument& input : program.graph.inputs) {
    const auto names = value_names(input);
    if (std::find(names.begin(), names.end(), value) != names.end()) fail("the graph has an input '{}' already", value);
  }
  Json spec = in_spec_json(program);
  const CallSpec call = call_spec(program);
  std::vector<std::string> names = argument_names(program);
  const bool keyword = !call.kwargs.children.empty();
  if (std::find(names.begin(), names.end(), value) != names.end()) {
    fail("the program has an argument '{}' already", value);
  }

  Json& container = spec[1]["children_spec"][keyword ? 1 : 0];
  container["children_spec"].push_back({{"type", nullptr}, {"context", nullptr}, {"children_spec", Json::array()}});
  if (keyword) {
    Json keys = parse_text(container["context"].get<std::string>(), "a context of in_spec");
    keys.push_back(value);
    container["context"] = keys.dump();
  }

  // Names may be missing; then there is nothing to extend, and the arguments stay nameless.
  const std::size_t known = call.args.children.size() + call.kwargs.children.size();
  const bool named = names.size() == known;
  names.push_back(value);
  Json& signature = const_cast<Json&>(root_signature(program));  // of a program that is not const
  signature["in_spec"] = spec.dump();
  if (named) signature["forward_arg_names"] = names;

  // Positional arguments come first and keyword arguments last, so either way the new one is the last of all.
  const std::vector<std::size_t> places = caller_inputs(program);
  const std::size_t place = places.empty() ? program.input_specs.size() : places.back() + 1;
  InputSpec input;
  input.kind = InputKind::kUserInput;
  input.value = TensorArg{value};
  program.input_specs.insert(program.input_specs.begin() + static_cast<std::ptrdiff_t>(place), std::move(input));
  program.graph.inputs.insert(program.graph.inputs.begin() + static_cast<std::ptrdiff_t>(place), TensorArg{value});
}

}  // namespace ikbo::graph
