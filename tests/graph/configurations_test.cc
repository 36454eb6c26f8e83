#include "graph/configurations.h"

#include <gtest/gtest.h>

#include "graph/error.h"
#include "graph/specification.h"

namespace ikbo::graph {
namespace {

std::vector<MeasuredDevice> example() {
  return {{"NVIDIA H200",
           132,
           {{"bfloat16", 433, 256, 866, {1178, 20}, {{1024, {15, 3}, 152, 2, 340.5, 351}, {64, {1, 0}, 64, 1, 25, 25}}},
            {"float16", 8, 64, 0, {}, {{16, {}, 64, 1, 5, 6}}}}},
          {"NVIDIA H100 80GB HBM3", 114, {}}};
}

/// What is said of the example with one of its members changed; "" where it is read.
std::string refusal(const char* pointer, const Json& value) {
  Json json = measured_to_json(example());
  const Json::json_pointer place(pointer);
  if (value.is_discarded()) {
    json[place.parent_pointer()].erase(place.back());
  } else {
    json[place] = value;
  }
  try {
    measured_from_json(json);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

const Json kRemoved(Json::value_t::discarded);

TEST(Configurations, AreReadAsTheyWereWritten) {
  const Json json = measured_to_json(example());
  const auto read = measured_from_json(Json::parse(json.dump()));
  EXPECT_EQ(measured_to_json(read), json);
  ASSERT_EQ(read.size(), 2U);
  EXPECT_EQ(read[0].device, "NVIDIA H200");
  EXPECT_EQ(read[0].multiprocessors, 132);
  ASSERT_EQ(read[0].linear_compression.size(), 2U);
  const MeasuredCompression& shape = read[0].linear_compression[0];
  EXPECT_TRUE(shape.same_shape(example()[0].linear_compression[0]));
  EXPECT_FALSE(shape.same_shape(read[0].linear_compression[1]));
  ASSERT_EQ(shape.points.size(), 2U);
  EXPECT_EQ(shape.points[0].candidates, 1024);
  EXPECT_EQ(shape.points[0].rows, (std::vector<std::int64_t>{15, 3}));
  EXPECT_EQ(shape.points[0].block_m, 152);
  EXPECT_EQ(shape.points[0].cluster, 2);
  EXPECT_EQ(shape.points[0].microseconds, 340.5);
  EXPECT_EQ(shape.points[0].by_model_microseconds, 351);
}

TEST(Configurations, WhatALaterVersionAddsIsLeftOut) {
  EXPECT_EQ(refusal("/0/driver", "580"), "");
  EXPECT_EQ(refusal("/0/target_attention", Json::array({1})), "");
  EXPECT_EQ(refusal("/0/linear_compression/0/points/0/watts", 700), "");
}

TEST(Configurations, WhatIsDamagedIsNamed) {
  EXPECT_EQ(refusal("/0/device", kRemoved), "configurations[0] has no 'device'");
  EXPECT_EQ(refusal("/0/multiprocessors", 0), "configurations[0].multiprocessors is 0, expected 1 to 2147483647");
  EXPECT_EQ(refusal("/1/linear_compression", 3), "configurations[1].linear_compression is number, expected a list");
  EXPECT_EQ(refusal("/1", nullptr), "configurations[1] is null, expected an object");
  const std::string shape = "/0/linear_compression/0";
  const std::string named = "configurations[0].linear_compression[0]";
  EXPECT_EQ(refusal((shape + "/dtype").c_str(), "float32"),
            named + ".dtype is 'float32', expected bfloat16 or float16");
  EXPECT_EQ(refusal((shape + "/m").c_str(), 433.5), named + ".m is number, expected an integer");
  EXPECT_EQ(refusal((shape + "/n").c_str(), 0), named + ".n is 0, expected 1 to 2147483647");
  EXPECT_EQ(refusal((shape + "/k_broadcast/1").c_str(), -1), named + ".k_broadcast[1] is -1, expected 0 to 2147483647");
  EXPECT_EQ(refusal((shape + "/points/1/block_m").c_str(), "64"),
            named + ".points[1].block_m is string, expected an integer");
  EXPECT_EQ(refusal((shape + "/points/1/cluster").c_str(), 18446744073709551615ULL),
            named + ".points[1].cluster is 18446744073709551615, expected 1 to 2147483647");
  EXPECT_EQ(refusal((shape + "/points/1/rows").c_str(), Json::array({1})),
            named + ".points[1].rows has 1 numbers for 2 broadcast terms");
  EXPECT_EQ(refusal((shape + "/points/1/us").c_str(), -1), named + ".points[1].us is -1, expected a time");
  EXPECT_EQ(refusal((shape + "/points/1/candidates").c_str(), kRemoved), named + ".points[1] has no 'candidates'");
}

TEST(Configurations, LieInTheSpecification) {
  Specification specification;
  specification.mode = "ikbo";
  EXPECT_FALSE(specification_to_json(specification).contains("configurations"));
  specification.configurations = example();
  Json json = specification_to_json(specification);
  EXPECT_EQ(specification_to_json(specification_from_json(json)), json);
  json["configurations"][0]["multiprocessors"] = "many";
  try {
    specification_from_json(json);
    FAIL() << "it was read";
  } catch (const Error& error) {
    EXPECT_STREQ(
        error.what(),
        "the specification in the archive is damaged: configurations[0].multiprocessors is string, expected an "
        "integer");
  }
}

}  // namespace
}  // namespace ikbo::graph
