// Which configuration of the linear-compression kernel serves a shape: plain host code, no GPU needed.
#pragma once

#include <cstdint>
#include <vector>

namespace ikbo::kernels {

struct LinearCompressionShape {
  int64_t batch = 0;
  int64_t m = 0;
  int64_t n = 0;
  int64_t k_candidate = 0;
  std::vector<int64_t> rows_broadcast;  // one entry a broadcast term
  std::vector<int64_t> k_broadcast;
};

// A CTA computes block_m rows of W times 64 columns of each of two (row, column block) pairs of E at a time.
struct LinearCompressionConfig {
  int block_m = 0;           // rows of W, the N of the matrix instruction
  int cluster = 1;           // CTAs that share each tile of W through multicast
  int ctas = 0;              // CTAs launched, a multiple of cluster
  int broadcast_blocks = 2;  // pairs that a tile of a broadcast term has: 2, or 1 for shorter steps along its K

  bool operator==(const LinearCompressionConfig&) const = default;
};

constexpr int kBlockColumns = 64;

// The instantiated tile heights.
const std::vector<int>& linear_compression_block_sizes();

// Every configuration that can run the shape, one for each tile height and form of cluster, and a second one with small
// broadcast tiles where every cluster still has no more than one tile to compute.
std::vector<LinearCompressionConfig> legal_linear_compression_configs(const LinearCompressionShape& shape,
                                                                      int multiprocessors);

// The legal configuration of the lowest modelled time.
LinearCompressionConfig choose_linear_compression_config(const LinearCompressionShape& shape, int multiprocessors);

// The modelled time in clock cycles of one multiprocessor.
double modelled_cycles(const LinearCompressionShape& shape, const LinearCompressionConfig& config);

}  // namespace ikbo::kernels
