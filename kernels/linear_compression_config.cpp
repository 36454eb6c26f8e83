#include "kernels/linear_compression_config.h"

#include <algorithm>
#include <stdexcept>

#include "kernels/linear_compression_blocks.h"

namespace ikbo::kernels {
namespace {

constexpr int64_t kBlockK = 64;
constexpr int kBlocksOfTile = 2;  // of 64 columns, a CTA

int64_t ceil_divide(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

int64_t tiles_of(const LinearCompressionShape& shape, int64_t rows, const LinearCompressionConfig& config,
                 int blocks_of_tile) {
  const int64_t blocks = rows * ceil_divide(shape.n, kBlockColumns);
  return ceil_divide(blocks, int64_t{blocks_of_tile} * config.cluster) * ceil_divide(shape.m, config.block_m);
}

int64_t candidate_tiles_of(const LinearCompressionShape& shape, const LinearCompressionConfig& config) {
  return tiles_of(shape, (shape.batch + 1) / 2 * 2, config, kBlocksOfTile);  // candidates come in pairs
}

int64_t broadcast_tiles_of(const LinearCompressionShape& shape, const LinearCompressionConfig& config) {
  int64_t tiles = 0;
  for (const int64_t rows : shape.rows_broadcast) {
    tiles += tiles_of(shape, rows, config, config.broadcast_blocks);
  }
  return tiles;
}

// Cycles of one tile: the tensor cores need block_m / 2 cycles for 16 of K and 64 columns. The constants are what the
// main shape and small batches showed on an H200.
double tile_cycles(int64_t k, int block_m, int blocks) {
  constexpr double kStepFloor = 300;  // barrier, issue and latency of one step of 64
  constexpr double kEpilogue = 700;
  constexpr double kLoadedBytesACycle = 54;  // what a multiprocessor takes in at most, whatever the form of its cluster
  const double loading = (block_m + blocks * kBlockColumns) * kBlockK * 2.0 / kLoadedBytesACycle;
  const double step = std::max({kStepFloor, 4.0 * block_m, loading});
  return static_cast<double>(ceil_divide(k, kBlockK)) * step + kEpilogue + 2.0 * block_m;
}

}  // namespace

const std::vector<int>& linear_compression_block_sizes() {
#define IKBO_SIZE(BLOCK_M) BLOCK_M,
  static const std::vector<int> sizes = {IKBO_LINEAR_COMPRESSION_BLOCKS(IKBO_SIZE)};
#undef IKBO_SIZE
  return sizes;
}

std::vector<LinearCompressionConfig> legal_linear_compression_configs(const LinearCompressionShape& shape,
                                                                      int multiprocessors) {
  if (multiprocessors < 1) {
    throw std::invalid_argument("linear_compression: a device has at least one multiprocessor");
  }
  std::vector<LinearCompressionConfig> configs;
  for (const int block_m : linear_compression_block_sizes()) {
    for (const int cluster : {1, 2}) {
      const int clusters = multiprocessors / cluster;
      if (clusters == 0) {
        continue;
      }
      for (const int broadcast_blocks : {kBlocksOfTile, 1}) {
        LinearCompressionConfig config{block_m, cluster, 0, broadcast_blocks};
        const int64_t broadcast_tiles = broadcast_tiles_of(shape, config);
        const int64_t tiles = broadcast_tiles + candidate_tiles_of(shape, config);
        if (broadcast_blocks == 1 && (broadcast_tiles == 0 || tiles > clusters)) {
          continue;
        }
        config.ctas = static_cast<int>(std::clamp<int64_t>(tiles, 1, clusters)) * cluster;
        configs.push_back(config);
      }
    }
  }
  return configs;
}

double modelled_cycles(const LinearCompressionShape& shape, const LinearCompressionConfig& config) {
  const double clusters = config.ctas / config.cluster;
  const double candidate_tiles = static_cast<double>(candidate_tiles_of(shape, config));
  const double candidate_cycles = tile_cycles(shape.k_candidate, config.block_m, kBlocksOfTile);
  double broadcast_work = 0;
  double longest_broadcast = 0;
  for (size_t i = 0; i < shape.rows_broadcast.size(); ++i) {
    const double cycles = tile_cycles(shape.k_broadcast[i], config.block_m, config.broadcast_blocks);
    const int64_t tiles = tiles_of(shape, shape.rows_broadcast[i], config, config.broadcast_blocks);
    broadcast_work += static_cast<double>(tiles) * cycles;
    longest_broadcast = std::max(longest_broadcast, cycles);
  }
  // Whole tiles are dealt to clusters as these get free, so the last ones end up to a tile apart.
  const double even = (broadcast_work + candidate_tiles * candidate_cycles) / clusters;
  const double work = even + 0.5 * candidate_cycles * (candidate_tiles > clusters ? 1 : 0);
  const double multicast_gain = config.cluster > 1 ? 1.0 : 1.3;
  return multicast_gain * std::max(work, std::max(candidate_cycles, longest_broadcast));
}

LinearCompressionConfig choose_linear_compression_config(const LinearCompressionShape& shape, int multiprocessors) {
  const auto configs = legal_linear_compression_configs(shape, multiprocessors);
  return *std::min_element(configs.begin(), configs.end(), [&](const auto& a, const auto& b) {
    return modelled_cycles(shape, a) < modelled_cycles(shape, b);
  });
}

}  // namespace ikbo::kernels
