#include "runtime/verify.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <set>

#include "graph/error.h"
#include "graph/specification.h"
#include "runtime/configurations.h"
#include "runtime/device.h"
#include "runtime/model.h"
#include "runtime/random_inputs.h"

namespace ikbo::runtime {
namespace {

using graph::Side;
using Tensors = std::vector<at::Tensor>;

// Units in the last place of the largest score that no comparison can see below.
constexpr double kSlackUlps = 4;
constexpr double kRatio = 2;
constexpr double kWithoutReference = 1e-5;

double epsilon(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return std::numeric_limits<double>::epsilon();
    case at::kHalf:
      return 0x1p-10;
    case at::kBFloat16:
      return 0x1p-7;
    default:
      return std::numeric_limits<float>::epsilon();
  }
}

// Largest difference where neither is NaN; equal infinities differ by nothing.
double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0) return 0;
  const at::Tensor x = a.to(at::kDouble);
  const at::Tensor y = b.to(at::kDouble);
  const at::Tensor same = x.eq(y).logical_or(x.isnan()).logical_or(y.isnan());
  return at::where(same, at::zeros_like(x), (x - y).abs()).max().item<double>();
}

double largest_value(const at::Tensor& a) {
  const at::Tensor x = a.to(at::kDouble).abs();
  const at::Tensor finite = at::where(x.isfinite(), x, at::zeros_like(x));
  return finite.numel() == 0 ? 0 : finite.max().item<double>();
}

double spread(const at::Tensor& a) {
  const at::Tensor x = a.to(at::kDouble).reshape({-1});
  const at::Tensor finite = x.masked_select(x.isfinite());
  return finite.numel() == 0 ? 0 : (finite.max() - finite.min()).item<double>();
}

struct Case {
  std::string mapping;
  std::int64_t users = 0;
  std::int64_t candidates = 0;
  Tensors inputs;  // of the transformed archive
};

// What one output of one case came to.
struct Measured {
  VerifyCheck check;
  bool floating = true;
  double slack = 0;
};

std::vector<std::string> output_names(const graph::Program& program) {
  std::vector<std::string> names;
  for (const graph::OutputSpec& spec : program.output_specs) {
    if (!spec.user_output || std::holds_alternative<graph::NoneArg>(spec.value)) continue;
    const std::vector<std::string> values = graph::value_names(spec.value);
    names.push_back(values.empty() ? "constant" : values.front());
  }
  return names;
}

class Verifier {
 public:
  Verifier(const graph::Archive& original, const graph::Archive& transformed, const VerifyOptions& options)
      : original_archive_(original),
        options_(options),
        device_(open_device(options.device)),
        specification_(specification_of(transformed)),
        random_(transformed, specification_, options.seed),
        names_(output_names(original.program)) {
    for (const std::string& name : output_names(transformed.program)) {
      candidate_axes_.push_back(candidate_axis(transformed.program, name));
    }
    EngineOptions engine;
    engine.device = options.device;
    engine.threads = options.threads;
    original_ = make_eager_engine(original, engine);
    transformed_ = make_eager_engine(transformed, engine);
    use_configurations(specification_, device_);
    engine.float64 = true;
    try {
      reference_ = make_eager_engine(original, engine);
      result_.float64 = true;
    } catch (const std::exception& error) {
      result_.why_not_float64 = error.what();
    }
  }

  VerifyResult run() {
    const std::vector<Case> cases = make_cases();
    if (cases.empty()) fail("there is nothing to compare: no request has a candidate");
    check_alive(cases.front());
    std::vector<Measured> measured;
    for (std::size_t i = 0; i < cases.size(); ++i) {
      if (options_.progress) options_.progress(fmt::format("case {} of {}", i + 1, cases.size()));
      measure(cases[i], measured);
    }
    judge(measured);
    return std::move(result_);
  }

 private:
  std::int64_t clamp(std::int64_t size, const graph::Range& range) const {
    if (range.max) size = std::min(size, *range.max);
    // As in the engine: lower bounds up to 2 are an artefact of tracing.
    if (range.min && *range.min > 2) size = std::max(size, *range.min);
    return std::max<std::int64_t>(size, 1);
  }

  std::vector<Case> make_cases() {
    std::vector<Case> cases;
    if (!options_.requests.empty()) {
      const Batch batch = join_requests(random_.layout(), options_.requests);
      if (batch.users > 0) cases.push_back({"requests", batch.users, batch.candidates(), batch.inputs});
      return cases;
    }
    const std::int64_t users = clamp(options_.users, specification_.user_range);
    const std::int64_t candidates = clamp(options_.candidates, specification_.candidate_range);
    const std::pair<std::int64_t, std::int64_t> sizes[] = {
        {users, candidates}, {users, users}, {std::min<std::int64_t>(users, 2), 1}, {1, 1}, {1, candidates}};
    std::set<std::pair<std::int64_t, std::int64_t>> seen;
    for (const auto& [u, c] : sizes) {
      const std::int64_t b_user = clamp(u, specification_.user_range);
      const std::int64_t b_cand = clamp(c, specification_.candidate_range);
      if (!seen.insert({b_user, b_cand}).second) continue;
      for (const char* mapping : {"unsorted", "even", "uneven"}) {
        // With one user or one candidate all mappings are alike.
        if ((b_user == 1 || b_cand == 1) && std::string(mapping) != "unsorted") continue;
        cases.push_back({mapping, b_user, b_cand, draw(mapping, b_user, b_cand)});
      }
    }
    return cases;
  }

  Tensors draw(const std::string& mapping, std::int64_t users, std::int64_t candidates) {
    Tensors inputs = random_.draw(users, candidates);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const RequestInput& input = random_.inputs()[i];
      if (input.side == Side::kIndex) {
        inputs[i] = random_.mapping(mapping, users, candidates).to(graph::scalar_type(input.dtype));
      }
    }
    return inputs;
  }

  // Inputs are made, and outputs compared, on the CPU.
  Tensors run(const Engine& engine, Tensors inputs) const {
    for (at::Tensor& input : inputs) input = input.to(device_);
    if (draws_) {
      at::Generator generator = at::globalContext().defaultGenerator(device_);
      generator.set_current_seed(options_.seed);
    }
    Tensors outputs = engine.run(inputs);
    for (at::Tensor& output : outputs) output = output.cpu();
    return outputs;
  }

  std::vector<OriginalCall> calls(const Tensors& inputs) const {
    return original_calls(original_archive_.program, specification_, random_.layout(), inputs);
  }

  // The scores of all calls, each candidate's where it stands.
  Tensors run(const Engine& engine, const std::vector<OriginalCall>& calls) const {
    if (!calls.front().candidates.defined()) return run(engine, calls.front().inputs);
    std::int64_t candidates = 0;
    for (const OriginalCall& call : calls)
      candidates = std::max(candidates, call.candidates.max().item<std::int64_t>() + 1);
    Tensors outputs;
    for (const OriginalCall& call : calls) {
      Tensors part = run(engine, call.inputs);
      for (std::size_t o = 0; o < part.size(); ++o) {
        const std::int64_t axis = o < names_.size() && o < candidate_axes_.size() ? candidate_axes_[o] : -1;
        // A model that squeezes its batch away does so where a user has one candidate.
        if (axis >= 0 && call.candidates.numel() == 1 && part[o].dim() < rank_of(names_[o])) {
          part[o] = part[o].unsqueeze(axis);
        }
        if (&call == &calls.front()) {
          std::vector<std::int64_t> sizes = part[o].sizes().vec();
          if (axis >= 0 && axis < part[o].dim()) sizes[static_cast<std::size_t>(axis)] = candidates;
          outputs.push_back(axis >= 0 ? at::zeros(sizes, part[o].options()) : part[o]);
        }
        if (axis >= 0) outputs[o].index_copy_(axis, call.candidates, part[o]);
      }
    }
    return outputs;
  }

  // Where an output has a row for every candidate; -1: nowhere. The original may not show it (masked_select).
  std::int64_t candidate_axis(const graph::Program& transformed, const std::string& output) const {
    const auto meta = transformed.graph.tensors.find(output);
    if (meta == transformed.graph.tensors.end()) return -1;
    const auto& sizes = meta->second.sizes;
    const auto found = std::find_if(sizes.begin(), sizes.end(), [&](const graph::Expr& e) {
      return e.depends_on(specification_.candidate_symbol);
    });
    return found == sizes.end() ? -1 : found - sizes.begin();
  }

  std::int64_t rank_of(const std::string& output) const {
    return static_cast<std::int64_t>(original_archive_.program.graph.tensors.at(output).sizes.size());
  }

  // The same inputs give the original the same scores again.
  bool repeats(const Tensors& base, const Case& main) const {
    const Tensors again = run(*original_, calls(main.inputs));
    for (std::size_t o = 0; o < base.size(); ++o) {
      if (largest_difference(base[o], again[o]) > 1e-6 * largest_value(base[o])) return false;
    }
    return true;
  }

  // A model whose score ignores the user passes any comparison; so both sides must move it first.
  void check_alive(const Case& main) {
    Tensors base = run(*original_, calls(main.inputs));
    if (!repeats(base, main)) {
      // The transformed program draws as many numbers as the original in the same order: with one seed, the same ones.
      draws_ = true;
      base = run(*original_, calls(main.inputs));
      if (!repeats(base, main)) fail("the original gives other scores for the same inputs, whatever the seed");
      result_.float64 = false;
      result_.why_not_float64 = "it draws random numbers, and others in float64";
      reference_.reset();
    }
    for (const Side side : {Side::kRequestOnly, Side::kCandidate}) {
      const bool user = side == Side::kRequestOnly;
      bool present = false;
      for (const RequestInput& input : random_.inputs()) present = present || input.side == side;
      (user ? result_.has_user_inputs : result_.has_candidate_inputs) = present;
      bool moved = false;
      for (int attempt = 0; attempt < 3 && present && !moved; ++attempt) {
        Tensors inputs = main.inputs;
        const Tensors other = random_.draw(main.users, main.candidates);
        for (std::size_t i = 0; i < inputs.size(); ++i) {
          if (random_.inputs()[i].side != side) continue;
          // Open sizes of a request file may differ from drawn ones: reversed rows move the score as well.
          const bool bags = random_.inputs()[i].bags != RequestInput::Bags::kNone;  // values and offsets of one draw
          inputs[i] = bags || other[i].sizes() == inputs[i].sizes() ? other[i] : inputs[i].flip({0});
        }
        const Tensors outputs = run(*original_, calls(inputs));
        for (std::size_t o = 0; o < base.size(); ++o) moved = moved || largest_difference(base[o], outputs[o]) > 0;
      }
      (user ? result_.user_inputs_move_scores : result_.candidate_inputs_move_scores) = moved;
    }
  }

  Tensors reference_outputs(const std::vector<OriginalCall>& inputs) {
    if (!reference_) return {};
    try {
      return run(*reference_, inputs);
    } catch (const std::exception& error) {
      result_.float64 = false;
      result_.why_not_float64 = error.what();
      reference_.reset();
      return {};
    }
  }

  void measure(const Case& c, std::vector<Measured>& measured) {
    const std::vector<OriginalCall> broadcast = calls(c.inputs);
    Tensors original;
    try {
      original = run(*original_, broadcast);
    } catch (const std::exception& error) {
      if (measured.empty()) throw;
      result_.skipped.push_back(fmt::format("{} users, {} candidates: {}", c.users, c.candidates, error.what()));
      return;
    }
    const Tensors transformed = run(*transformed_, c.inputs);
    const Tensors reference = reference_outputs(broadcast);
    if (original.size() != transformed.size()) {
      fail("the original has {} outputs, the transformed archive {}", original.size(), transformed.size());
    }
    for (std::size_t o = 0; o < original.size(); ++o) {
      Measured m;
      m.check.mapping = c.mapping;
      m.check.users = c.users;
      m.check.candidates = c.candidates;
      m.check.output = names_[o];
      if (original[o].sizes() != transformed[o].sizes()) {
        m.check.original_error = 0;
        m.check.transformed_error = std::numeric_limits<double>::infinity();
        m.floating = false;
        measured.push_back(std::move(m));
        continue;
      }
      m.floating = at::isFloatingType(original[o].scalar_type());
      m.check.nan_agree = original[o].isnan().eq(transformed[o].isnan()).all().item<bool>();
      m.check.range = spread(original[o]);
      m.slack = kSlackUlps * epsilon(original[o].scalar_type()) * largest_value(original[o]);
      if (m.floating && !reference.empty()) {
        m.check.original_error = largest_difference(original[o], reference[o]);
        m.check.transformed_error = largest_difference(transformed[o], reference[o]);
      } else {
        m.check.transformed_error = largest_difference(original[o], transformed[o]);
      }
      measured.push_back(std::move(m));
    }
  }

  // The original's own error is the largest over all cases: on a few rows it may be nothing by chance.
  void judge(std::vector<Measured>& measured) {
    std::map<std::string, double> own_error;
    std::map<std::string, double> range;
    for (const Measured& m : measured) {
      own_error[m.check.output] = std::max(own_error[m.check.output], m.check.original_error);
      range[m.check.output] = std::max(range[m.check.output], m.check.range);
    }
    for (Measured& m : measured) {
      VerifyCheck& check = m.check;
      const double own = own_error[check.output];
      if (!m.floating) {
        check.allowed = 0;
      } else if (result_.float64) {
        check.allowed = kRatio * own + m.slack;
        if (check.transformed_error > 0) {
          result_.worst_ratio =
              std::max(result_.worst_ratio, check.transformed_error / std::max(own, m.slack / kRatio));
        }
      } else {
        check.allowed = kWithoutReference * range[check.output] + m.slack;
      }
      check.passed = check.nan_agree && check.transformed_error <= check.allowed;
      result_.checks.push_back(check);
    }
  }

  const graph::Archive& original_archive_;
  const VerifyOptions& options_;
  c10::Device device_;
  graph::Specification specification_;
  RandomInputs random_;
  std::vector<std::string> names_;
  std::vector<std::int64_t> candidate_axes_;  // of each output
  std::unique_ptr<Engine> original_;
  std::unique_ptr<Engine> transformed_;
  std::unique_ptr<Engine> reference_;
  bool draws_ = false;  // random numbers: from the same seed in every run
  VerifyResult result_;
};

}  // namespace

bool VerifyResult::passed(bool allow_dead) const {
  const bool all = std::all_of(checks.begin(), checks.end(), [](const VerifyCheck& c) { return c.passed; });
  return !checks.empty() && all && (allow_dead || !dead());
}

VerifyResult verify(const graph::Archive& original, const graph::Archive& transformed, const VerifyOptions& options) {
  const c10::InferenceMode inference;
  return Verifier(original, transformed, options).run();
}

}  // namespace ikbo::runtime
