#include <fmt/ranges.h>

#include <algorithm>
#include <iostream>
#include <map>

#include "cli/commands.h"
#include "cli/output.h"
#include "graph/archive.h"
#include "graph/error.h"
#include "graph/specification.h"
#include "runtime/ids.h"
#include "runtime/model.h"

namespace ikbo::cli {
namespace {

using graph::Json;

struct InspectOptions {
  std::string archive;
  bool check = false;
  bool json = false;
};

std::string range_text(const graph::Range& range) {
  return fmt::format("{} to {}", range.min ? *range.min : 0, range.max ? fmt::format("{}", *range.max) : "any");
}

// "0 to 49 (user_id.weight)", with the columns where it is not all of them.
std::string ids_text(const runtime::IdRange& range) {
  std::string text = fmt::format("{} to {}", range.min, range.max);
  for (const runtime::DimRange& c : range.columns) {
    text += c.end - c.begin == 1 ? fmt::format(" in column {}", c.begin)
                                 : fmt::format(" in columns {} to {}", c.begin, c.end - 1);
  }
  return text;
}

struct WeightCount {
  std::int64_t tensors = 0;
  std::int64_t bytes = 0;   // each storage once
  std::int64_t shared = 0;  // tensors whose storage another one has too
};

WeightCount count_weights(const graph::Archive& archive) {
  WeightCount count;
  std::map<const graph::Storage*, std::int64_t> users;
  for (const auto* table : {&archive.weights, &archive.constants}) {
    for (const auto& [name, weight] : *table) {
      ++count.tensors;
      if (users[weight.storage.get()]++ == 0 && weight.storage) {
        count.bytes += static_cast<std::int64_t>(weight.storage->bytes.size());
      }
    }
  }
  for (const auto& [storage, number] : users) count.shared += number > 1 ? number : 0;
  return count;
}

std::vector<std::pair<std::string, int>> histogram(const graph::Graph& graph) {
  std::map<std::string, int> counts;
  for (const graph::Node& node : graph.nodes) ++counts[node.target];
  std::vector<std::pair<std::string, int>> sorted(counts.begin(), counts.end());
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  return sorted;
}

std::string short_target(const std::string& target) {
  const std::string prefix = "torch.ops.";
  return target.rfind(prefix, 0) == 0 ? target.substr(prefix.size()) : target;
}

std::string meta_text(const graph::Program& program, const std::string& value) {
  const auto meta = program.graph.tensors.find(value);
  return meta == program.graph.tensors.end() ? "?" : graph::describe(meta->second);
}

Json describe_archive(const graph::Archive& archive) {
  Json json;
  json["archive"] = archive.path.string();
  json["transformed"] = runtime::is_transformed(archive);
  const std::vector<runtime::IdRange> ids = runtime::find_id_ranges(archive);
  json["inputs"] = Json::array();
  for (const graph::UserInput& input : graph::user_inputs(archive.program)) {
    Json entry = {{"name", input.name},
                  {"path", input.path},
                  {"value", input.value},
                  {"type", meta_text(archive.program, input.value)}};
    entry["ids"] = Json::array();
    for (const runtime::IdRange& range : ids) {
      if (range.value != input.value) continue;
      Json columns = Json::array();
      for (const runtime::DimRange& c : range.columns) columns.push_back({c.dim, c.begin, c.end});
      entry["ids"].push_back({{"min", range.min}, {"max", range.max}, {"table", range.table}, {"columns", columns}});
    }
    json["inputs"].push_back(std::move(entry));
  }
  json["outputs"] = Json::array();
  for (const graph::OutputSpec& output : archive.program.output_specs) {
    if (!output.user_output) continue;
    for (const std::string& name : graph::value_names(output.value)) {
      json["outputs"].push_back({{"value", name}, {"type", meta_text(archive.program, name)}});
    }
  }
  json["operators"] = Json::object();
  for (const auto& [target, number] : histogram(archive.program.graph)) json["operators"][target] = number;
  const WeightCount weights = count_weights(archive);
  json["weights"] = {{"tensors", weights.tensors}, {"bytes", weights.bytes}, {"sharing", weights.shared}};
  json["symbols"] = Json::object();
  for (const auto& [symbol, range] : archive.program.ranges) {
    json["symbols"][symbol] = {{"min", range.min ? Json(*range.min) : Json()},
                               {"max", range.max ? Json(*range.max) : Json()}};
  }
  return json;
}

void print_archive(const graph::Archive& archive) {
  const graph::Program& program = archive.program;
  std::cout << archive.path.string() << "\n\n";
  if (runtime::is_transformed(archive)) {
    const graph::Specification spec = runtime::specification_of(archive);
    std::cout << fmt::format("Transformed (mode {}): users {} as {}, candidates {} as {}\n\n", spec.mode,
                             range_text(spec.user_range), spec.user_symbol, range_text(spec.candidate_range),
                             spec.candidate_symbol);
  }
  const std::vector<runtime::IdRange> ids = runtime::find_id_ranges(archive);
  Table inputs({"input", "path", "type", "ids"});
  for (const graph::UserInput& input : graph::user_inputs(program)) {
    std::vector<std::string> ranges;
    for (const runtime::IdRange& range : ids) {
      if (range.value == input.value) ranges.push_back(ids_text(range));
    }
    inputs.add({input.name, input.path, meta_text(program, input.value), fmt::format("{}", fmt::join(ranges, "; "))});
  }
  std::cout << inputs.str() << "\n";
  Table outputs({"output", "type"});
  for (const graph::OutputSpec& output : program.output_specs) {
    if (!output.user_output) continue;
    for (const std::string& name : graph::value_names(output.value)) outputs.add({name, meta_text(program, name)});
  }
  std::cout << outputs.str() << "\n";
  for (const auto& [symbol, range] : program.ranges) {
    std::cout << fmt::format("Size {}: {}\n", symbol, range_text(range));
  }
  const WeightCount weights = count_weights(archive);
  std::cout << fmt::format("Weights: {}, {}{}\n\n", plural(weights.tensors, "tensor"), bytes_text(weights.bytes),
                           weights.shared > 0 ? fmt::format(", {} share their storage", weights.shared) : "");
  Table operators({"operator", "times"}, {Table::Align::kLeft, Table::Align::kRight});
  for (const auto& [target, number] : histogram(program.graph)) {
    operators.add({short_target(target), fmt::format("{}", number)});
  }
  std::cout << operators.str();
}

int inspect(const InspectOptions& options) {
  std::vector<std::string> damaged;
  if (options.check) {
    Progress progress("checking " + options.archive);
    damaged = graph::check_archive(options.archive, [&](std::size_t done, std::size_t all) {
      progress.update(fmt::format("{} of {} members", done, all));
    });
  }
  if (!damaged.empty() && !options.json) {
    for (const std::string& name : damaged) {
      std::cout << fmt::format("{}: member {} is damaged: its checksum differs\n", options.archive, name);
    }
    return kCheckFailed;
  }
  if (options.json) {
    Json json =
        damaged.empty() ? describe_archive(graph::read_archive(options.archive)) : Json{{"archive", options.archive}};
    if (options.check) json["damaged"] = damaged;
    print_json(json);
    return damaged.empty() ? kFine : kCheckFailed;
  }
  print_archive(graph::read_archive(options.archive));
  if (options.check) std::cout << "\nChecksums: all members are as they were written\n";
  return kFine;
}

}  // namespace

void add_inspect(CLI::App& app, Action& action) {
  auto options = std::make_shared<InspectOptions>();
  CLI::App* command = app.add_subcommand(
      "inspect",
      "Shows what an exported archive takes, gives and is made of.\n\n"
      "Inputs are named as the model's author knows them; those names are what --request-only of `ikbo transform`\n"
      "takes. \"ids\" are the values that an embedding table allows.\n\nExample:\n  ikbo inspect ranker.pt2 --check");
  command->add_option("archive", options->archive, "Archive of torch.export.save (.pt2)")->required();
  command->add_flag("--check", options->check, "Compare the checksum of every member; exit code 1 where one differs");
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options, &action] { action = [options] { return inspect(*options); }; });
}

}  // namespace ikbo::cli
