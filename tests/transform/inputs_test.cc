#include "transform/inputs.h"

#include <gtest/gtest.h>

#include "graph/error.h"

namespace ikbo::transform {
namespace {

struct Fixture {
  graph::Program program;
  std::vector<graph::UserInput> inputs;

  void add(const std::string& name, std::vector<graph::Expr> sizes) {
    graph::TensorMeta meta;
    meta.sizes = std::move(sizes);
    program.graph.tensors.emplace("x_" + name, meta);
    graph::UserInput input;
    input.value = "x_" + name;
    input.name = name;
    input.path = "x['" + name + "']";
    inputs.push_back(input);
  }
};

Fixture ranker() {
  const graph::Expr batch = graph::Expr::symbol("s0");
  Fixture f;
  f.add("user_id", {batch});
  f.add("user_age", {batch});
  f.add("hist", {batch, 50});
  f.add("item", {batch});
  f.add("X", {batch, 40});
  return f;
}

RequestOnly select(std::vector<std::string> patterns) {
  const Fixture f = ranker();
  return select_request_only(f.program, f.inputs, patterns);
}

std::string message(std::vector<std::string> patterns) {
  try {
    select(std::move(patterns));
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST(SelectRequestOnly, NamesPatternsPathsAndValues) {
  EXPECT_EQ(select({"user_*,hist"}).whole.size(), 3U);
  EXPECT_EQ(select({"user_*", "hist"}).whole.size(), 3U);
  EXPECT_TRUE(select({"x['user_id']"}).whole.contains("x_user_id"));
  EXPECT_TRUE(select({"x_user_id"}).whole.contains("x_user_id"));
  EXPECT_EQ(select({" user_id , hist "}).whole.size(), 2U);
}

TEST(SelectRequestOnly, ColumnRanges) {
  const auto r = select({"X[:,20:30],X[:,0:3],X[:,7]"});
  const std::vector<std::pair<std::int64_t, std::int64_t>> expected{{0, 3}, {7, 8}, {20, 30}};
  EXPECT_EQ(r.columns.at("x_X"), expected);
  EXPECT_TRUE(r.whole.empty());
  EXPECT_TRUE(select({"X[:,0:25],X[:,25:40]"}).whole.contains("x_X")) << "all columns are the whole input";
}

TEST(SelectRequestOnly, WhatMatchesNothingListsTheInputs) {
  const std::string text = message({"userid"});
  EXPECT_NE(text.find("'userid' matches no input"), std::string::npos) << text;
  for (const char* name : {"user_id", "user_age", "hist", "item", "X"}) EXPECT_NE(text.find(name), std::string::npos);
  EXPECT_NE(message({}).find("no input is marked request-only"), std::string::npos);
}

TEST(SelectRequestOnly, BadColumnRanges) {
  EXPECT_NE(message({"X[:,30:50]"}).find("columns 0 to 39"), std::string::npos);
  EXPECT_NE(message({"X[:,5:5]"}).find("columns 0 to 39"), std::string::npos);
  EXPECT_NE(message({"X[:,a:b]"}).find("X[:,from:to]"), std::string::npos);
  EXPECT_NE(message({"user_id[:,0:2]"}).find("needs a matrix"), std::string::npos);
  EXPECT_NE(message({"X[:,0:5],X[:,4:9]"}).find("columns 4 to 4 of 'X' twice"), std::string::npos);
  EXPECT_NE(message({"X,X[:,0:5]"}).find("twice"), std::string::npos);
}

}  // namespace
}  // namespace ikbo::transform
