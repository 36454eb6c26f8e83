// What the host hands to the linear-compression kernel.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/linear_compression.h"

namespace ikbo::kernels {

// Rows of W that each CTA of a cluster loads, in whole swizzle atoms of 8.
constexpr int share_of_w(int block_m, int cluster) {
  return (block_m / cluster + 7) / 8 * 8;
}

struct LinearCompressionTermParams {
  int32_t tile_end;  // tiles of this term are [tile_end of the term before, tile_end)
  int32_t steps;     // of 64 along K, the last one filled up with zeros
  int32_t rows;
  int64_t unit_begin;    // broadcast terms: where this term's units begin
  const int32_t* index;  // broadcast terms
  bool has_maps;         // there is something to load
  int32_t tile_blocks;   // of 64 columns, a tile of a CTA
};

// Terms are in the order of their tiles: the broadcast terms, then the candidates.
struct LinearCompressionParams {
  CUtensorMap w[kMaxBroadcastTerms + 1];  // (M, K), boxes of (share_of_w(block_m, cluster), 64)
  CUtensorMap e[kMaxBroadcastTerms + 1];  // (rows, K, N), boxes of (1, 64, 64)
  CUtensorMap out;                        // (B, M, N), boxes of (1, block_m, 64); when store_by_copy_engine
  LinearCompressionTermParams terms[kMaxBroadcastTerms + 1];
  int32_t broadcast_terms;
  int32_t column_blocks;  // of 64 columns, along N
  int32_t m_tiles;
  int32_t tile_begin;  // tiles of this launch
  int32_t tile_end;
  bool use_flags;             // candidates of this launch wait for broadcast tiles of this launch
  bool store_by_copy_engine;  // out is of 16 bits with rows aligned to 16 bytes
  bool out_is_float32;
  int64_t m;
  int64_t n;
  void* out_pointer;
  // Workspace. A unit is block_m rows and 64 columns of W_t E_t[row].
  uint64_t* tickets;  // one word
  uint64_t* flags;    // (units)
  int64_t units;
  float* partial_sums;  // (units, block_m / 8, 128 threads, 4), as the accumulator lies in the registers
};

}  // namespace ikbo::kernels
