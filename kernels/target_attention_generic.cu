#include "kernels/target_attention.h"
#include "kernels/target_attention_rows.cuh"

namespace ikbo::kernels {
namespace {

constexpr int kMaxDim = 256;
constexpr int kDimOfThread = kMaxDim / kLanes;

// A block takes up to 32 seeds of one candidate and head; 8 threads share a row.
template <typename T>
__global__ __launch_bounds__(kThreads) void generic_attention_kernel(const __grid_constant__ TargetAttentionProblem p,
                                                                     int64_t tasks, int stride) {
  using Sum = SumOf<T>;
  constexpr int kTileKeys = kKeys<Sum>;
  constexpr int kKeysOfThread = kTileKeys / kLanes;
  extern __shared__ __align__(16) unsigned char memory[];
  Sum* const queries = reinterpret_cast<Sum*>(memory);  // (kRows, stride)
  Sum* const keys = queries + kRows * stride;           // (kTileKeys, stride)
  Sum* const values = keys + kTileKeys * stride;        // (kTileKeys, stride)
  Sum* const weights = values + kTileKeys * stride;     // (kRows, kTileKeys + 1)
  const int row = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t row_blocks = (p.seeds + kRows - 1) / kRows;
  const int64_t group = p.q_heads / p.kv_heads;

  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t seed = task % row_blocks * kRows;
    const int64_t head = task / row_blocks % p.q_heads;
    const int64_t candidate = task / row_blocks / p.q_heads;
    const int64_t rows = min(int64_t{kRows}, p.seeds - seed);
    const int64_t user = p.candidate_to_user[candidate];
    const bool known = user >= 0 && user < p.users;
    const History history = known ? history_of(p, user) : History{0, 0};

    Sum sum[kDimOfThread] = {};
    Sum highest = -infinity<Sum>();
    Sum total = 0;
    if (history.length > 0) {
      const T* const from = static_cast<const T*>(p.q) + candidate * p.q_candidate_stride + seed * p.q_seed_stride +
                            head * p.q_head_stride;
      load_rows<T>([&](int r) { return r < rows ? from + r * p.q_seed_stride : nullptr; }, kRows, p.head_dim, queries,
                   stride);
    }
    for (int64_t key = 0; key < history.length; key += kTileKeys) {
      const int64_t count = min(int64_t{kTileKeys}, history.length - key);
      load_history(keys_of<T>(p, user, head / group), p.k_row_stride, history.first + key, count, kTileKeys, p.head_dim,
                   keys, stride);
      load_history(values_of<T>(p, user, head / group), p.v_row_stride, history.first + key, count, kTileKeys,
                   p.head_dim, values, stride);
      __syncthreads();
      Sum logit[kKeysOfThread];
      Sum tile_highest = -infinity<Sum>();
#pragma unroll
      for (int i = 0; i < kKeysOfThread; ++i) {
        const int at = lane + i * kLanes;
        logit[i] = at < count ? dot(queries + row * stride, keys + at * stride, p.head_dim) * static_cast<Sum>(p.scale)
                              : -infinity<Sum>();
        tile_highest = logit[i] > tile_highest || logit[i] != logit[i] ? logit[i] : tile_highest;
      }
      const Sum next_highest =
          max_of_row(tile_highest > highest || tile_highest != tile_highest ? tile_highest : highest);
      const Sum correction = next_highest == highest ? Sum{1} : exp(highest - next_highest);
      highest = next_highest;
      Sum tile_total = 0;
#pragma unroll
      for (int i = 0; i < kKeysOfThread; ++i) {
        const int at = lane + i * kLanes;
        const Sum weight = at < count ? exp(logit[i] - highest) : Sum{0};
        tile_total += weight;
        weights[row * (kTileKeys + 1) + at] = weight;
      }
      total = total * correction + sum_of_row(tile_total);
      __syncwarp();  // a row's lanes are of one warp
#pragma unroll
      for (int i = 0; i < kDimOfThread; ++i) sum[i] *= correction;
      for (int at = 0; at < count; ++at) {
        const Sum weight = weights[row * (kTileKeys + 1) + at];
#pragma unroll
        for (int i = 0; i < kDimOfThread; ++i) {
          const int d = lane + i * kLanes;
          if (d < p.head_dim) sum[i] = fma(weight, values[at * stride + d], sum[i]);
        }
      }
      __syncthreads();
    }
    if (row < rows) {
      const int64_t at = (candidate * p.seeds + seed + row) * p.q_heads + head;
      T* const to = static_cast<T*>(p.out) + at * p.head_dim;
#pragma unroll
      for (int i = 0; i < kDimOfThread; ++i) {
        const int d = lane + i * kLanes;
        const Sum value = !known ? quiet_nan<Sum>() : (history.length > 0 ? sum[i] / total : Sum{0});
        if (d < p.head_dim) to[d] = narrow<T>(value);
      }
      if (p.logsumexp != nullptr && lane == 0) {
        const Sum value = !known ? quiet_nan<Sum>() : (history.length > 0 ? highest + log(total) : -infinity<Sum>());
        static_cast<Sum*>(p.logsumexp)[at] = value;
      }
    }
  }
}

void require(bool condition, const std::string& what) {
  if (!condition) throw std::invalid_argument("target_attention: " + what);
}

}  // namespace

void check_target_attention(const TargetAttentionProblem& problem) {
  require(problem.candidates >= 0 && problem.seeds >= 0 && problem.users >= 0 && problem.length >= 0,
          "a size is negative");
  require(problem.kv_heads >= 1 && problem.q_heads % problem.kv_heads == 0,
          "q_heads is " + std::to_string(problem.q_heads) + ", not a multiple of kv_heads, " +
              std::to_string(problem.kv_heads));
  require(problem.head_dim >= 1 && problem.head_dim <= kMaxDim,
          "head_dim is " + std::to_string(problem.head_dim) + ", expected 1 to " + std::to_string(kMaxDim));
  require(problem.kv_lengths == nullptr || problem.kv_offsets == nullptr, "kv_lengths and kv_offsets are both given");
}

void target_attention_generic(const TargetAttentionProblem& problem, cudaStream_t stream) {
  check_target_attention(problem);
  require(problem.self_q == nullptr, "self_q is given, which only the kernels over a list of tiles know");
  const int64_t tasks = problem.candidates * problem.q_heads * ((problem.seeds + kRows - 1) / kRows);
  if (tasks == 0) return;
  const int stride = padded_dim(problem.head_dim);
  with_scalar(problem.type, [&](auto scalar) {
    using T = decltype(scalar);
    using Sum = SumOf<T>;
    const size_t bytes = sizeof(Sum) * ((kRows + 2 * kKeys<Sum>)*stride + kRows * (kKeys<Sum> + 1));
    allow_shared_memory(generic_attention_kernel<T>, bytes);
    generic_attention_kernel<T><<<grid_of(tasks), kThreads, bytes, stream>>>(problem, tasks, stride);
  });
  check_launch("target_attention");
}

}  // namespace ikbo::kernels
