#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "graph/archive.h"
#include "graph/specification.h"
#include "runtime/ids.h"
#include "runtime/requests.h"

namespace ikbo::runtime {

/// Random inputs that a transformed archive accepts, from its own metadata: valid ids where an input is used as an
/// index, normal numbers, and for other integers what the sample inputs show (0 or 1 where there are none). A position
/// of a floating input that holds whole numbers in every sample (a count or a length in a packed matrix) is drawn
/// likewise.
class RandomInputs {
 public:
  RandomInputs(const graph::Archive& transformed, const graph::Specification& specification, std::uint64_t seed);

  /// Tensors for every input, in the graph's order; candidate_to_user is left undefined.
  std::vector<at::Tensor> draw(std::int64_t users, std::int64_t candidates);
  /// A mapping of `candidates` to `users`. "even": blocks of equal length; "uneven": sorted, random lengths;
  /// "unsorted": any order, with at least one user left out where there are two.
  at::Tensor mapping(const std::string& kind, std::int64_t users, std::int64_t candidates);

  const std::vector<RequestInput>& inputs() const { return layout_.inputs(); }
  const RequestLayout& layout() const { return layout_; }

 private:
  struct Bounds {
    std::int64_t min = 0;
    std::int64_t max = 1;
  };
  void note_whole_numbers(std::size_t input, const at::Tensor& sample);
  at::Tensor draw_input(std::size_t input, const std::vector<std::int64_t>& sizes);
  std::int64_t uniform(std::int64_t min, std::int64_t max);

  RequestLayout layout_;
  std::vector<graph::TensorMeta> metas_;
  std::vector<Bounds> bounds_;                        // of integers that are no ids
  std::map<std::size_t, std::vector<Bounds>> whole_;  // of floating inputs, by position in a row; min > max: any number
  std::vector<IdRange> ids_;
  std::map<std::string, std::int64_t> symbols_;  // sizes other than the batches
  std::string user_symbol_;
  std::string candidate_symbol_;
  std::mt19937_64 random_;
};

}  // namespace ikbo::runtime
