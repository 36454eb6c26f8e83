// Transforms every archive of a folder in all three modes and compares with the original on random rows and mappings.
// usage: check_programs DIR
// The archives are those of random_programs.py: float64, so that a wrong rewrite shows and rounding does not.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>

#include "graph/archive.h"
#include "graph/error.h"
#include "graph/jagged.h"
#include "runtime/engine.h"
#include "transform/transform.h"

namespace {

using ikbo::graph::Archive;
using ikbo::graph::Side;
using ikbo::transform::Mode;

constexpr std::int64_t kVocabulary = 11;
constexpr std::int64_t kPackedUserColumns = 5;
constexpr double kTolerance = 1e-9;

struct Mapping {
  const char* name;
  std::int64_t users;
  std::vector<std::int32_t> index;
};

// Even, uneven and unsorted with a user without candidates, both batches equal, one user.
const std::vector<Mapping>& mappings() {
  static const std::vector<Mapping> all{{"even", 3, {0, 0, 1, 1, 2, 2}},
                                        {"uneven", 4, {3, 0, 0, 1, 3, 3, 0}},
                                        {"equal batches", 5, {4, 2, 0, 1, 3}},
                                        {"one user", 1, {0, 0, 0}}};
  return all;
}

at::Tensor draw(const ikbo::graph::TensorMeta& meta, std::int64_t rows) {
  std::vector<std::int64_t> sizes{rows};
  for (std::size_t d = 1; d < meta.sizes.size(); ++d) sizes.push_back(*meta.sizes[d].as_integer());
  if (meta.dtype == ikbo::graph::DType::kInt64) return at::randint(0, kVocabulary, sizes, at::kLong);
  return at::randn(sizes, at::kDouble);
}

// The largest difference, relative to the largest value; infinite where finiteness or shape differs.
double difference(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return INFINITY;
  if (a.numel() == 0) return 0;
  const at::Tensor x = a.to(at::kDouble);
  const at::Tensor y = b.to(at::kDouble);
  if (!at::isfinite(x).eq(at::isfinite(y)).all().item<bool>()) return INFINITY;
  const at::Tensor d = (x - y).abs().nan_to_num(0, 0, 0);
  return d.max().item<double>() / (1.0 + x.abs().nan_to_num(0, 0, 0).max().item<double>());
}

struct Tally {
  int programs = 0;
  int comparisons = 0;
  int wrong = 0;
  int failed = 0;
  std::map<std::string, int> features;
};

// Bags of many lengths: values and offsets into `rows`, and what the original takes into `copied`.
void draw_bags(const ikbo::transform::Result& result, const Mapping& mapping, std::map<std::string, at::Tensor>& rows,
               std::map<std::string, at::Tensor>& copied) {
  const auto& graph = result.archive.program.graph;
  for (const ikbo::graph::JaggedInput& bags : result.specification.jagged) {
    const bool user = graph.tensors.at(bags.offsets).sizes[0].depends_on(result.specification.user_symbol);
    const std::int64_t count = user ? mapping.users : static_cast<std::int64_t>(mapping.index.size());
    const at::Tensor bounds = at::cat({at::zeros({1}, at::kLong), at::randint(0, 4, {count}, at::kLong).cumsum(0)});
    rows[bags.offsets] = ikbo::graph::bag_offsets(bags, bounds, at::kLong);
    ikbo::graph::JaggedRows own{{}, rows[bags.offsets]};
    for (const std::string& value : bags.values) {
      rows[value] = draw(graph.tensors.at(value), bounds[count].item<std::int64_t>());
      own.values.push_back(rows[value]);
    }
    if (!user) continue;
    const auto of_candidates = ikbo::graph::select_bags(bags, own, at::tensor(mapping.index, at::kInt).to(at::kLong));
    copied[bags.offsets] = of_candidates.offsets;
    for (std::size_t i = 0; i < bags.values.size(); ++i) copied[bags.values[i]] = of_candidates.values[i];
  }
}

bool is_user(const std::string& input) {
  return input.starts_with("user_") || input.starts_with("hist_");
}

// What the original, which takes one user's row, gives for every user and that user's candidates, put together.
std::vector<at::Tensor> once_a_user(const ikbo::runtime::Engine& engine,
                                    const std::vector<ikbo::graph::UserInput>& inputs,
                                    const std::map<std::string, at::Tensor>& rows, const Mapping& mapping) {
  std::vector<at::Tensor> outputs;
  for (std::int64_t user = 0; user < mapping.users; ++user) {
    std::vector<std::int64_t> mine;
    for (std::size_t i = 0; i < mapping.index.size(); ++i) {
      if (mapping.index[i] == user) mine.push_back(static_cast<std::int64_t>(i));
    }
    if (mine.empty()) continue;
    if (mine.size() == 1) mine.push_back(mine[0]);  // programs are exported for two rows and more
    const at::Tensor candidates = at::tensor(mine, at::kLong);
    std::vector<at::Tensor> call;
    for (const auto& input : inputs) {
      const at::Tensor& all = rows.at(input.value);
      call.push_back(is_user(input.name) ? all.narrow(0, user, 1) : all.index_select(0, candidates));
    }
    const auto part = engine.run(call);
    for (std::size_t o = 0; o < part.size(); ++o) {
      if (outputs.size() <= o) {
        std::vector<std::int64_t> sizes = part[o].sizes().vec();
        sizes[0] = static_cast<std::int64_t>(mapping.index.size());
        outputs.push_back(at::zeros(sizes, part[o].options()));
      }
      outputs[o].index_copy_(0, candidates, part[o]);
    }
  }
  return outputs;
}

// The program in all modes; nothing where every one of them refuses it, as they may a program that spreads rows itself.
std::vector<ikbo::transform::Result> transformed(const Archive& original, ikbo::transform::Options options,
                                                 bool spreads) {
  std::vector<ikbo::transform::Result> results;
  std::string refused;
  for (const Mode mode : {Mode::kIkbo, Mode::kSplit, Mode::kBroadcast}) {
    options.mode = mode;
    try {
      results.push_back(ikbo::transform::transform(original, options));
    } catch (const ikbo::Error& error) {
      if (!spreads || std::string(error.what()).find("internal error") != std::string::npos) throw;
      refused = fmt::format("mode {}: {}", ikbo::transform::mode_name(mode), error.what());
    }
  }
  if (!refused.empty() && !results.empty()) ikbo::fail("another mode takes what is refused in {}", refused);
  return results;
}

void check(const std::filesystem::path& path, Tally& tally) {
  const Archive original = ikbo::graph::read_archive(path);
  const auto inputs = ikbo::graph::user_inputs(original.program);
  const bool packed = inputs.size() == 1;
  const auto reference = ikbo::runtime::make_eager_engine(original, {});
  const bool looked_up = std::any_of(inputs.begin(), inputs.end(), [](const auto& i) { return i.name == "owner"; });
  const bool single = std::any_of(inputs.begin(), inputs.end(), [&](const auto& i) {
    return is_user(i.name) && original.program.graph.tensors.at(i.value).sizes[0].is_integer(1);
  });
  ++tally.programs;
  ikbo::transform::Options options;
  options.request_only = {packed ? fmt::format("X[:,0:{}]", kPackedUserColumns) : std::string("user_*,hist_*")};
  if (looked_up) options.index = "owner";
  const auto results = transformed(original, options, single || looked_up);
  if (results.empty()) ++tally.features["refused"];
  for (const auto& result : results) {
    const std::string mode = result.specification.mode;
    if (mode == "ikbo") {
      for (const char* name : {"linear", "linear_compression", "target_attention"}) {
        const auto& operators = result.specification.operators;
        const bool used = std::any_of(operators.begin(), operators.end(), [&](const auto& o) {
          return o.target == fmt::format("torch.ops.ikbo.{}.default", name);
        });
        tally.features[fmt::format("with ikbo::{}", name)] += used ? 1 : 0;
      }
      tally.features["with a broadcast"] += result.report.broadcasts > 0 ? 1 : 0;
      tally.features["bags of many lengths"] += result.specification.jagged.empty() ? 0 : 1;
      tally.features["packed"] += packed ? 1 : 0;
      tally.features["that spread rows"] += single || looked_up ? 1 : 0;
    }
    const auto engine = ikbo::runtime::make_eager_engine(result.archive, {});
    const auto new_inputs = ikbo::graph::user_inputs(result.archive.program);
    for (const Mapping& mapping : mappings()) {
      const at::Tensor index = at::tensor(mapping.index, at::kInt);
      const auto candidates = static_cast<std::int64_t>(mapping.index.size());
      std::map<std::string, at::Tensor> rows;  // of the new program, by value
      for (std::size_t i = 0; i < new_inputs.size(); ++i) {
        const auto& entry = result.specification.inputs[i];
        const auto& meta = result.archive.program.graph.tensors.at(entry.value);
        rows[entry.value] = entry.side == Side::kIndex
                                ? index.to(ikbo::graph::scalar_type(meta.dtype))
                                : draw(meta, entry.side == Side::kRequestOnly ? mapping.users : candidates);
      }
      std::map<std::string, at::Tensor> copied;
      draw_bags(result, mapping, rows, copied);
      std::vector<at::Tensor> old_rows;
      for (const auto& input : inputs) {
        if (packed) {
          const auto& p = result.specification.packed.at(0);
          old_rows.push_back(at::cat({rows.at(p.user_value).index_select(0, index), rows.at(p.candidate_value)}, 1));
          continue;
        }
        at::Tensor own = copied.contains(input.value) ? copied.at(input.value) : rows.at(input.value);
        if (copied.contains(input.value)) {
          // has each candidate's bag already
        } else if (is_user(input.name) && !looked_up) {
          own = own.index_select(0, index);
        } else if (is_user(input.name) && mapping.users == 1) {
          own = at::cat({own, own});  // a squeeze would drop a single row's dimension
        }
        old_rows.push_back(std::move(own));
      }
      std::vector<at::Tensor> new_rows;
      for (const auto& input : new_inputs) new_rows.push_back(rows.at(input.value));
      const auto expected = single ? once_a_user(*reference, inputs, rows, mapping) : reference->run(old_rows);
      const auto given = engine->run(new_rows);
      ++tally.comparisons;
      for (std::size_t o = 0; o < expected.size(); ++o) {
        const double d = o < given.size() ? difference(expected[o], given[o]) : INFINITY;
        if (d > kTolerance) {
          ++tally.wrong;
          std::printf("WRONG %s mode %s mapping '%s' output %zu: difference %.3g\n", path.filename().c_str(),
                      mode.c_str(), mapping.name, o, d);
        }
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: check_programs DIR\n");
    return 2;
  }
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
    if (entry.path().extension() == ".pt2") paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  Tally tally;
  for (const auto& path : paths) {
    try {
      check(path, tally);
    } catch (const std::exception& e) {
      ++tally.failed;
      std::printf("FAILED %s: %s\n", path.filename().c_str(), e.what());
    }
    if (tally.programs % 100 == 0) std::fprintf(stderr, "%d of %zu programs\n", tally.programs, paths.size());
  }
  for (const auto& [name, count] : tally.features) std::printf("%-30s %d\n", name.c_str(), count);
  std::printf("%d programs, %d comparisons, %d wrong, %d failed\n", tally.programs, tally.comparisons, tally.wrong,
              tally.failed);
  return tally.programs > 0 && tally.wrong == 0 && tally.failed == 0 ? 0 : 1;
}
