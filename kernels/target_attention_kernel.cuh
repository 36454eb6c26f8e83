// Target attention on the matrix unit: a persistent CTA takes tiles of 128 packed query rows of one user and key head.
//
// Four warps bring the data: one draws tiles, one copies blocks of keys and values (bulk copies), two gather the query
// rows of the next tile. Two warpgroups of 64 rows each multiply: while one has the matrix unit, the other does its
// softmax, and within a warpgroup the products with the values of one block run beside the softmax of the next. Tiles
// follow each other without a gap, where there is room for two tiles' queries: the last values of one are multiplied
// beside the first keys of the next.
#pragma once

#include "kernels/hopper/sync.h"
#include "kernels/target_attention_consumer.cuh"
#include "kernels/target_attention_loaders.cuh"
#include "kernels/target_attention_unaligned.cuh"

namespace ikbo::kernels {

template <typename T, int DIM, int KEYS, RowPath PATH>
__global__ __launch_bounds__(kAttentionThreads,
                             1) void attention_kernel(const __grid_constant__ KernelParams<PATH> params) {
  using namespace hopper;
  using Memory = KernelMemory<T, DIM, KEYS, PATH>;
  extern __shared__ __align__(1024) unsigned char bytes[];
  auto& memory = *reinterpret_cast<Memory*>(bytes);
  if (threadIdx.x == 0) {
    constexpr int kConsumerThreads = kConsumers * kWarpgroup;
    constexpr int kConsumerWarps = kConsumerThreads / 32;
    for (int i = 0; i < kTileSlots; ++i) {
      mbarrier_init(&memory.tile_full[i], 1);
      mbarrier_init(&memory.tile_empty[i], kReaders);
      for (int half = 0; half < kConsumers; ++half) mbarrier_init(&memory.q_full[half][i], kLoaders / kConsumers);
    }
    mbarrier_init(&memory.q_requested, kConsumers);
    for (int i = 0; i < Memory::kHalves; ++i) mbarrier_init(&memory.q_empty[i], kWarpgroup);
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&memory.k_full[i], 1);
      mbarrier_init(&memory.v_full[i], 1);
      mbarrier_init(&memory.k_empty[i], kConsumerWarps);
      mbarrier_init(&memory.v_empty[i], kConsumerWarps);
    }
    fence_mbarrier_init();
  } else if (threadIdx.x == 32) {
    prefetch_tensor_map(&params.k);
    prefetch_tensor_map(&params.v);
    if constexpr (PATH != RowPath::kUnaligned) {
      for (int i : {kTarget, kSelf}) {
        if (params.queries[i].piece_bits >= 0) prefetch_tensor_map(&params.q[i]);
      }
    }
  }
  if constexpr (Memory::kHasOwnList) {
    if (params.list == TileList::kOwnUsers) clear_own_list(memory);
  }
  __syncthreads();
  // What is above may run while the launch before this one ends.
  grid_dependency_wait();
  grid_dependency_launch();
  if constexpr (Memory::kHasOwnList) {
    if (params.list == TileList::kOwnUsers) {
      make_own_list(params, memory);
      __syncthreads();
      if (threadIdx.x == 0) mbarrier_arrive(&memory.tile_full[0]);
    }
  }
  // All that the launch got. A thread that multiplies keeps D / 2 sums of its rows.
  constexpr int kLoaderRegisters = DIM > 128 ? 40 : 56, kConsumerRegisters = DIM > 128 ? 232 : 224;
  // Said by one lane, so that the compiler knows that a warp's branches on it do not part.
  const int warpgroup = __shfl_sync(0xffff'ffff, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == 0) {
    register_decrease<kLoaderRegisters>();
    if (threadIdx.x == 0) {
      produce<T, DIM, KEYS>(params, memory);
    } else if (threadIdx.x / 32 == 1) {
      draw_tiles<T, DIM, KEYS>(params, memory);
    } else if (threadIdx.x >= 64) {
      const int number = static_cast<int>(threadIdx.x) / 32 - 2;
      if constexpr (PATH == RowPath::kUnaligned) {
        gather_unaligned_queries<T, DIM, KEYS>(params, memory, number);
      } else {
        gather_queries<T, DIM, KEYS>(params, memory, number);
      }
    }
  } else {
    register_increase<kConsumerRegisters>();
    Consumer<T, DIM, KEYS, PATH>(params, memory, warpgroup - 1).run();
  }
}

}  // namespace ikbo::kernels
