#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

#include "graph/configurations.h"

namespace ikbo::cli {

constexpr int kFine = 0;
constexpr int kCheckFailed = 1;
constexpr int kBadInput = 2;

/// What the chosen command does; its result is the exit code.
using Action = std::function<int()>;

// Each adds its command with its options to `app`, and sets `action` where the command was chosen.
void add_inspect(CLI::App& app, Action& action);
void add_transform(CLI::App& app, Action& action);
void add_verify(CLI::App& app, Action& action);
void add_spec(CLI::App& app, Action& action);
void add_score(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_bench_lce(CLI::App& bench, Action& action);  // of `ikbo bench`
void add_tune(CLI::App& app, Action& action);
void add_tune_lce(CLI::App& tune, Action& action);  // of `ikbo tune`

/// A table of stored configurations, a line for each measured point.
std::string configurations_text(const std::vector<graph::MeasuredDevice>& devices);

}  // namespace ikbo::cli
