#include "runtime/model.h"

#include <ATen/ops/aminmax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/nonzero.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "graph/error.h"
#include "runtime/configurations.h"
#include "runtime/device.h"

namespace ikbo::runtime {
namespace {

void check_range(const char* what, std::int64_t given, const graph::Range& range) {
  if (range.max && given > *range.max)
    fail("{} {} in one call: the archive allows at most {}", given, what, *range.max);
}

std::vector<graph::TensorMeta> output_metas(const graph::Program& program) {
  std::vector<graph::TensorMeta> metas;
  for (const graph::OutputSpec& spec : program.output_specs) {
    if (!spec.user_output) continue;
    for (const std::string& name : graph::value_names(spec.value)) {
      const auto meta = program.graph.tensors.find(name);
      if (meta != program.graph.tensors.end()) metas.push_back(meta->second);
    }
  }
  return metas;
}

}  // namespace

bool is_transformed(const graph::Archive& archive) {
  return archive.extra_files.contains(graph::Specification::kFile);
}

graph::Specification specification_of(const graph::Archive& archive) {
  const auto file = archive.extra_files.find(graph::Specification::kFile);
  const std::string name = archive.path.empty() ? std::string("the archive") : archive.path.string();
  if (file == archive.extra_files.end()) {
    fail("{}: not transformed yet: run ikbo transform on it first", name);
  }
  try {
    return graph::specification_from_json(graph::Json::parse(file->second));
  } catch (const graph::Json::exception& error) {
    fail("{}: {} is not JSON: {}", name, graph::Specification::kFile, error.what());
  }
}

Model::Model(const graph::Archive& archive, const EngineOptions& options)
    : specification_(specification_of(archive)),
      layout_(archive.program, specification_),
      ids_(find_id_ranges(archive)),
      outputs_(output_metas(archive.program)),
      device_(open_device(options.device)),
      engine_(make_eager_engine(archive, options)) {
  use_configurations(specification_, device_);
}

void Model::check_ids(std::span<const Request> requests) const {
  for (const IdRange& range : ids_) {
    const auto input = std::find_if(layout_.inputs().begin(), layout_.inputs().end(),
                                    [&](const RequestInput& i) { return i.value == range.value; });
    if (input == layout_.inputs().end() || input->side == graph::Side::kIndex) continue;
    for (const Request& request : requests) {
      const auto& table = input->side == graph::Side::kRequestOnly ? request.user
                          : input->side == graph::Side::kCandidate ? request.candidates
                                                                   : request.shared;
      const auto found = table.find(range.value);
      if (found == table.end()) continue;  // joining names what is missing
      // A user's value has no batch axis in the request; those of a bag are several.
      const bool user = input->side == graph::Side::kRequestOnly && input->bags == RequestInput::Bags::kNone;
      auto bad = find_bad_id(user ? found->second.unsqueeze(0) : found->second, range);
      if (!bad) continue;
      if (user) bad->position.erase(bad->position.begin());
      std::string where;
      for (const std::int64_t p : bad->position) where += fmt::format("[{}]", p);
      fail("request \"{}\": input '{}'{} is {}, but {} takes {} to {}", request.id, input->name, where, bad->value,
           range.table, range.min, range.max);
    }
  }
}

Batch Model::prepare(std::span<const Request> requests) const {
  check_ids(requests);
  Batch batch = join_requests(layout_, requests);
  check_range("users", batch.users, specification_.user_range);
  check_range("candidates", batch.candidates(), specification_.candidate_range);
  return batch;
}

std::vector<Scores> Model::score(std::span<const Request> requests) const {
  Batch batch = prepare(requests);
  if (batch.users > 0) {
    for (at::Tensor& input : batch.inputs) input = input.to(device_);
    std::vector<at::Tensor> outputs = engine_->run(batch.inputs);
    for (at::Tensor& output : outputs) output = output.cpu();
    return split_scores(batch, outputs);
  }
  // Nothing to score: empty outputs of the right types.
  std::vector<at::Tensor> outputs;
  for (const graph::TensorMeta& meta : outputs_) {
    std::vector<std::int64_t> sizes{0};
    for (std::size_t d = 1; d < meta.sizes.size(); ++d) sizes.push_back(meta.sizes[d].as_integer().value_or(0));
    outputs.push_back(at::empty(sizes, graph::scalar_type(meta.dtype)));
  }
  return split_scores(batch, outputs);
}

std::vector<Scores> split_scores(const Batch& batch, std::span<const at::Tensor> outputs) {
  std::vector<Scores> scores(batch.offsets.size() - 1);
  for (std::size_t o = 0; o < outputs.size(); ++o) {
    const at::Tensor& output = outputs[o];
    if (output.dim() < 1 || output.size(0) != batch.candidates()) {
      fail("output {} of the model is [{}]: it has no row for each of the {} candidates", o,
           fmt::join(output.sizes(), ", "), batch.candidates());
    }
    for (std::size_t i = 0; i < scores.size(); ++i) {
      scores[i].outputs.push_back(output.narrow(0, batch.offsets[i], batch.offsets[i + 1] - batch.offsets[i]));
    }
  }
  return scores;
}

void check_candidate_to_user(const at::Tensor& candidate_to_user, std::int64_t users) {
  if (candidate_to_user.dim() != 1 || !at::isIntegralType(candidate_to_user.scalar_type(), false)) {
    fail("candidate_to_user must be a vector of integers, one a candidate");
  }
  if (candidate_to_user.numel() == 0) return;
  const auto [low, high] = at::aminmax(candidate_to_user);
  if (low.item<std::int64_t>() >= 0 && high.item<std::int64_t>() < users) return;
  const at::Tensor bad = candidate_to_user.lt(0).logical_or(candidate_to_user.ge(users));
  const auto position = at::nonzero(bad)[0][0].item<std::int64_t>();
  fail("candidate_to_user[{}] is {}, expected 0 to {}", position, candidate_to_user[position].item<std::int64_t>(),
       users - 1);
}

}  // namespace ikbo::runtime
