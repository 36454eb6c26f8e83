// `ikbo bench lce` and `ikbo tune lce`: the kernels of linear compression on this machine's GPU. What measures is a
// program of its own, `lce_bench`, which is built with the kernels' checks and needs no PyTorch.
#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/lce_bench.h"
#include "graph/error.h"

namespace ikbo::cli {
namespace {

struct LceCommand {
  std::string cases = "main";
  std::string stage;
  std::string type = "both";
  int64_t batch = 1024, m = 433, n = 256, k_user = 1178, k_candidate = 866, ratio = 70;
  int rounds = 15;
  std::string output;
};

// Does not return unless it fails: the program takes this one's place, with its output and its exit code.
int run(const LceCommand& command) {
  const std::filesystem::path program = find_lce_bench();
  std::vector<std::string> arguments = {program.string(), "--cases", command.cases, "--type", command.type};
  const auto add = [&](const char* name, const std::string& value) {
    if (!value.empty()) arguments.insert(arguments.end(), {name, value});
  };
  add("--batch", std::to_string(command.batch));
  add("--ratio", std::to_string(command.ratio));
  add("--m", std::to_string(command.m));
  add("--n", std::to_string(command.n));
  add("--k-user", std::to_string(command.k_user));
  add("--k-cand", std::to_string(command.k_candidate));
  add("--rounds", std::to_string(command.rounds));
  add("--stage", command.stage);
  add("--json", command.output);
  std::vector<char*> raw;
  for (std::string& argument : arguments) raw.push_back(argument.data());
  raw.push_back(nullptr);
  std::cout.flush();
  execv(program.c_str(), raw.data());
  fail("cannot run {}: {}", program.string(), std::error_code(errno, std::generic_category()).message());
}

void add_shape(CLI::App& sub, LceCommand& command) {
  const auto size = [&](const char* name, int64_t& value, const char* what) {
    sub.add_option(name, value, what)->check(CLI::PositiveNumber)->capture_default_str();
  };
  size("--batch", command.batch, "Candidates");
  size("--ratio", command.ratio, "Candidates of each user");
  size("-m,--m", command.m, "Rows of W: embeddings that come out");
  size("-n,--n", command.n, "Length of an embedding");
  size("--k-user", command.k_user, "Embeddings of a user");
  size("--k-cand", command.k_candidate, "Embeddings of a candidate");
  sub.add_option("--type", command.type, "bf16, fp16 or both")
      ->check(CLI::IsMember({"bf16", "fp16", "both"}))
      ->capture_default_str();
  sub.add_option("--rounds", command.rounds, "Every round plays each contestant once; the median counts")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  sub.add_option("-o,--output", command.output, "Write the figures to this file (JSON)");
}

}  // namespace

void add_bench_lce(CLI::App& bench, Action& action) {
  auto command = std::make_shared<LceCommand>();
  CLI::App* sub = bench.add_subcommand(
      "lce",
      "Measures the stages of linear compression on the GPU.\n\n"
      "In one process, interleaved, timed on the device: broadcast, decomposed, decomposed_padded, fused, fused_ws, "
      "and\n"
      "cuBLAS's two products alone; beside them the rates of a large product and a large copy in the same run.\n\n"
      "Example:\n  ikbo bench lce --stage fused_ws --type bf16 --batch 512");
  sub->add_option("--cases", command->cases, "main: one shape, with the slow stages; sweep: batches and ratios")
      ->check(CLI::IsMember({"main", "sweep"}))
      ->capture_default_str();
  sub->add_option("--stage", command->stage, "Only stages whose name has this");
  add_shape(*sub, *command);
  sub->callback([command, &action] { action = [command] { return run(*command); }; });
}

void add_tune_lce(CLI::App& tune, Action& action) {
  auto command = std::make_shared<LceCommand>();
  command->cases = "tune";
  CLI::App* sub = tune.add_subcommand(
      "lce",
      "Measures every legal configuration of the linear-compression kernel for a shape, and prints the best.\n\n"
      "Beside it stands the configuration that would be chosen without measuring, and what is lost by it.\n\n"
      "Example:\n  ikbo tune lce --batch 512 --m 433 --n 256 --type bf16");
  add_shape(*sub, *command);
  sub->callback([command, &action] { action = [command] { return run(*command); }; });
}

}  // namespace ikbo::cli
