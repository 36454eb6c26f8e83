#include "runtime/requests.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "runtime/model.h"
#include "tests/runtime/small_ranker.h"

namespace ikbo::runtime {
namespace {

using graph::Json;
using testing::message_of;
using testing::small_ranker;

Json valid() {
  return Json::parse(R"({"requests": [
    {"id": "a", "user": {"user_id": 3}, "candidates": {"item": [1, 2, 8], "price": [0.5, 1, -2]}},
    {"id": "none", "user": {"user_id": 0}, "candidates": {"item": [], "price": []}},
    {"user": {"user_id": 5}, "candidates": {"item": [4], "price": [0.25]}, "labels": [1], "names": ["x"],
     "baselines": {"popularity": [7]}, "history_names": ["h1", "h2"]}]})");
}

class Requests : public ::testing::Test {
 protected:
  testing::SmallRanker ranker_ = small_ranker();
  Model model_{ranker_.transformed, EngineOptions{}};

  std::string parse_message(const Json& json) {
    return message_of([&] { parse_requests(json, model_.layout()); });
  }
};

TEST_F(Requests, JoinsAndSplitsInOrder) {
  const std::vector<Request> requests = parse_requests(valid(), model_.layout());
  ASSERT_EQ(requests.size(), 3U);
  EXPECT_EQ(requests[2].id, "#2");
  EXPECT_EQ(requests[2].baselines.at("popularity"), std::vector<double>{7});
  const Batch batch = join_requests(model_.layout(), requests);
  EXPECT_EQ(batch.users, 2);  // the request without candidates needs no row
  EXPECT_EQ(batch.offsets, (std::vector<std::int64_t>{0, 3, 3, 4}));
  EXPECT_TRUE(at::equal(batch.inputs[0], at::tensor({3, 5}, at::kLong)));
  EXPECT_TRUE(at::equal(batch.inputs[1], at::tensor({1, 2, 8, 4}, at::kLong)));
  EXPECT_TRUE(at::equal(batch.inputs[3], at::tensor({0, 0, 0, 1}, at::kInt)));
  const std::vector<Scores> together = model_.score(requests);
  ASSERT_EQ(together.size(), 3U);
  EXPECT_EQ(together[1].outputs[0].numel(), 0);
  for (std::size_t i : {0U, 2U}) {
    const Scores alone = model_.score(std::span(requests).subspan(i, 1))[0];
    EXPECT_TRUE(at::equal(together[i].outputs[0], alone.outputs[0])) << i;
  }
}

TEST_F(Requests, TheOriginalGetsRepeatedRows) {
  const std::vector<Request> requests = parse_requests(valid(), model_.layout());
  const Batch batch = join_requests(model_.layout(), requests);
  const auto inputs =
      original_calls(ranker_.original.program, model_.specification(), model_.layout(), batch.inputs).at(0).inputs;
  ASSERT_EQ(inputs.size(), 3U);
  EXPECT_TRUE(at::equal(inputs[0], at::tensor({3, 3, 3, 5}, at::kLong)));
  EXPECT_TRUE(at::equal(inputs[1], batch.inputs[1]));
}

TEST_F(Requests, NoRequestHasCandidates) {
  Json json = valid();
  json["requests"].erase(2);
  json["requests"].erase(0);
  const auto scores = model_.score(parse_requests(json, model_.layout()));
  ASSERT_EQ(scores.size(), 1U);
  EXPECT_EQ(scores[0].outputs.at(0).sizes(), at::IntArrayRef({0}));
}

TEST_F(Requests, WhatIsWrongIsNamed) {
  struct Case {
    const char* pointer;
    Json value;
    std::vector<std::string> parts;
  };
  const Case cases[] = {
      {"/requests/0/user", Json::object(), {"\"a\"", "'user_id' is missing in \"user\""}},
      {"/requests/0/user/shoe_size", 43, {"'shoe_size'", "user_id"}},
      {"/requests/0/user/price", 3, {"'price'", "\"candidates\""}},
      {"/requests/0/user/user_id", Json{1, 2}, {"'user_id'", "one value"}},
      {"/requests/0/user/user_id", "anna", {"'user_id'", "integer", "anna"}},
      {"/requests/0/user/user_id", 1.5, {"'user_id'", "integer", "1.5"}},
      {"/requests/0/user/user_id", nullptr, {"'user_id'", "null"}},
      {"/requests/0/user/user_id", 18446744073709551615U, {"'user_id'", "does not fit int64"}},
      {"/requests/0/candidates/item", Json{1, 2}, {"'price'", "expected 2", "given 3"}},
      {"/requests/0/candidates/item", 3, {"'item'", "list"}},
      {"/requests/0/candidates/item/1", Json{1}, {"'item'[1]", "one value"}},
      {"/requests/0/candidates/price/2", "x", {"'price'[2]", "number"}},
      {"/requests/0/candidates/price/2", 1e300, {"'price'[2]", "float32"}},
      {"/requests/2/labels", Json{1, 0}, {"\"#2\"", "(number 3)", "'labels'", "expected 1"}},
      {"/requests/2/names", Json{"x", "y"}, {"'names'", "expected 1"}},
      {"/requests/2/labells", Json{1}, {"'labells'", "labels"}},
  };
  for (const Case& c : cases) {
    Json json = valid();
    json[Json::json_pointer(c.pointer)] = c.value;
    const std::string text = parse_message(json);
    ASSERT_NE(text, "") << c.pointer;
    for (const std::string& part : c.parts) EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
  }
  EXPECT_EQ(parse_message(valid()), "");
  EXPECT_NE(parse_message(Json::array()), "");
}

TEST_F(Requests, IdsOutsideTheirTableAreNamedBeforeAnythingRuns) {
  Json json = valid();
  json["requests"][0]["candidates"]["item"][2] = 9;
  std::string text = message_of([&] { model_.score(parse_requests(json, model_.layout())); });
  EXPECT_EQ(text, "request \"a\": input 'item'[2] is 9, but item_table takes 0 to 8");
  json = valid();
  json["requests"][2]["user"]["user_id"] = -1;
  text = message_of([&] { model_.score(parse_requests(json, model_.layout())); });
  EXPECT_EQ(text, "request \"#2\": input 'user_id' is -1, but user_table takes 0 to 5");
}

TEST_F(Requests, MoreThanTheArchiveAllows) {
  Json json = valid();
  for (int i = 0; i < 1000; ++i) {
    json["requests"][0]["candidates"]["item"].push_back(1);
    json["requests"][0]["candidates"]["price"].push_back(1);
  }
  const std::string text = message_of([&] { model_.score(parse_requests(json, model_.layout())); });
  EXPECT_NE(text.find("1004 candidates"), std::string::npos) << text;
  EXPECT_NE(text.find("1000"), std::string::npos) << text;
}

TEST_F(Requests, ConcurrentScoresAreTheSameBits) {
  const std::vector<Request> requests = parse_requests(valid(), model_.layout());
  const std::vector<Scores> expected = model_.score(requests);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) {
        const std::vector<Scores> scores = model_.score(requests);
        for (std::size_t r = 0; r < scores.size(); ++r) {
          wrong += at::equal(scores[r].outputs[0], expected[r].outputs[0]) ? 0 : 1;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(CandidateToUser, WrongIndexIsNamed) {
  check_candidate_to_user(at::tensor({0, 2, 1}, at::kInt), 3);
  EXPECT_EQ(message_of([] {
              check_candidate_to_user(at::tensor({0, 3, 1}, at::kInt), 3);
            }),
            "candidate_to_user[1] is 3, expected 0 to 2");
  EXPECT_EQ(message_of([] {
              check_candidate_to_user(at::tensor({0, 2, -1}, at::kInt), 3);
            }),
            "candidate_to_user[2] is -1, expected 0 to 2");
}

}  // namespace
}  // namespace ikbo::runtime
