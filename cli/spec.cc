#include <fmt/ranges.h>

#include <algorithm>
#include <iostream>

#include "cli/commands.h"
#include "cli/output.h"
#include "graph/archive.h"
#include "graph/error.h"
#include "runtime/model.h"

namespace ikbo::cli {
namespace {

std::string short_target(const std::string& target) {
  const std::string prefix = "torch.ops.";
  return target.rfind(prefix, 0) == 0 ? target.substr(prefix.size()) : target;
}

std::string shape(const graph::ResultEntry& result) {
  std::vector<std::string> dims;
  for (const graph::DimEntry& dim : result.dims) dims.push_back(dim.expression);
  return fmt::format("{} [{}]", result.dtype, fmt::join(dims, ", "));
}

// Where the sizes that are not plain numbers come from.
std::string sources(const graph::ResultEntry& result) {
  std::vector<std::string> texts;
  for (const graph::DimEntry& dim : result.dims) {
    const bool number = dim.expression.find_first_not_of("0123456789") == std::string::npos;
    if (number || dim.source.empty()) continue;
    if (std::find(texts.begin(), texts.end(), dim.source) == texts.end()) texts.push_back(dim.source);
  }
  return fmt::format("{}", fmt::join(texts, "; "));
}

std::string range(const graph::Range& range) {
  return fmt::format("{} to {}", range.min ? *range.min : 0, range.max ? fmt::format("{}", *range.max) : "any");
}

int run(const std::string& path, bool json) {
  const graph::Specification spec = runtime::specification_of(graph::read_archive(path));
  if (json) {
    print_json(graph::specification_to_json(spec));
    return kFine;
  }
  std::cout << fmt::format("Mode {}. B_user: {}. B_cand: {}.\n\n", spec.mode, range(spec.user_range),
                           range(spec.candidate_range));
  Table table({"operator", "node", "role", "result", "size from"});
  for (const graph::OperatorEntry& op : spec.operators) {
    bool first = true;
    if (op.results.empty()) table.add({short_target(op.target), op.node, graph::role_name(op.role), "", ""});
    for (const graph::ResultEntry& result : op.results) {
      table.add({first ? short_target(op.target) : "", first ? op.node : "", first ? graph::role_name(op.role) : "",
                 shape(result), sources(result)});
      first = false;
    }
  }
  std::cout << table.str();
  bool heading = false;
  for (const graph::OperatorEntry& op : spec.operators) {
    if (op.note.empty()) continue;
    if (!heading) std::cout << "\nNotes:\n";
    heading = true;
    std::cout << fmt::format("  {}: {}\n", op.node, op.note);
  }
  for (const graph::MeasuredDevice& device : spec.configurations) {
    std::cout << fmt::format("\nConfigurations measured on {} with {} multiprocessors:\n\n", device.device,
                             device.multiprocessors)
              << configurations_text({device});
  }
  return kFine;
}

}  // namespace

void add_spec(CLI::App& app, Action& action) {
  struct Options {
    std::string archive;
    bool json = false;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("spec",
                         "Prints the compilation specification of a transformed archive.\n\n"
                         "For every operator: what it is there for, and each size of its results as an expression over "
                         "B_user (users in a\n"
                         "call) and B_cand (candidates in a call), with where the size comes from and its range;\n"
                         "and the configurations of kernels that `ikbo tune` stored.\n\n"
                         "Example:\n  ikbo spec ranker.ikbo.pt2");
  command->add_option("archive", options->archive, "Transformed archive")->required();
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options, &action] { action = [options] { return run(options->archive, options->json); }; });
}

}  // namespace ikbo::cli
