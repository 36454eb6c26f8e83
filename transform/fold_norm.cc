// A batch norm with running statistics behind a linear layer is a scale and a shift of every feature: they go into the
// layer's weight and bias. W'[m] = s[m] W[m], b' = s (b - mean) + beta, s = gamma / sqrt(var + eps), in float64.
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <set>

#include "graph/error.h"
#include "transform/rules.h"
#include "transform/simplify.h"

namespace ikbo::transform {
namespace {

using graph::Argument;
using graph::Node;
using graph::TensorArg;

const std::string* tensor(const Node& node, const char* argument) {
  const Argument* found = node.find(argument);
  const auto* t = found != nullptr ? std::get_if<TensorArg>(found) : nullptr;
  return t != nullptr ? &t->name : nullptr;
}

class Folder {
 public:
  Folder(const graph::Archive& source, Builder& builder) : builder_(builder), reads_(builder.graph) {
    for (const graph::InputSpec& spec : source.program.input_specs) {
      for (const auto* table : {&source.weights, &source.constants}) {
        const auto it = table->find(spec.target);
        if (it == table->end()) continue;
        for (const std::string& name : graph::value_names(spec.value)) weights_[name] = {spec.target, &it->second};
      }
    }
    for (const Builder::NewParameter& p : builder.parameters()) made_.emplace(p.value, p);
    for (const auto& [value, p] : made_) weights_[value] = {p.target, &p.weight};
  }

  void run() {
    Renaming renaming;
    std::set<std::string> gone;
    for (Node& node : builder_.graph.nodes) {
      const bool ikbo = node.target == "torch.ops.ikbo.linear.default";
      if (!ikbo && node.target != "torch.ops.aten.linear.default") continue;
      const Node* norm = reads_.only_reader(graph::output_names(node)[0]);
      if (norm == nullptr || !fold(node, *norm, ikbo)) continue;
      renaming.names[graph::output_names(*norm)[0]] = graph::output_names(node)[0];
      gone.insert(norm->name);
    }
    renaming.drop(builder_.graph, gone);
  }

 private:
  struct Known {
    std::string target;
    const graph::Weight* weight = nullptr;
  };

  std::optional<at::Tensor> contents(const std::string* value) const {
    if (value == nullptr) return std::nullopt;
    const auto it = weights_.find(*value);
    return it == weights_.end() ? std::nullopt
                                : std::optional(graph::weight_tensor(*it->second.weight).to(at::kDouble));
  }

  bool fold(Node& linear, const Node& norm, bool ikbo) {
    const std::string op = aten_name(norm.target);
    if (op != "_native_batch_norm_legit_no_training" && op != "batch_norm") return false;
    if (op == "batch_norm") {
      const Argument* training = norm.find("training");
      if (training == nullptr || *training != Argument(false)) return false;
    }
    const graph::TensorMeta& meta = builder_.meta(graph::output_names(linear)[0]);
    const bool exact = meta.dtype == graph::DType::kFloat32 || meta.dtype == graph::DType::kFloat64;
    if (!exact || meta.sizes.size() != 2) return false;
    if (ikbo && *linear.find("activation") != Argument(std::string("none"))) return false;
    const auto results = graph::output_names(norm);
    if (std::any_of(results.begin() + 1, results.end(), [&](const auto& r) { return reads_.is_read(r); })) return false;

    const auto mean = contents(tensor(norm, "running_mean"));
    const auto variance = contents(tensor(norm, "running_var"));
    const auto* eps = std::get_if<double>(norm.find("eps"));
    if (!mean || !variance || norm.find("eps") == nullptr || eps == nullptr) return false;
    at::Tensor scale = (*variance + *eps).rsqrt();
    at::Tensor shift = mean->neg();
    for (const char* name : {"weight", "bias"}) {
      if (tensor(norm, name) != nullptr && !contents(tensor(norm, name))) return false;
    }
    const std::string* bias = tensor(linear, "bias");
    if (bias != nullptr) {
      const auto own = contents(bias);
      if (!own) return false;
      shift = shift + *own;
    }
    if (tensor(norm, "weight") != nullptr) scale = scale * *contents(tensor(norm, "weight"));
    shift = shift * scale;
    if (tensor(norm, "bias") != nullptr) shift = shift + *contents(tensor(norm, "bias"));

    std::vector<std::string*> weights;
    for (graph::NamedArgument& a : linear.inputs) {
      if (a.name == "weight" || a.name == "w_cand") weights.push_back(&std::get<TensorArg>(a.value).name);
      if (a.name != "w_bcast") continue;
      for (std::string& name : std::get<graph::TensorListArg>(a.value).names) weights.push_back(&name);
    }
    for (const std::string* name : weights) {
      if (!weights_.contains(*name)) return false;
    }
    const at::ScalarType type = graph::scalar_type(meta.dtype);
    for (std::string* name : weights) {
      const at::Tensor scaled = *contents(name) * scale.unsqueeze(1);
      *name = builder_.parameter(weights_.at(*name).target + "_ikbo_norm", scaled.to(type));
    }
    const std::string target = weights_.at(*tensor(norm, "running_mean")).target + "_ikbo_bias";
    const Argument shifted = TensorArg{builder_.parameter(target, shift.to(type))};
    const auto place =
        std::find_if(linear.inputs.begin(), linear.inputs.end(), [](const auto& a) { return a.name == "bias"; });
    if (place != linear.inputs.end()) {
      place->value = shifted;
    } else {
      linear.inputs.push_back({"bias", shifted, 1});
    }
    return true;
  }

  Builder& builder_;
  const Reads reads_;
  std::map<std::string, Known> weights_;
  std::map<std::string, Builder::NewParameter> made_;
};

}  // namespace

void fold_norms(const graph::Archive& source, Builder& builder) {
  Folder(source, builder).run();
}

}  // namespace ikbo::transform
