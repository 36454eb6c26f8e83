// The warpgroups that multiply, and their epilogues; part of linear_compression_kernel.cuh.
#pragma once

namespace ikbo::kernels {

template <typename T>
__device__ inline uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// This warp has read a stage: every CTA of the cluster may overwrite it.
template <typename S, typename Shared>
__device__ inline void release_stage(Shared& shared, S sharing, int stage, uint32_t lane) {
  if (sharing.writes_here(lane)) {
    mbarrier_arrive_remote(&shared.consumed[stage], lane);
  }
}

// Whole steps [k_begin, k_end) of kBlockK. The last one is left running.
template <typename T, int BLOCK_M, typename S, typename Shared>
__device__ inline void multiply_steps(float (&acc)[BLOCK_M / 2], Shared& shared, S sharing,
                                      Ring<Layout<T, BLOCK_M, S>::kStages>& ring, int k_begin, int k_end,
                                      int warpgroup, uint32_t lane) {
#pragma unroll 1
  for (int k_tile = k_begin; k_tile < k_end; ++k_tile) {
    mbarrier_wait(&shared.loaded[ring.stage], ring.parity);
    const uint64_t w = swizzled_descriptor(shared.w[ring.stage]);
    const uint64_t e = swizzled_descriptor(shared.e[ring.stage][warpgroup]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockK / kInstructionK; ++i) {
      Wgmma<T, BLOCK_M>::multiply(acc, e + descriptor_offset(i * kInstructionK * 128),
                                  w + descriptor_offset(i * kInstructionK * sizeof(T)), 1);
    }
    wgmma_commit_group();
    wgmma_wait_group<1>();
    if (k_tile > k_begin) {
      release_stage(shared, sharing, ring.previous(), lane);
    }
    ring.advance();
  }
}

// What is left of K, in single instructions, each complete before the next: code that the compiler cannot see to be
// uniform must not leave one running.
template <typename T, int BLOCK_M, typename S, typename Shared>
__device__ inline void multiply_tail(float (&acc)[BLOCK_M / 2], Shared& shared, S sharing,
                                     Ring<Layout<T, BLOCK_M, S>::kStages>& ring, int instructions, int accumulate,
                                     int warpgroup, uint32_t lane) {
  mbarrier_wait(&shared.loaded[ring.stage], ring.parity);
  uint64_t w = swizzled_descriptor(shared.w[ring.stage]);
  uint64_t e = swizzled_descriptor(shared.e[ring.stage][warpgroup]);
#pragma unroll 1
  for (int i = 0; i < instructions; ++i) {
    wgmma_fence();
    Wgmma<T, BLOCK_M>::multiply(acc, e, w, 1);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    e += descriptor_offset(kInstructionK * 128);
    w += descriptor_offset(kInstructionK * sizeof(T));
  }
  release_stage(shared, sharing, ring.stage, lane);
  ring.advance();
}

// Where a thread's part of a unit lies: one float4 for every 8 of BLOCK_M.
template <int BLOCK_M>
__device__ inline float4* partial_sums_of(const LinearCompressionParams& params, int64_t unit, uint32_t thread) {
  return reinterpret_cast<float4*>(params.partial_sums) + unit * (BLOCK_M / 8 * kWarpgroupThreads) + thread;
}

template <int BLOCK_M>
__device__ inline void add_partial_sums(float (&acc)[BLOCK_M / 2], const float4* from) {
#pragma unroll
  for (int i = 0; i < BLOCK_M / 8; ++i) {
    const float4 part = __ldcg(from + i * kWarpgroupThreads);
    acc[4 * i] += part.x;
    acc[4 * i + 1] += part.y;
    acc[4 * i + 2] += part.z;
    acc[4 * i + 3] += part.w;
  }
}

template <typename Shared>
__device__ inline int64_t shared_source(const Shared& shared, int warpgroup, int broadcast) {
  return *const_cast<const volatile int64_t*>(&shared.source[warpgroup][broadcast]);
}

// Rounds and stores through shared memory: (BLOCK_M, 64) of out in chunks of kOutRows rows.
template <typename T, int BLOCK_M, typename S, typename Shared>
__device__ inline void store_by_copy_engine(const LinearCompressionParams& params, Shared& shared,
                                            const float (&acc)[BLOCK_M / 2], int candidate, int column, int m,
                                            int warpgroup, uint32_t warp, uint32_t lane) {
  using L = Layout<T, BLOCK_M, S>;
  const bool leader = warp == 0 && lane == 0;
  // Lane l of the first 16 gives row l % 8 of the 8 of M, and half l / 8 of the 16 columns of its warp.
  const uint32_t row = lane % 8;
  const uint32_t segment = warp * 2 + lane / 8 % 2;
  const uint32_t offset = row * 128 + ((segment ^ row) * 16);
  // Groups of this thread that may still read when the next chunk is written.
  constexpr int kPending = L::kOutBuffers - 2;
  if (leader) {
    bulk_wait_group_read<0>();  // the tile before, long ago
  }
  named_barrier_sync(kFirstNamedBarrier + warpgroup, kWarpgroupThreads);
#pragma unroll
  for (int chunk = 0; chunk < L::kOutChunks; ++chunk) {
    T* buffer = shared.out[warpgroup][chunk % L::kOutBuffers];
    const uint32_t base = shared_address(buffer) + offset;
#pragma unroll
    for (int j = 0; j < L::kOutRows / 8; ++j) {
      const float* d = acc + (chunk * L::kOutRows / 8 + j) * 4;
      stmatrix_x2_transposed(base + j * 1024, pack<T>(d[0], d[1]), pack<T>(d[2], d[3]));
    }
    fence_proxy_async_shared();
    if (leader) {
      bulk_wait_group_read<kPending>();  // frees the buffer of the chunk after this one
    }
    named_barrier_sync(kFirstNamedBarrier + warpgroup, kWarpgroupThreads);
    if (leader) {
      if (m + chunk * L::kOutRows < params.m) {
        tensor_store_3d(&params.out, buffer, column, m + chunk * L::kOutRows, candidate);
      }
      bulk_commit_group();
    }
  }
}

// Rounds and stores element by element: fp32, or rows of out that the copy engine cannot address.
template <typename T, int BLOCK_M>
__device__ inline void store_by_element(const LinearCompressionParams& params, const float (&acc)[BLOCK_M / 2],
                                        int candidate, int column, int m, uint32_t warp, uint32_t lane) {
  const int64_t n0 = column + warp * 16 + lane / 4;
  const int64_t m0 = m + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < BLOCK_M / 2; ++i) {
    const int64_t out_m = m0 + i / 4 * 8 + i % 2;
    const int64_t out_n = n0 + i / 2 % 2 * 8;
    if (out_m < params.m && out_n < params.n) {
      const int64_t offset = (candidate * params.m + out_m) * params.n + out_n;
      if (params.out_is_float32) {
        static_cast<float*>(params.out_pointer)[offset] = acc[i];
      } else {
        static_cast<T*>(params.out_pointer)[offset] = static_cast<T>(acc[i]);
      }
    }
  }
}

template <typename T, int BLOCK_M, typename S, typename Shared>
__device__ void consume(const LinearCompressionParams& params, Shared& shared, S sharing, int warpgroup,
                        uint32_t lane) {
  using L = Layout<T, BLOCK_M, S>;
  constexpr int kVectors = BLOCK_M / 8;
  const uint32_t thread = threadIdx.x % kWarpgroupThreads;
  const uint32_t warp = thread / 32;
  Ring<L::kStages> ring;
  TileReader tiles;
  uint32_t sources_parity = 0;
  bool settled = false;
  const auto settle = [&] {
    if (!settled && lane == 0) {
      mbarrier_arrive_remote_release(&shared.flags_settled, 0);
    }
    settled = true;
  };
  for (;;) {
    const int index = tiles.next(shared, lane);
    if (index >= params.tile_end) {
      break;
    }
    const Tile tile = decode_tile(params, index, sharing);
    const LinearCompressionTermParams& term = params.terms[tile.term];
    const int block = tile.first_block + warpgroup;
    const bool within = block < term.blocks && tile.m_tile < params.m_tiles;
    float acc[BLOCK_M / 2];
#pragma unroll
    for (float& value : acc) {
      value = 0;
    }

    // The unit to add is fetched while the last steps run. What is read in place of a missing one is not used.
    const int whole_steps = term.whole_steps;
    const int pause = whole_steps > L::kPrefetchSteps ? whole_steps - L::kPrefetchSteps : 0;
    pin_registers(acc);
    multiply_steps<T, BLOCK_M>(acc, shared, sharing, ring, 0, pause, warpgroup, lane);
    wgmma_wait_group<0>();
    pin_registers(acc);
    if (pause > 0) {
      release_stage(shared, sharing, ring.previous(), lane);
    }
    mbarrier_wait(&shared.sources_ready, sources_parity);
    sources_parity ^= 1;
    const int64_t first_source = shared_source(shared, warpgroup, 0);
    float4 sum[L::kPrefetchVectors];
    const float4* from = partial_sums_of<BLOCK_M>(params, first_source == kNoSource ? 0 : first_source, thread);
#pragma unroll
    for (int i = 0; i < L::kPrefetchVectors; ++i) {
      sum[i] = __ldcg(from + i * kWarpgroupThreads);
    }
    multiply_steps<T, BLOCK_M>(acc, shared, sharing, ring, pause, whole_steps, warpgroup, lane);
    wgmma_wait_group<0>();
    pin_registers(acc);
    if (whole_steps > pause) {
      release_stage(shared, sharing, ring.previous(), lane);
    }
    if (term.tail_instructions > 0) {
      multiply_tail<T, BLOCK_M>(acc, shared, sharing, ring, term.tail_instructions, whole_steps, warpgroup, lane);
      pin_registers(acc);
    }

    if (tile.term < params.broadcast_terms) {
      __syncwarp();
      if (lane == 0) {
        mbarrier_arrive(&shared.sources_read);
      }
      if (within) {
        const int64_t unit = term.unit_begin + static_cast<int64_t>(block) * params.m_tiles + tile.m_tile;
        float4* to = partial_sums_of<BLOCK_M>(params, unit, thread);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          to[i * kWarpgroupThreads] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
        }
        if (params.use_flags) {
          // Every thread's writes happen before the barrier, and so before the release.
          named_barrier_sync(kFirstNamedBarrier + warpgroup, kWarpgroupThreads);
          if (thread == 0) {
            store_release(params.flags + unit, kFlagSet);
          }
        }
      }
      continue;
    }

    settle();
    if (params.broadcast_terms > 0) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const float4 part = i < L::kPrefetchVectors ? sum[i] : __ldcg(from + i * kWarpgroupThreads);
        acc[4 * i] += part.x;
        acc[4 * i + 1] += part.y;
        acc[4 * i + 2] += part.z;
        acc[4 * i + 3] += part.w;
      }
      bool missing = first_source == kNoSource;
#pragma unroll 1
      for (int t = 1; t < params.broadcast_terms; ++t) {
        const int64_t unit = shared_source(shared, warpgroup, t);
        missing |= unit == kNoSource;
        add_partial_sums<BLOCK_M>(acc, partial_sums_of<BLOCK_M>(params, unit == kNoSource ? 0 : unit, thread));
      }
      if (missing) {
#pragma unroll
        for (float& value : acc) {
          value = __int_as_float(0x7fc00000);
        }
      }
    }
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive(&shared.sources_read);
    }
    if (!within) {
      continue;
    }
    const int candidate = block / params.column_blocks;
    const int column = (block - candidate * params.column_blocks) * kColumnsPerWarpgroup;
    const int m = tile.m_tile * BLOCK_M;
    if (params.store_by_copy_engine) {
      store_by_copy_engine<T, BLOCK_M, S>(params, shared, acc, candidate, column, m, warpgroup, warp, lane);
    } else {
      store_by_element<T, BLOCK_M>(params, acc, candidate, column, m, warp, lane);
    }
  }
  settle();
  if (params.store_by_copy_engine && thread == 0) {
    bulk_wait_group_read<0>();  // shared memory must outlive the stores that read it
  }
}

}  // namespace ikbo::kernels
