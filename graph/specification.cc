#include "graph/specification.h"

#include <array>
#include <utility>

#include "graph/error.h"

namespace ikbo::graph {
namespace {

constexpr std::array<std::pair<Side, const char*>, 4> kSides{{{Side::kRequestOnly, "request-only"},
                                                              {Side::kCandidate, "candidate"},
                                                              {Side::kShared, "shared"},
                                                              {Side::kIndex, "index"}}};
constexpr std::array<std::pair<Role, const char*>, 6> kRoles{{{Role::kConstant, "constant"},
                                                              {Role::kRequestOnly, "request-only"},
                                                              {Role::kCandidate, "candidate"},
                                                              {Role::kIkbo, "ikbo"},
                                                              {Role::kBroadcast, "broadcast"},
                                                              {Role::kReplicated, "replicated"}}};

template <typename Enum, std::size_t N>
const char* name_of(const std::array<std::pair<Enum, const char*>, N>& table, Enum value) {
  for (const auto& [v, name] : table) {
    if (v == value) return name;
  }
  return "?";
}

template <typename Enum, std::size_t N>
Enum value_of(const std::array<std::pair<Enum, const char*>, N>& table, const std::string& name, const char* what) {
  for (const auto& [v, n] : table) {
    if (name == n) return v;
  }
  fail("the specification has an unknown {} '{}'", what, name);
}

Json range_to_json(const Range& r) {
  return {{"min", r.min ? Json(*r.min) : Json(nullptr)}, {"max", r.max ? Json(*r.max) : Json(nullptr)}};
}

Range range_from_json(const Json& json) {
  Range r;
  if (!json.at("min").is_null()) r.min = json.at("min").get<std::int64_t>();
  if (!json.at("max").is_null()) r.max = json.at("max").get<std::int64_t>();
  return r;
}

std::vector<MeasuredDevice> read_configurations(const Json& json) {
  try {
    return measured_from_json(json);
  } catch (const Error& e) {
    fail("the specification in the archive is damaged: {}", e.what());
  }
}

}  // namespace

std::string role_name(Role role) {
  return name_of(kRoles, role);
}

Json specification_to_json(const Specification& s) {
  Json json = {{"version", Specification::kVersion},
               {"mode", s.mode},
               {"batches",
                {{"B_user", {{"symbol", s.user_symbol}, {"range", range_to_json(s.user_range)}}},
                 {"B_cand", {{"symbol", s.candidate_symbol}, {"range", range_to_json(s.candidate_range)}}}}}};
  json["inputs"] = Json::array();
  for (const InputEntry& i : s.inputs) {
    json["inputs"].push_back(
        {{"value", i.value}, {"name", i.name}, {"path", i.path}, {"side", name_of(kSides, i.side)}});
  }
  json["packed"] = Json::array();
  for (const PackedInput& p : s.packed) {
    json["packed"].push_back({{"name", p.name},
                              {"user_value", p.user_value},
                              {"candidate_value", p.candidate_value},
                              {"user_columns", p.user_columns},
                              {"columns", p.columns}});
  }
  json["jagged"] = Json::array();
  for (const JaggedInput& j : s.jagged) {
    json["jagged"].push_back({{"values", j.values}, {"offsets", j.offsets}, {"includes_end", j.includes_end}});
  }
  json["operators"] = Json::array();
  for (const OperatorEntry& o : s.operators) {
    Json entry = {{"node", o.node}, {"target", o.target}, {"role", role_name(o.role)}};
    if (!o.note.empty()) entry["note"] = o.note;
    entry["results"] = Json::array();
    for (const ResultEntry& r : o.results) {
      Json dims = Json::array();
      for (const DimEntry& d : r.dims) dims.push_back({{"size", d.expression}, {"source", d.source}});
      entry["results"].push_back({{"value", r.value}, {"dtype", r.dtype}, {"dims", dims}});
    }
    json["operators"].push_back(std::move(entry));
  }
  if (!s.configurations.empty()) json["configurations"] = measured_to_json(s.configurations);
  return json;
}

Specification specification_from_json(const Json& json) {
  try {
    const int version = json.at("version").get<int>();
    if (version != Specification::kVersion) {
      fail("the specification has version {}, but this program reads version {}", version, Specification::kVersion);
    }
    Specification s;
    s.mode = json.at("mode").get<std::string>();
    const Json& batches = json.at("batches");
    s.user_symbol = batches.at("B_user").at("symbol").get<std::string>();
    s.user_range = range_from_json(batches.at("B_user").at("range"));
    s.candidate_symbol = batches.at("B_cand").at("symbol").get<std::string>();
    s.candidate_range = range_from_json(batches.at("B_cand").at("range"));
    for (const Json& i : json.at("inputs")) {
      s.inputs.push_back({i.at("value").get<std::string>(), i.at("name").get<std::string>(),
                          i.at("path").get<std::string>(), value_of(kSides, i.at("side").get<std::string>(), "side")});
    }
    for (const Json& p : json.at("packed")) {
      s.packed.push_back({p.at("name").get<std::string>(), p.at("user_value").get<std::string>(),
                          p.at("candidate_value").get<std::string>(),
                          p.at("user_columns").get<std::vector<std::pair<std::int64_t, std::int64_t>>>(),
                          p.at("columns").get<std::int64_t>()});
    }
    for (const Json& j : json.value("jagged", Json::array())) {
      s.jagged.push_back({j.at("values").get<std::vector<std::string>>(), j.at("offsets").get<std::string>(),
                          j.at("includes_end").get<bool>()});
    }
    for (const Json& o : json.at("operators")) {
      OperatorEntry entry;
      entry.node = o.at("node").get<std::string>();
      entry.target = o.at("target").get<std::string>();
      entry.role = value_of(kRoles, o.at("role").get<std::string>(), "role");
      entry.note = o.value("note", "");
      for (const Json& r : o.at("results")) {
        ResultEntry result{r.at("value").get<std::string>(), r.at("dtype").get<std::string>(), {}};
        for (const Json& d : r.at("dims")) {
          result.dims.push_back({d.at("size").get<std::string>(), d.at("source").get<std::string>()});
        }
        entry.results.push_back(std::move(result));
      }
      s.operators.push_back(std::move(entry));
    }
    if (json.contains("configurations")) s.configurations = read_configurations(json.at("configurations"));
    return s;
  } catch (const Json::exception& e) {
    fail("the specification in the archive is damaged: {}", e.what());
  }
}

}  // namespace ikbo::graph
