#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "graph/archive.h"
#include "graph/specification.h"

namespace ikbo::runtime {

/// One user and the candidates to score for them, as tensors of the model's types. Bags of many lengths: a user's is
/// the values alone (their offsets are no part of a request); those of the candidates are values and offsets, the
/// latter counted from 0 and in the form that the model takes.
struct Request {
  std::string id;
  std::map<std::string, at::Tensor> user;        // graph value -> one row, without the batch axis
  std::map<std::string, at::Tensor> candidates;  // graph value -> [count, ...]
  std::map<std::string, at::Tensor> shared;      // graph value -> the tensor of the whole call
  std::int64_t count = 0;                        // of candidates

  // What the file says beside the inputs; empty where it says nothing.
  std::vector<double> labels;                            // [count]
  std::map<std::string, std::vector<double>> baselines;  // other scores of the same candidates, [count] each
  std::vector<std::string> names;                        // of the candidates, [count]
  std::vector<std::string> history_names;
};

/// One input of a transformed model, as a request gives it.
struct RequestInput {
  std::string value;                  // in the graph
  std::string name;                   // for messages, as the author knows it
  std::vector<std::string> accepted;  // names a request may use for it
  graph::Side side = graph::Side::kShared;
  graph::DType dtype = graph::DType::kFloat32;
  std::vector<std::int64_t> row;  // sizes without the batch axis (all of them when shared); -1: any
  // Of bags of many lengths: `row` is that of one value.
  enum class Bags { kNone, kValues, kOffsets } bags = Bags::kNone;
};

/// The inputs of a transformed archive, in the graph's order, `candidate_to_user` among them.
class RequestLayout {
 public:
  RequestLayout(const graph::Program& program, const graph::Specification& specification);
  const std::vector<RequestInput>& inputs() const { return inputs_; }
  const std::vector<graph::JaggedInput>& jagged() const { return jagged_; }
  /// The bags that an input is the values of; nullptr for other inputs.
  const graph::JaggedInput* bags_of(const std::string& value) const;
  /// Where an input stands in inputs(). Throws ikbo::Error where there is none.
  std::size_t position(const std::string& value) const;

 private:
  std::vector<RequestInput> inputs_;
  std::vector<graph::JaggedInput> jagged_;
};

/// Reads requests. Throws ikbo::Error that names the request, the input and the position of what is missing, unknown,
/// ragged, or of the wrong type or length.
///
/// {"shared": {...},                        inputs without a batch axis, where the model has some; here or in a request
///  "requests": [{"id": "user 196",
///    "user": {"user_id": 196, "hist_film": [...]},           one row, without a batch axis
///    "candidates": {"film": [N], "genres": [[...], ...]},    N first
///    "count": N,                          only where the model has no candidate input
///    "labels": [N], "baselines": {"popularity": [N]}, "names": [N], "history_names": [...]}]}   all optional
///
/// Bags of many lengths are lists: a user's is a list of values, those of the candidates are one list a candidate;
/// their offsets are not given. Inputs go by the name, the path or the graph value; the parts of a packed input by the
/// input's name too, the columns of each part in their order.
std::vector<Request> parse_requests(const graph::Json& json, const RequestLayout& layout);
std::vector<Request> read_requests(const std::filesystem::path& path, const RequestLayout& layout);

/// Requests joined into one call: users are the requests that have candidates, one row each.
struct Batch {
  std::vector<at::Tensor> inputs;     // in the order of the layout; empty where no request has a candidate
  std::vector<std::int64_t> offsets;  // candidates of request i are [offsets[i], offsets[i + 1])
  std::int64_t users = 0;
  std::int64_t candidates() const { return offsets.back(); }
};
Batch join_requests(const RequestLayout& layout, std::span<const Request> requests);

/// A call of the original model. A model that spreads one user's row over its candidates by itself is called once a
/// user, with `candidates` (int64) saying which ones; others once for all of them, with `candidates` undefined. Where a
/// user has fewer than the original says that it takes, the last one is there several times.
struct OriginalCall {
  std::vector<at::Tensor> inputs;
  at::Tensor candidates;
};

/// The same rows for the original model: every request-only row copied to each of its user's candidates, unless the
/// model does so itself. `inputs` are those of the transformed archive.
std::vector<OriginalCall> original_calls(const graph::Program& original, const graph::Specification& specification,
                                         const RequestLayout& layout, std::span<const at::Tensor> inputs);

}  // namespace ikbo::runtime
