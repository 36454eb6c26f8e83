#include "kernels/target_attention_backward.h"
#include "kernels/target_attention_rows.cuh"

namespace ikbo::kernels {
namespace {

constexpr int kMaxDim = 256;

// A tile's query rows and what belongs to them, in shared memory.
template <typename Sum>
struct QueryTile {
  Sum* queries;    // (kRows, stride)
  Sum* grads;      // (kRows, stride), of the output
  Sum* logsumexp;  // (kRows)
  Sum* delta;      // (kRows), the row's sum of grad times out, less the gradient of its log-sum-exp
};

// Row r is row_number(r) of (candidates, seeds, q_heads); a negative number is no row: zeros, and a weight of 0.
template <typename T, typename RowNumber>
__device__ void load_queries(const TargetAttentionGradients& g, RowNumber&& row_number, const QueryTile<SumOf<T>>& tile,
                             int stride) {
  using Sum = SumOf<T>;
  const TargetAttentionProblem& p = g.forward;
  const auto* const grad_out = static_cast<const T*>(g.grad_out);
  const auto query = [&](int64_t number) {
    const int64_t head = number % p.q_heads;
    const int64_t seed = number / p.q_heads % p.seeds;
    const int64_t candidate = number / p.q_heads / p.seeds;
    return static_cast<const T*>(p.q) + candidate * p.q_candidate_stride + seed * p.q_seed_stride +
           head * p.q_head_stride;
  };
  load_rows<T>([&](int r) { return row_number(r) < 0 ? nullptr : query(row_number(r)); }, kRows, p.head_dim,
               tile.queries, stride);
  load_rows<T>([&](int r) { return row_number(r) < 0 ? nullptr : grad_out + row_number(r) * p.head_dim; }, kRows,
               p.head_dim, tile.grads, stride);
  const int row = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t number = row_number(row);
  Sum delta = 0;
  if (number >= 0) {
    const auto* const out = static_cast<const T*>(p.out) + number * p.head_dim;
    for (int64_t d = lane; d < p.head_dim; d += kLanes) {
      delta = fma(widen(grad_out[number * p.head_dim + d]), widen(out[d]), delta);
    }
  }
  delta = sum_of_row(delta);
  if (lane == 0) {
    if (number >= 0 && g.grad_logsumexp != nullptr) delta -= static_cast<const Sum*>(g.grad_logsumexp)[number];
    tile.delta[row] = delta;
    tile.logsumexp[row] = number >= 0 ? static_cast<const Sum*>(p.logsumexp)[number] : infinity<Sum>();
  }
}

// The weight of key `at` for query `row`, and the gradient of its logit, scaled.
template <typename Sum>
__device__ __forceinline__ void weigh(const QueryTile<Sum>& tile, const Sum* keys, const Sum* values, int row, int at,
                                      int64_t dim, int stride, Sum scale, Sum& weight, Sum& grad_logit) {
  const Sum logit = dot(tile.queries + row * stride, keys + at * stride, dim) * scale;
  weight = exp(logit - tile.logsumexp[row]);
  grad_logit = weight * (dot(tile.grads + row * stride, values + at * stride, dim) - tile.delta[row]) * scale;
}

template <typename Sum>
struct Memory {
  QueryTile<Sum> tile;
  Sum* keys;         // (kKeys, stride)
  Sum* values;       // (kKeys, stride)
  Sum* weights;      // (kRows, kKeys + 1)
  Sum* grad_logits;  // (kRows, kKeys + 1)
};

template <typename Sum>
constexpr int kWeights = kRows*(kKeys<Sum> + 1);

template <typename Sum>
size_t memory_bytes(int stride) {
  return sizeof(Sum) * (2 * (kRows + kKeys<Sum>)*stride + 2 * kRows + 2 * kWeights<Sum>);
}

template <typename Sum>
__device__ Memory<Sum> memory_at(unsigned char* base, int stride) {
  Sum* next = reinterpret_cast<Sum*>(base);
  const auto take = [&](int count) {
    Sum* const taken = next;
    next += count;
    return taken;
  };
  Memory<Sum> memory;
  memory.tile = {take(kRows * stride), take(kRows * stride), take(kRows), take(kRows)};
  memory.keys = take(kKeys<Sum> * stride);
  memory.values = take(kKeys<Sum> * stride);
  memory.weights = take(kWeights<Sum>);
  memory.grad_logits = take(kWeights<Sum>);
  return memory;
}

// A block takes up to 32 seeds of one candidate and head; 8 threads share a row.
template <typename T>
__global__ __launch_bounds__(kThreads) void grad_queries_kernel(const __grid_constant__ TargetAttentionGradients g,
                                                                int64_t tasks, int stride) {
  using Sum = SumOf<T>;
  constexpr int kTileKeys = kKeys<Sum>;
  constexpr int kDimOfThread = kMaxDim / kLanes;
  extern __shared__ __align__(16) unsigned char bytes[];
  const Memory<Sum> memory = memory_at<Sum>(bytes, stride);
  const TargetAttentionProblem& p = g.forward;
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
    const auto number = [&](int r) -> int64_t {
      return r < rows ? (candidate * p.seeds + seed + r) * p.q_heads + head : -1;
    };
    Sum sum[kDimOfThread] = {};
    if (history.length > 0) load_queries<T>(g, number, memory.tile, stride);
    for (int64_t key = 0; key < history.length; key += kTileKeys) {
      const int64_t count = min(int64_t{kTileKeys}, history.length - key);
      load_history(keys_of<T>(p, user, head / group), p.k_row_stride, history.first + key, count, kTileKeys, p.head_dim,
                   memory.keys, stride);
      load_history(values_of<T>(p, user, head / group), p.v_row_stride, history.first + key, count, kTileKeys,
                   p.head_dim, memory.values, stride);
      __syncthreads();
      for (int at = lane; at < count; at += kLanes) {
        Sum weight, grad_logit;
        weigh(memory.tile, memory.keys, memory.values, row, at, p.head_dim, stride, static_cast<Sum>(p.scale), weight,
              grad_logit);
        memory.grad_logits[row * (kTileKeys + 1) + at] = grad_logit;
      }
      __syncwarp();  // a row's lanes are of one warp
      for (int at = 0; at < count; ++at) {
        const Sum grad_logit = memory.grad_logits[row * (kTileKeys + 1) + at];
#pragma unroll
        for (int i = 0; i < kDimOfThread; ++i) {
          const int d = lane + i * kLanes;
          if (d < p.head_dim) sum[i] = fma(grad_logit, memory.keys[at * stride + d], sum[i]);
        }
      }
      __syncthreads();
    }
    if (row < rows) {
      T* const to = static_cast<T*>(g.grad_q) + number(row) * p.head_dim;
#pragma unroll
      for (int i = 0; i < kDimOfThread; ++i) {
        const int d = lane + i * kLanes;
        if (d < p.head_dim) to[d] = narrow<T>(known ? sum[i] : quiet_nan<Sum>());
      }
    }
  }
}

// Gradients of `count` keys and values of one user and head: a pass over the query rows of all its candidates.
template <typename T>
__device__ void grad_keys(const TargetAttentionGradients& g, const Memory<SumOf<T>>& memory, int stride, int64_t user,
                          int64_t head, int64_t first, int64_t count) {
  using Sum = SumOf<T>;
  constexpr int kTileKeys = kKeys<Sum>;
  constexpr int kLanesOfKey = kThreads / kTileKeys;
  constexpr int kDimOfThread = kMaxDim / kLanesOfKey;
  const TargetAttentionProblem& p = g.forward;
  const int64_t group = p.q_heads / p.kv_heads;
  const int own_key = static_cast<int>(threadIdx.x) / kLanesOfKey;
  const int own_lane = static_cast<int>(threadIdx.x) % kLanesOfKey;
  const int row = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  load_history(keys_of<T>(p, user, head), p.k_row_stride, first, count, kTileKeys, p.head_dim, memory.keys, stride);
  load_history(values_of<T>(p, user, head), p.v_row_stride, first, count, kTileKeys, p.head_dim, memory.values, stride);

  Sum grad_k[kDimOfThread] = {};
  Sum grad_v[kDimOfThread] = {};
  const int64_t rows_of_candidate = p.seeds * group;
  const int64_t begin = g.begin[user];
  const int64_t rows = (g.begin[user + 1] - begin) * rows_of_candidate;
  for (int64_t tile_row = 0; tile_row < rows; tile_row += kRows) {
    const auto number = [&](int r) -> int64_t {
      const int64_t at = tile_row + r;
      if (at >= rows) return -1;
      const int64_t within = at % rows_of_candidate;
      return (g.order[begin + at / rows_of_candidate] * p.seeds + within / group) * p.q_heads + head * group +
             within % group;
    };
    load_queries<T>(g, number, memory.tile, stride);
    __syncthreads();
    for (int at = lane; at < kTileKeys; at += kLanes) {
      Sum weight = 0, grad_logit = 0;
      if (at < count && tile_row + row < rows) {
        weigh(memory.tile, memory.keys, memory.values, row, at, p.head_dim, stride, static_cast<Sum>(p.scale), weight,
              grad_logit);
      }
      memory.weights[row * (kTileKeys + 1) + at] = weight;
      memory.grad_logits[row * (kTileKeys + 1) + at] = grad_logit;
    }
    __syncthreads();
    const int tile_rows = static_cast<int>(min(int64_t{kRows}, rows - tile_row));
    for (int r = 0; r < tile_rows; ++r) {
      const Sum weight = memory.weights[r * (kTileKeys + 1) + own_key];
      const Sum grad_logit = memory.grad_logits[r * (kTileKeys + 1) + own_key];
#pragma unroll
      for (int i = 0; i < kDimOfThread; ++i) {
        const int d = own_lane + i * kLanesOfKey;
        if (d < p.head_dim) {
          grad_v[i] = fma(weight, memory.tile.grads[r * stride + d], grad_v[i]);
          grad_k[i] = fma(grad_logit, memory.tile.queries[r * stride + d], grad_k[i]);
        }
      }
    }
    __syncthreads();
  }
  if (own_key < count) {
    const int64_t history_row = (p.kv_offsets != nullptr ? 0 : user * p.length) + first + own_key;
    const int64_t at = (history_row * p.kv_heads + head) * p.head_dim;
#pragma unroll
    for (int i = 0; i < kDimOfThread; ++i) {
      const int d = own_lane + i * kLanesOfKey;
      if (d < p.head_dim) {
        static_cast<T*>(g.grad_k)[at + d] = narrow<T>(grad_k[i]);
        static_cast<T*>(g.grad_v)[at + d] = narrow<T>(grad_v[i]);
      }
    }
  }
  __syncthreads();
}

// The last user whose history begins at or before `row`, or 0.
__device__ int64_t user_of_row(const TargetAttentionProblem& p, int64_t row) {
  int64_t low = 0, high = p.users;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (p.kv_offsets[middle] <= row ? low : high) = middle;
  }
  return low;
}

// A block takes a tile of keys of one head: of one user where histories are padded, of all users in it where packed.
template <typename T>
__global__ __launch_bounds__(kThreads) void grad_keys_kernel(const __grid_constant__ TargetAttentionGradients g,
                                                             int64_t tasks, int stride) {
  using Sum = SumOf<T>;
  constexpr int kTileKeys = kKeys<Sum>;
  extern __shared__ __align__(16) unsigned char bytes[];
  const Memory<Sum> memory = memory_at<Sum>(bytes, stride);
  const TargetAttentionProblem& p = g.forward;
  const int64_t tiles_of_length = (p.length + kTileKeys - 1) / kTileKeys;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = task % p.kv_heads;
    const int64_t tile = task / p.kv_heads;
    const int64_t begin = tile % tiles_of_length * kTileKeys;
    if (p.kv_offsets == nullptr) {
      const int64_t user = tile / tiles_of_length;
      const History history = history_of(p, user);
      const int64_t count = min(int64_t{kTileKeys}, history.length - begin);
      if (count > 0) grad_keys<T>(g, memory, stride, user, head, begin, count);
      continue;
    }
    for (int64_t user = user_of_row(p, begin); user < p.users && p.kv_offsets[user] < begin + kTileKeys; ++user) {
      const History history = history_of(p, user);
      const int64_t first = max(begin, history.first);
      const int64_t count = min(begin + kTileKeys, history.first + history.length) - first;
      if (count > 0) grad_keys<T>(g, memory, stride, user, head, first, count);
    }
  }
}

}  // namespace

void target_attention_backward(const TargetAttentionGradients& gradients, cudaStream_t stream) {
  const TargetAttentionProblem& p = gradients.forward;
  check_target_attention(p);
  const int stride = padded_dim(p.head_dim);
  const int64_t query_tasks = p.candidates * p.q_heads * ((p.seeds + kRows - 1) / kRows);
  with_scalar(p.type, [&](auto scalar) {
    using T = decltype(scalar);
    using Sum = SumOf<T>;
    const size_t bytes = memory_bytes<Sum>(stride);
    if (query_tasks > 0) {
      allow_shared_memory(grad_queries_kernel<T>, bytes);
      grad_queries_kernel<T><<<grid_of(query_tasks), kThreads, bytes, stream>>>(gradients, query_tasks, stride);
      check_launch("target_attention_backward");
    }
    const int64_t tiles = (p.length + kKeys<Sum> - 1) / kKeys<Sum>;
    const int64_t key_tasks = tiles * p.kv_heads * (p.kv_offsets != nullptr ? std::min<int64_t>(p.users, 1) : p.users);
    if (key_tasks > 0) {
      allow_shared_memory(grad_keys_kernel<T>, bytes);
      grad_keys_kernel<T><<<grid_of(key_tasks), kThreads, bytes, stream>>>(gradients, key_tasks, stride);
      check_launch("target_attention_backward");
    }
  });
}

}  // namespace ikbo::kernels
