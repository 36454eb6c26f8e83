#include "graph/call_spec.h"

#include <gtest/gtest.h>

#include <functional>

#include "graph/error.h"
#include "small_archive.h"

namespace ikbo::graph {
namespace {

Json leaf() {
  return {{"type", nullptr}, {"context", nullptr}, {"children_spec", Json::array()}};
}
Json container(const std::string& type, const Json& context, std::vector<Json> children) {
  return {{"type", type}, {"context", context}, {"children_spec", std::move(children)}};
}
Json tuple(std::vector<Json> children) {
  return container("builtins.tuple", "null", std::move(children));
}
Json list(std::vector<Json> children) {
  return container("builtins.list", "null", std::move(children));
}
Json dict(const Json& keys, std::vector<Json> children) {
  return container("builtins.dict", keys.dump(), std::move(children));
}

/// The small program, called in another way: every leaf is a tensor x0, x1, ... of the same shape.
Program called(const Json& args, const Json& kwargs, const Json& names) {
  Program program = parse_program(testing::small_model());
  const Json spec = Json::array({1, tuple({args, kwargs})});
  program.module_call_graph[0]["signature"]["in_spec"] = spec.dump();
  program.module_call_graph[0]["signature"]["forward_arg_names"] = names;
  std::size_t leaves = 0;
  const std::function<void(const Json&)> count = [&](const Json& tree) {
    if (tree["type"].is_null()) ++leaves;
    for (const Json& child : tree["children_spec"]) count(child);
  };
  count(args);
  count(kwargs);
  program.input_specs.pop_back();
  program.graph.inputs.pop_back();
  for (std::size_t i = 0; i < leaves; ++i) {
    const std::string name = "x" + std::to_string(i);
    program.graph.tensors[name] = program.graph.tensors["x"];
    program.graph.inputs.emplace_back(TensorArg{name});
    InputSpec input;
    input.value = TensorArg{name};
    program.input_specs.push_back(input);
  }
  return program;
}

std::vector<std::string> names(const Program& program) {
  std::vector<std::string> result;
  for (const UserInput& input : user_inputs(program)) result.push_back(input.name);
  return result;
}
std::vector<std::string> paths(const Program& program) {
  std::vector<std::string> result;
  for (const UserInput& input : user_inputs(program)) result.push_back(input.path);
  return result;
}
using Names = std::vector<std::string>;

TEST(UserInputs, PlainArguments) {
  const Program program = called(tuple({leaf(), leaf()}), dict(Json::array(), {}), {"ids", "ages"});
  EXPECT_EQ(names(program), (Names{"ids", "ages"}));
  EXPECT_EQ(paths(program), (Names{"ids", "ages"}));
  const auto inputs = user_inputs(program);
  EXPECT_EQ(inputs[1].value, "x1");
  EXPECT_EQ(inputs[1].keys, (std::vector<CallKey>{std::int64_t{1}}));
  EXPECT_FALSE(inputs[1].keyword);
}

TEST(UserInputs, DictsAndKeywords) {
  const Program program = called(tuple({dict({"user_id", "item_id"}, {leaf(), leaf()})}),
                                 dict({"mask", "more"}, {leaf(), dict({"a"}, {leaf()})}), {"x", "mask", "more"});
  EXPECT_EQ(names(program), (Names{"user_id", "item_id", "mask", "a"}));
  EXPECT_EQ(paths(program), (Names{"x['user_id']", "x['item_id']", "mask", "more['a']"}));
  const auto inputs = user_inputs(program);
  EXPECT_EQ(inputs[0].keys, (std::vector<CallKey>{std::int64_t{0}, "user_id"}));
  EXPECT_EQ(inputs[3].keys, (std::vector<CallKey>{"more", "a"}));
  EXPECT_TRUE(inputs[3].keyword);
}

TEST(UserInputs, NestedLists) {
  const Program program =
      called(tuple({list({leaf(), tuple({leaf(), leaf()})}), dict({"h"}, {list({leaf(), leaf()})})}),
             dict(Json::array(), {}), {"xs", "d"});
  EXPECT_EQ(names(program), (Names{"xs_0", "xs_1_0", "xs_1_1", "h_0", "h_1"}));
  EXPECT_EQ(paths(program), (Names{"xs[0]", "xs[1][0]", "xs[1][1]", "d['h'][0]", "d['h'][1]"}));
}

TEST(UserInputs, NamesThatCollideAreLengthened) {
  const Program program = called(tuple({dict({"id", "age"}, {leaf(), leaf()}), dict({"id"}, {leaf()})}),
                                 dict(Json::array(), {}), {"user", "item"});
  EXPECT_EQ(names(program), (Names{"user_id", "age", "item_id"}));
  const Program worse =
      called(tuple({dict({"b_c"}, {leaf()}), dict({"c"}, {dict({"b_c"}, {leaf()})}), dict({"c_b_c"}, {leaf()})}),
             dict(Json::array(), {}), {"a", "a_c", "a"});
  const Names unique = names(worse);
  EXPECT_EQ(std::set<std::string>(unique.begin(), unique.end()).size(), 3);
}

TEST(UserInputs, OtherContainers) {
  Program program = called(
      tuple({container("collections.OrderedDict", "[\"a\", 7]", {leaf(), leaf()}),
             container(
                 "collections.defaultdict",
                 {{"default_factory_module", "builtins"}, {"default_factory_name", "list"}, {"dict_context", {"b"}}},
                 {leaf()}),
             container("collections.namedtuple", "my.Pair", {leaf(), leaf()}),
             container("collections.namedtuple", "my.Unknown", {leaf()}),
             container("my.Config", "[[\"f\", \"g\"], [\"absent\"]]", {leaf(), leaf()}),
             container("my.Strange", "{\"what\": 1}", {leaf(), leaf()}), dict({1.5}, {leaf()})}),
      dict(Json::array(), {}), {"o", "d", "n", "u", "c", "s", "w"});
  program.rest["graph_module"]["treespec_namedtuple_fields"] = {{"my.Pair", {{"field_names", {"l", "r"}}}}};
  EXPECT_EQ(paths(program),
            (Names{"o['a']", "o[7]", "d['b']", "n.l", "n.r", "u[0]", "c.f", "c.g", "s[0]", "s[1]", "w[0]"}));
  EXPECT_EQ(names(program), (Names{"a", "o_7", "b", "l", "r", "u_0", "f", "g", "s_0", "s_1", "w_0"}));
}

TEST(UserInputs, WithoutArgumentNames) {
  const Program program = called(tuple({leaf(), list({leaf()})}), dict({"k"}, {leaf()}), nullptr);
  EXPECT_EQ(paths(program), (Names{"args[0]", "args[1][0]", "k"}));
  EXPECT_EQ(names(program), (Names{"args_0", "args_1_0", "k"}));
}

TEST(UserInputs, ConstantsKeepTheirPlace) {
  Program program = called(tuple({leaf(), leaf(), leaf()}), dict(Json::array(), {}), {"a", "n", "b"});
  program.input_specs[2].kind = InputKind::kConstantInput;
  program.input_specs[2].value = NoneArg{};
  program.graph.inputs[2] = NoneArg{};
  EXPECT_EQ(names(program), (Names{"a", "b"}));
  EXPECT_EQ(user_inputs(program)[1].value, "x2");
  EXPECT_EQ(user_inputs(program)[1].keys, (std::vector<CallKey>{std::int64_t{2}}));
}

TEST(UserInputs, DamagedSpecs) {
  const auto refused = [](const std::function<void(Json&)>& change) {
    Program program = parse_program(testing::small_model());
    change(program.module_call_graph);
    try {
      user_inputs(program);
    } catch (const Error&) {
      return true;
    }
    return false;
  };
  EXPECT_TRUE(refused([](Json& g) { g = Json::array(); }));
  EXPECT_TRUE(refused([](Json& g) { g[0]["signature"] = nullptr; }));
  EXPECT_TRUE(refused([](Json& g) { g[0]["signature"].erase("in_spec"); }));
  for (const char* text : {"", "[1]", "[2, {}]", "[1, {}]", "[1, 7]", "7",
                           "[1, {\"type\": null, \"context\": null, \"children_spec\": []}]"}) {
    EXPECT_TRUE(refused([&](Json& g) { g[0]["signature"]["in_spec"] = text; })) << text;
  }
  EXPECT_TRUE(refused([](Json& g) { g[0]["signature"]["in_spec"] = "[1, " + std::string(100000, '['); }));
  Json deep = leaf();
  for (int i = 0; i < 200; ++i) deep = list({deep});
  const Json spec = Json::array({1, tuple({tuple({deep}), dict(Json::array(), {})})});
  EXPECT_TRUE(refused([&](Json& g) { g[0]["signature"]["in_spec"] = spec.dump(); }));
  const Json more = Json::array({1, tuple({tuple({leaf(), leaf()}), dict(Json::array(), {})})});
  EXPECT_TRUE(refused([&](Json& g) { g[0]["signature"]["in_spec"] = more.dump(); }));
}

TEST(AppendUserInput, AmongPositionalArguments) {
  Program program = called(tuple({dict({"a"}, {leaf()}), leaf()}), dict(Json::array(), {}), {"x", "y"});
  program.graph.tensors["index"] = program.graph.tensors["x"];
  append_user_input(program, "index");
  EXPECT_EQ(paths(program), (Names{"x['a']", "y", "index"}));
  EXPECT_EQ(user_inputs(program).back().value, "index");
  EXPECT_EQ(user_inputs(program).back().keys, (std::vector<CallKey>{std::int64_t{2}}));
  EXPECT_EQ(program.graph.inputs.back(), Argument(TensorArg{"index"}));
  EXPECT_EQ(program.input_specs.size(), program.graph.inputs.size());
  EXPECT_THROW(append_user_input(program, "index"), Error);
  EXPECT_THROW(append_user_input(program, "unknown"), Error);
}

TEST(AppendUserInput, AmongKeywordArguments) {
  Program program = called(tuple({leaf()}), dict({"k"}, {leaf()}), {"x", "k"});
  program.graph.tensors["index"] = program.graph.tensors["x"];
  append_user_input(program, "index");
  EXPECT_EQ(paths(program), (Names{"x", "k", "index"}));
  EXPECT_TRUE(user_inputs(program).back().keyword);
  EXPECT_EQ(program.module_call_graph[0]["signature"]["forward_arg_names"], Json({"x", "k", "index"}));
}

TEST(AppendUserInput, NameTakenByAnArgument) {
  Program program = called(tuple({leaf()}), dict(Json::array(), {}), {"index"});
  program.graph.tensors["index"] = program.graph.tensors["x"];
  EXPECT_THROW(append_user_input(program, "index"), Error);
}

TEST(AppendUserInput, BeforeInputsOfOtherKinds) {
  Program program = called(tuple({leaf()}), dict(Json::array(), {}), {"x"});
  InputSpec token;
  token.kind = InputKind::kToken;
  token.value = NoneArg{};
  program.input_specs.push_back(token);
  program.graph.inputs.emplace_back(NoneArg{});
  program.graph.tensors["index"] = program.graph.tensors["x"];
  append_user_input(program, "index");
  EXPECT_EQ(program.graph.inputs[2], Argument(TensorArg{"index"}));
  EXPECT_EQ(program.input_specs[3].kind, InputKind::kToken);
}

}  // namespace
}  // namespace ikbo::graph
