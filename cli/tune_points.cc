#include "cli/tune_points.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "graph/error.h"

namespace ikbo::cli {
namespace {

using graph::Expr;
using graph::MeasuredCompression;
using graph::MeasuredPoint;

constexpr const char* kTarget = "torch.ops.ikbo.linear_compression.default";
constexpr std::size_t kMostTerms = 4;  // of one launch of the kernel
// A factor of 4 apart, so that any batch between is within a factor of 2 of one of them.
constexpr std::int64_t kUsualCandidates[] = {16, 64, 256, 1024, 4096};

struct Batches {
  std::int64_t candidates = 0;
  std::int64_t users = 0;
};

bool inside(std::int64_t value, const graph::Range& range) {
  return (!range.min || value >= *range.min) && (!range.max || value <= *range.max);
}

std::string range_text(const graph::Range& range) {
  return fmt::format("{} to {}", range.min ? *range.min : 0, range.max ? fmt::format("{}", *range.max) : "any");
}

void check_inside(std::int64_t value, const graph::Range& range, const char* what) {
  if (!inside(value, range)) fail("{} {}: the archive allows {}", value, what, range_text(range));
}

std::int64_t users_of(std::int64_t candidates, const TuneRequest& request, const graph::Range& range) {
  const std::int64_t users = (candidates + request.ratio - 1) / request.ratio;
  return std::clamp(users, std::max<std::int64_t>(range.min.value_or(1), 1), range.max.value_or(users + 1));
}

std::vector<Batches> batches_of(const graph::Specification& spec, const TuneRequest& request) {
  std::vector<std::int64_t> candidates = request.candidates;
  for (const std::int64_t value : candidates) check_inside(value, spec.candidate_range, "candidates");
  for (const std::int64_t value : request.users) check_inside(value, spec.user_range, "users");
  if (candidates.empty()) {
    for (const std::int64_t value : kUsualCandidates) {
      if (inside(value, spec.candidate_range)) candidates.push_back(value);
    }
    // The largest call that the archive allows, where it is no usual one.
    const auto most = spec.candidate_range.max;
    if (most && *most > 0 && *most < *std::rbegin(kUsualCandidates)) candidates.push_back(*most);
    if (candidates.empty()) candidates.push_back(std::max<std::int64_t>(spec.candidate_range.min.value_or(1), 1));
  }
  std::vector<Batches> batches;
  for (const std::int64_t count : candidates) {
    if (request.users.empty()) {
      batches.push_back({count, users_of(count, request, spec.user_range)});
      continue;
    }
    for (const std::int64_t users : request.users) {
      if (users <= count) batches.push_back({count, users});
    }
  }
  if (batches.empty()) {
    fail("there is nothing to measure: every number of users is larger than every number of candidates");
  }
  return batches;
}

std::string name_of(const graph::Argument* argument) {
  const auto* tensor = argument == nullptr ? nullptr : std::get_if<graph::TensorArg>(argument);
  return tensor == nullptr ? "" : tensor->name;
}

std::vector<std::string> names_of(const graph::Argument* argument) {
  return argument == nullptr ? std::vector<std::string>() : graph::value_names(*argument);
}

/// One operator of the graph: the sizes that the model fixes, and the batches as expressions.
struct Compression {
  MeasuredCompression shape;
  Expr candidates;
  std::vector<Expr> rows;
};

/// Throws ikbo::Error with the reason for one that cannot be measured.
Compression read_compression(const graph::Graph& graph, const graph::Node& node) {
  const auto meta = [&](const std::string& name, std::size_t dims) -> const graph::TensorMeta& {
    const auto found = graph.tensors.find(name);
    if (found == graph.tensors.end() || found->second.sizes.size() != dims) fail("its operands are not described");
    return found->second;
  };
  const auto fixed = [](const Expr& size, const char* what) {
    const auto value = size.as_integer();
    if (!value) fail("{} is {}, which the model does not fix", what, size.str());
    return *value;
  };
  const graph::TensorMeta& e = meta(name_of(node.find("e_cand")), 3);
  if (e.dtype != graph::DType::kBFloat16 && e.dtype != graph::DType::kFloat16) {
    fail("it is in {}, and only bfloat16 and float16 have configurations to choose among", graph::dtype_name(e.dtype));
  }
  Compression found;
  found.shape.dtype = graph::dtype_name(e.dtype);
  found.shape.m = fixed(meta(name_of(node.find("w_cand")), 2).sizes[0], "M");
  found.shape.k_candidate = fixed(e.sizes[1], "K_cand");
  found.shape.n = fixed(e.sizes[2], "N");
  if (found.shape.m < 1 || found.shape.n < 1) fail("its result is empty");
  found.candidates = e.sizes[0];
  for (const std::string& name : names_of(node.find("e_bcast"))) {
    const graph::TensorMeta& term = meta(name, 3);
    found.shape.k_broadcast.push_back(fixed(term.sizes[1], "K of a broadcast term"));
    found.rows.push_back(term.sizes[0]);
  }
  if (found.rows.size() > kMostTerms)
    fail("it has {} broadcast terms, the kernel at most {}", found.rows.size(), kMostTerms);
  return found;
}

void add_points(MeasuredCompression& shape, const Compression& found, const graph::Specification& spec,
                const std::vector<Batches>& batches) {
  for (const Batches& at : batches) {
    const std::map<std::string, std::int64_t> values = {{spec.user_symbol, at.users},
                                                        {spec.candidate_symbol, at.candidates}};
    const auto number = [&](const Expr& size) {
      const auto value = size.evaluate(values);
      if (!value) fail("its batch {} does not follow from the numbers of users and candidates", size.str());
      return *value;
    };
    MeasuredPoint point;
    point.candidates = number(found.candidates);
    for (const Expr& rows : found.rows) point.rows.push_back(number(rows));
    if (point.candidates < 1 || std::any_of(point.rows.begin(), point.rows.end(), [](auto rows) { return rows < 1; })) {
      continue;
    }
    const bool known = std::any_of(shape.points.begin(), shape.points.end(), [&](const MeasuredPoint& p) {
      return p.candidates == point.candidates && p.rows == point.rows;
    });
    if (!known) shape.points.push_back(std::move(point));
  }
}

}  // namespace

std::size_t TunePlan::points() const {
  std::size_t count = 0;
  for (const MeasuredCompression& shape : shapes) count += shape.points.size();
  return count;
}

TunePlan plan_tuning(const graph::Archive& archive, const graph::Specification& specification,
                     const TuneRequest& request) {
  const std::string name = archive.path.empty() ? std::string("the archive") : archive.path.string();
  const std::vector<Batches> batches = batches_of(specification, request);
  TunePlan plan;
  for (const graph::Node& node : archive.program.graph.nodes) {
    if (node.target != kTarget) continue;
    try {
      const Compression found = read_compression(archive.program.graph, node);
      MeasuredCompression shape = found.shape;
      const auto same = std::find_if(plan.shapes.begin(), plan.shapes.end(),
                                     [&](const MeasuredCompression& other) { return other.same_shape(shape); });
      MeasuredCompression& known = same == plan.shapes.end() ? shape : *same;
      add_points(known, found, specification, batches);
      if (same == plan.shapes.end() && !shape.points.empty()) plan.shapes.push_back(std::move(shape));
    } catch (const Error& error) {
      plan.skipped.push_back(fmt::format("{}: {}", node.name, error.what()));
    }
  }
  if (plan.shapes.empty()) {
    if (plan.skipped.empty()) fail("{}: it has no ikbo::linear_compression, so there is nothing to tune", name);
    fail("{}: none of its ikbo::linear_compression can be tuned: {}", name, fmt::join(plan.skipped, "; "));
  }
  return plan;
}

void store(graph::Specification& specification, graph::MeasuredDevice measured) {
  auto& devices = specification.configurations;
  const auto known = std::find_if(devices.begin(), devices.end(), [&](const graph::MeasuredDevice& d) {
    return d.device == measured.device && d.multiprocessors == measured.multiprocessors;
  });
  if (known == devices.end()) {
    devices.push_back(std::move(measured));
  } else {
    *known = std::move(measured);
  }
}

}  // namespace ikbo::cli
