#include "runtime/verify.h"

#include <cmath>
#include <iostream>

#include "cli/commands.h"
#include "cli/output.h"
#include "graph/error.h"
#include "runtime/model.h"

namespace ikbo::cli {
namespace {

using graph::Json;

struct VerifyCommand {
  std::string original;
  std::string transformed;
  std::string requests;
  bool json = false;
  runtime::VerifyOptions options;
};

// JSON has no infinity.
Json finite(double value) {
  return std::isfinite(value) ? Json(value) : Json(nullptr);
}

Json to_json(const runtime::VerifyResult& result, bool passed) {
  Json json = {{"passed", passed},
               {"float64", result.float64},
               {"why_not_float64", result.why_not_float64},
               {"user_inputs_move_scores", result.user_inputs_move_scores},
               {"candidate_inputs_move_scores", result.candidate_inputs_move_scores},
               {"worst_ratio", finite(result.worst_ratio)}};
  json["skipped"] = result.skipped;
  json["checks"] = Json::array();
  for (const runtime::VerifyCheck& c : result.checks) {
    json["checks"].push_back({{"mapping", c.mapping},
                              {"users", c.users},
                              {"candidates", c.candidates},
                              {"output", c.output},
                              {"original_error", finite(c.original_error)},
                              {"transformed_error", finite(c.transformed_error)},
                              {"allowed", finite(c.allowed)},
                              {"range", finite(c.range)},
                              {"nan_agree", c.nan_agree},
                              {"passed", c.passed}});
  }
  return json;
}

std::string moves(bool present, bool moved) {
  return !present ? "there are none" : moved ? "move the score" : "DO NOT move the score";
}

void print(const runtime::VerifyResult& result, const VerifyCommand& command, bool passed) {
  std::cout << fmt::format("User inputs: {}. Candidate inputs: {}.\n\n",
                           moves(result.has_user_inputs, result.user_inputs_move_scores),
                           moves(result.has_candidate_inputs, result.candidate_inputs_move_scores));
  using Align = Table::Align;
  const bool reference = result.float64;
  Table table(
      {"candidates to users", "users", "candidates", "output",
       reference ? "original's error" : "largest score difference", reference ? "transformed's" : "", "allowed", ""},
      {Align::kLeft, Align::kRight, Align::kRight, Align::kLeft, Align::kRight, Align::kRight, Align::kRight});
  for (const runtime::VerifyCheck& c : result.checks) {
    table.add({c.mapping, count_text(c.users), count_text(c.candidates), c.output,
               number_text(reference ? c.original_error : c.transformed_error),
               reference ? number_text(c.transformed_error) : "", number_text(c.allowed),
               c.passed       ? "ok"
               : !c.nan_agree ? "NaN differ"
                              : "FAILED"});
  }
  std::cout << table.str() << "\n";
  for (const std::string& skipped : result.skipped) {
    std::cout << fmt::format("Skipped, since the original itself fails there: {}\n", skipped);
  }
  if (reference) {
    std::cout << "Errors are the largest differences from the original run in float64; the transformed model's may be\n"
                 "twice the largest of the original's own (plus a few units in the last place).\n";
  } else {
    std::cout << "The original cannot run in float64 (" << result.why_not_float64
              << "), so the two are compared\nwith each other: 1e-5 of the scores' range is allowed.\n";
  }
  if (result.dead() && !command.options.allow_dead) {
    std::cout << "\nFAILED: inputs that do not move the score prove nothing. Is the model trained, and are these its "
                 "inputs? --allow-dead accepts it.\n";
    return;
  }
  std::cout << (passed ? "\nPassed: the transformed model gives the original's scores.\n"
                       : "\nFAILED: the transformed model gives other scores than the original.\n");
}

int run(VerifyCommand& command) {
  const graph::Archive original = graph::read_archive(command.original);
  const graph::Archive transformed = graph::read_archive(command.transformed);
  if (!command.requests.empty()) {
    const runtime::RequestLayout layout(transformed.program, runtime::specification_of(transformed));
    command.options.requests = runtime::read_requests(command.requests, layout);
  }
  Progress progress("verifying");
  command.options.progress = [&](const std::string& state) { progress.update(state); };
  const runtime::VerifyResult result = runtime::verify(original, transformed, command.options);
  const bool passed = result.passed(command.options.allow_dead);
  if (command.json) {
    print_json(to_json(result, passed));
  } else {
    print(result, command, passed);
  }
  return passed ? kFine : kCheckFailed;
}

}  // namespace

void add_verify(CLI::App& app, Action& action) {
  auto command = std::make_shared<VerifyCommand>();
  CLI::App* sub = app.add_subcommand(
      "verify",
      "Shows that a transformed archive gives the original's scores.\n\n"
      "Draws random inputs that the model accepts (valid embedding ids included), or takes a request file, and runs\n"
      "both archives and the original in float64. Exit code 1 where the scores differ, or where user or candidate\n"
      "inputs do not move the score, since then nothing is shown.\n\n"
      "Example:\n  ikbo verify ranker.pt2 ranker.ikbo.pt2");
  sub->add_option("original", command->original, "Archive as exported")->required();
  sub->add_option("transformed", command->transformed, "What `ikbo transform` made of it")->required();
  sub->add_option("--requests", command->requests, "Take inputs from this request file instead of random ones");
  sub->add_option("--device", command->options.device, "Where to run: cpu, cuda or cuda:N")->capture_default_str();
  sub->add_option("--seed", command->options.seed, "Of the random inputs")->capture_default_str();
  sub->add_option("--users", command->options.users, "Users in a call")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  sub->add_option("--candidates", command->options.candidates, "Candidates in a call")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  sub->add_flag("--allow-dead", command->options.allow_dead, "Accept a model whose score some inputs do not move");
  sub->add_option("--threads", command->options.threads, "Threads; default: all cores")->check(CLI::PositiveNumber);
  sub->add_flag("--json", command->json, "Print JSON");
  sub->callback([command, &action] { action = [command] { return run(*command); }; });
}

}  // namespace ikbo::cli
