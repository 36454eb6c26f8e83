// Operators that reduce, scan, sort or normalise over dimensions.
#include <algorithm>

#include "transform/rules.h"

namespace ikbo::transform {
namespace {

// The dimensions an operator works over, counted from the front; nothing for "all of them" or what is not known.
std::optional<std::vector<int>> worked_dims(const RuleInput& in, int rank) {
  auto dims = in.integers("dim");
  if (in.node().find("dim") == nullptr) {
    // Operators with a default dimension leave it out of the archive.
    const std::string name = aten_name(in.node().target);
    if (name == "topk" || name == "sort" || name == "argsort" || name == "kthvalue") {
      dims = std::vector<std::int64_t>{-1};
    } else if (name == "glu" || name == "fft_fft" || name == "fft_ifft" || name == "fft_rfft" || name == "fft_irfft" ||
               name == "fft_hfft" || name == "fft_ihfft") {
      dims = std::vector<std::int64_t>{-1};
    }
  }
  if (!dims || dims->empty()) return std::nullopt;
  std::vector<int> result;
  for (const std::int64_t d : *dims) {
    if (d < -rank || d >= rank) return std::nullopt;
    result.push_back(static_cast<int>(d < 0 ? d + rank : d));
  }
  return result;
}

// Works over other dimensions than the batch; results have the operand's rank (kept) or lack those dimensions.
RuleResult over_other_dims(const RuleInput& in) {
  const std::string* self = in.tensor("self") != nullptr ? in.tensor("self") : in.tensor("input");
  const Batch* b = self != nullptr ? in.batch(*self) : nullptr;
  if (b == nullptr) return std::nullopt;
  if (in.operands().size() != 1) return std::nullopt;
  const int rank = in.rank(*self);
  const auto dims = worked_dims(in, rank);
  if (!dims || std::find(dims->begin(), dims->end(), b->axis) != dims->end()) return std::nullopt;
  std::vector<std::optional<Batch>> results;
  for (const std::string& name : in.results()) {
    int axis = b->axis;
    if (in.rank(name) != rank) {
      axis -= static_cast<int>(std::count_if(dims->begin(), dims->end(), [&](int d) { return d < b->axis; }));
    }
    results.push_back(Batch{axis, b->inner});
  }
  return results;
}

RuleResult layer_norm(const RuleInput& in) {
  const Batch* b = in.batch_of("input");
  const auto shape = in.integers("normalized_shape");
  if (b == nullptr || !shape || !in.shared("weight") || !in.shared("bias")) return std::nullopt;
  if (b->axis >= in.rank(*in.tensor("input")) - static_cast<int>(shape->size())) return std::nullopt;
  return std::vector<std::optional<Batch>>(in.results().size(), *b);  // out, and mean and rstd of the same leading axes
}

// With running statistics every row is normalised alone; with the batch's own statistics rows mix.
RuleResult batch_norm(const RuleInput& in) {
  const Batch* b = in.batch_of("input");
  if (b == nullptr || b->axis == 1) return std::nullopt;  // 1 is the channel
  const std::string name = aten_name(in.node().target);
  if (name != "_native_batch_norm_legit_no_training") {
    const char* flag = in.node().find("training") != nullptr ? "training" : "train";
    if (in.boolean(flag) != false) return std::nullopt;
  }
  if (in.tensor("running_mean") == nullptr || in.tensor("running_var") == nullptr) return std::nullopt;
  for (const char* argument : {"weight", "bias", "running_mean", "running_var"}) {
    if (!in.shared(argument)) return std::nullopt;
  }
  std::vector<std::optional<Batch>> results(in.results().size());
  results[0] = *b;  // the others are empty statistics
  return results;
}

RuleResult group_norm(const RuleInput& in) {
  const Batch* b = in.batch_of("input");
  if (b == nullptr || b->axis != 0 || !in.shared("weight") || !in.shared("bias")) return std::nullopt;
  return std::vector<std::optional<Batch>>(in.results().size(), *b);
}

}  // namespace

void add_reduction_rules(RuleTable& table) {
  for (const char* name : {"sum",
                           "mean",
                           "amax",
                           "amin",
                           "prod",
                           "any",
                           "all",
                           "var",
                           "std",
                           "var_mean",
                           "std_mean",
                           "logsumexp",
                           "norm",
                           "argmax",
                           "argmin",
                           "max",
                           "min",
                           "median",
                           "nanmedian",
                           "mode",
                           "count_nonzero",
                           "nansum",
                           "nanmean",
                           "aminmax",
                           "cumsum",
                           "cumprod",
                           "logcumsumexp",
                           "cummax",
                           "cummin",
                           "sort",
                           "argsort",
                           "topk",
                           "kthvalue",
                           "softmax",
                           "_softmax",
                           "log_softmax",
                           "_log_softmax",
                           "glu",
                           "fft_fft",
                           "fft_ifft",
                           "fft_rfft",
                           "fft_irfft",
                           "fft_hfft",
                           "fft_ihfft",
                           "_fft_c2c",
                           "_fft_r2c",
                           "_fft_c2r",
                           "linalg_vector_norm",
                           "special_softmax",
                           "special_log_softmax"}) {
    table[name] = {over_other_dims};
  }
  for (const char* name : {"layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"})
    table[name] = {layer_norm};
  for (const char* name :
       {"batch_norm", "_native_batch_norm_legit_no_training", "native_batch_norm", "_native_batch_norm_legit"}) {
    table[name] = {batch_norm};
  }
  table["group_norm"] = {group_norm};
}

}  // namespace ikbo::transform
