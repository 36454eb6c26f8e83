// The transpose of a row lookup: candidates' rows summed by user.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace ikbo {

/// Candidates in user order: those of user u stand at [begin[u], begin[u + 1]) of `candidate`, ascending.
struct CandidatesByUser {
  std::vector<int64_t> begin;      // (num_users + 1)
  std::vector<int64_t> candidate;  // (B_cand)
};

/// Sorts candidates by user in linear time. `candidate_to_user` is a contiguous int32 CPU tensor of valid values.
CandidatesByUser group_by_user(const at::Tensor& candidate_to_user, int64_t num_users);

/// out[u] = Σ values[b] over the candidates b of user u; (num_users, F) in the type of `values`, zeros for a user
/// without candidates. `values` is contiguous (B_cand, F) of float or double. Every element is summed in the order of
/// its candidates, so the result does not depend on the number of threads.
at::Tensor segment_sum(const at::Tensor& values, const CandidatesByUser& groups);

}  // namespace ikbo
