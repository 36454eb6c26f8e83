#include "ops/segment_sum.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace ikbo {

CandidatesByUser group_by_user(const at::Tensor& candidate_to_user, int64_t num_users) {
  const int32_t* user = candidate_to_user.const_data_ptr<int32_t>();
  const int64_t batch = candidate_to_user.numel();
  CandidatesByUser groups{std::vector<int64_t>(static_cast<size_t>(num_users) + 1),
                          std::vector<int64_t>(static_cast<size_t>(batch))};
  for (int64_t b = 0; b < batch; ++b) ++groups.begin[static_cast<size_t>(user[b]) + 1];
  for (size_t u = 0; u < static_cast<size_t>(num_users); ++u) groups.begin[u + 1] += groups.begin[u];
  std::vector<int64_t> next(groups.begin.begin(), groups.begin.end() - 1);
  for (int64_t b = 0; b < batch; ++b) {
    groups.candidate[static_cast<size_t>(next[static_cast<size_t>(user[b])]++)] = b;
  }
  return groups;
}

at::Tensor segment_sum(const at::Tensor& values, const CandidatesByUser& groups) {
  const int64_t num_users = static_cast<int64_t>(groups.begin.size()) - 1;
  const int64_t features = values.size(1);
  at::Tensor out = at::zeros({num_users, features}, values.options());
  if (features == 0 || num_users == 0) return out;
  // Columns are split too: one user with all candidates must not leave the other threads idle.
  constexpr int64_t kColumns = 64;
  // Partial sums are folded this often: the rounding error of a long chain grows with its length.
  constexpr int64_t kFold = 128;
  const int64_t blocks = (features + kColumns - 1) / kColumns;
  const int64_t mean_work = std::max<int64_t>(1, values.size(0) / num_users) * kColumns;
  AT_DISPATCH_FLOATING_TYPES(values.scalar_type(), "ikbo_segment_sum", [&] {
    const scalar_t* from = values.const_data_ptr<scalar_t>();
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, num_users * blocks, std::max<int64_t>(1, 32768 / mean_work), [&](int64_t first, int64_t last) {
      for (int64_t task = first; task < last; ++task) {
        const int64_t u = task / blocks;
        const int64_t column = task % blocks * kColumns;
        const int64_t columns = std::min(kColumns, features - column);
        scalar_t* sum = to + u * features + column;
        const int64_t end = groups.begin[static_cast<size_t>(u) + 1];
        for (int64_t i = groups.begin[static_cast<size_t>(u)]; i < end; i += kFold) {
          scalar_t partial[kColumns] = {};
          for (int64_t j = i; j < std::min(end, i + kFold); ++j) {
            const scalar_t* row = from + groups.candidate[static_cast<size_t>(j)] * features + column;
            for (int64_t c = 0; c < columns; ++c) partial[c] += row[c];
          }
          for (int64_t c = 0; c < columns; ++c) sum[c] += partial[c];
        }
      }
    });
  });
  return out;
}

}  // namespace ikbo
