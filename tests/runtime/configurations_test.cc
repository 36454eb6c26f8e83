#include "runtime/configurations.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <string>
#include <vector>

#include "runtime/model.h"
#include "tests/runtime/small_ranker.h"

namespace ikbo::runtime {
namespace {

using testing::message_of;
using testing::small_ranker;

// In place of the CUDA library's operator, with its schema: it notes what it is given.
std::vector<std::string> calls;

bool note(c10::Device device, const std::string& name, int64_t multiprocessors, at::ScalarType dtype, int64_t m,
          int64_t n, int64_t k_cand, at::IntArrayRef k_bcast, at::IntArrayRef candidates, at::IntArrayRef rows,
          at::IntArrayRef block_m, at::IntArrayRef cluster) {
  calls.push_back(c10::str(device, " ", name, " ", multiprocessors, " ", dtype, " ", m, " ", n, " ", k_cand, " ",
                           k_bcast, " ", candidates, " ", rows, " ", block_m, " ", cluster));
  TORCH_CHECK_VALUE(block_m.empty() || block_m[0] != 65, "there is no kernel for block_m 65");
  return name == "This";
}

TORCH_LIBRARY_FRAGMENT(ikbo, m) {
  m.def(
      "use_linear_compression_configs(Device device, str device_name, int multiprocessors, ScalarType dtype, int m, "
      "int n, int k_cand, int[] k_bcast, int[] candidates, int[] rows_bcast, int[] block_m, int[] cluster) -> bool",
      note);
}

graph::Specification specification() {
  graph::Specification spec;
  spec.configurations = {
      {"This", 132, {{"float16", 8, 64, 24, {40, 3}, {{1024, {15, 2}, 152, 2, 1, 1}, {64, {1, 1}, 64, 1, 1, 1}}}}},
      {"That", 78, {{"bfloat16", 9, 65, 0, {}, {{16, {}, 65, 1, 1, 1}}}, {"bfloat16", 1, 1, 1, {}, {}}}}};
  return spec;
}

TEST(UseConfigurations, GivesEveryShapeToTheOperator) {
  calls.clear();
  graph::Specification spec = specification();
  spec.configurations[1].linear_compression[0].points[0].block_m = 96;
  use_configurations(spec, c10::Device("cuda:1"));
  ASSERT_EQ(calls.size(), 3U);
  EXPECT_EQ(calls[0], "cuda:1 This 132 Half 8 64 24 [40, 3] [1024, 64] [15, 2, 1, 1] [152, 64] [2, 1]");
  EXPECT_EQ(calls[1], "cuda:1 That 78 BFloat16 9 65 0 [] [16] [] [96] [1]");
}

TEST(UseConfigurations, SaysWhatCannotBeUsed) {
  EXPECT_EQ(message_of([] { use_configurations(specification(), c10::Device("cuda:0")); }),
            "the configurations that the archive holds for That cannot be used: there is no kernel for block_m 65: "
            "measure them again with `ikbo tune`");
}

TEST(UseConfigurations, NothingIsUsedOnTheCpu) {
  calls.clear();
  use_configurations(specification(), c10::Device(c10::kCPU));
  auto ranker = small_ranker();
  graph::Json json = graph::Json::parse(ranker.transformed.extra_files.at(graph::Specification::kFile));
  json["configurations"] = graph::measured_to_json(specification().configurations);
  ranker.transformed.extra_files[graph::Specification::kFile] = json.dump();
  const Model model(ranker.transformed, EngineOptions{});
  EXPECT_EQ(model.specification().configurations.size(), 2U);
  EXPECT_TRUE(calls.empty());
  json["configurations"][1]["multiprocessors"] = 0;
  ranker.transformed.extra_files[graph::Specification::kFile] = json.dump();
  EXPECT_EQ(message_of([&] { const Model refused(ranker.transformed, EngineOptions{}); }),
            "the specification in the archive is damaged: configurations[1].multiprocessors is 0, expected 1 to "
            "2147483647");
}

}  // namespace
}  // namespace ikbo::runtime
