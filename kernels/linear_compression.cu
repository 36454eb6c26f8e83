#include <cuda.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "kernels/align_rows.h"
#include "kernels/hopper/tensor_map.h"
#include "kernels/linear_compression.h"
#include "kernels/linear_compression_launch.h"
#include "kernels/linear_compression_params.h"

namespace ikbo::kernels {
namespace {

constexpr const char* kName = "linear_compression";
constexpr int kBlockK = 64;
constexpr int kBlocksOfTile = 2;  // of 64 columns, a CTA
constexpr int kBoxRowsOfE = 64;
constexpr int64_t kAlignedElements = 8;  // 16 bytes, what the copy engine wants of addresses and strides
constexpr size_t kSectionAlignment = 256;

int64_t ceil_divide(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
int64_t round_up(int64_t a, int64_t b) {
  return ceil_divide(a, b) * b;
}

[[noreturn]] void reject(const std::string& what) {
  throw std::invalid_argument("linear_compression: " + what);
}

void require(bool condition, const std::string& what) {
  if (!condition) {
    reject(what);
  }
}

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("linear_compression: ") + what + ": " + cudaGetErrorString(error));
  }
}

bool aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

bool needs_copy_of_w(const LinearCompressionTerm& term) {
  return term.k > 0 && (!aligned(term.w) || term.w_row_stride % kAlignedElements != 0);
}

bool needs_copy_of_e(const LinearCompressionTerm& term) {
  return term.k > 0 && term.rows > 0 &&
         (!aligned(term.e) || term.e_row_stride % kAlignedElements != 0 ||
          (term.rows > 1 && term.e_batch_stride % kAlignedElements != 0));
}

void check_term(const LinearCompressionProblem& problem, const LinearCompressionTerm& term, const std::string& name) {
  require(term.rows >= 0 && term.k >= 0, name + " has a negative size");
  require(term.rows <= std::numeric_limits<int32_t>::max() && term.k <= std::numeric_limits<int32_t>::max(),
          name + " has a size of 2^31 or more");
  if (term.k > 0) {
    require(term.w != nullptr, name + ".w is null");
    require(term.w_row_stride >= term.k, name + ".w_row_stride is " + std::to_string(term.w_row_stride) +
                                             ", less than its k of " + std::to_string(term.k));
    if (term.rows > 0) {
      require(term.e != nullptr, name + ".e is null");
      require(term.e_row_stride >= problem.n, name + ".e_row_stride is " + std::to_string(term.e_row_stride) +
                                                  ", less than n of " + std::to_string(problem.n));
      require(term.e_batch_stride >= 0, name + ".e_batch_stride is negative");
    }
  }
  const int64_t blocks = ceil_divide(problem.n, kBlockColumns);
  require(term.rows * blocks <= std::numeric_limits<int32_t>::max() - 8,
          name + " has 2^31 or more blocks of 64 columns");
}

void check_problem(const LinearCompressionProblem& problem) {
  require(problem.batch >= 0 && problem.m >= 0 && problem.n >= 0, "batch, m and n cannot be negative");
  require(problem.m <= std::numeric_limits<int32_t>::max() && problem.n <= std::numeric_limits<int32_t>::max(),
          "m and n must be less than 2^31");
  require(problem.type == ScalarType::kFloat16 || problem.type == ScalarType::kBFloat16,
          "type must be kFloat16 or kBFloat16");
  require(problem.out_type == problem.type || problem.out_type == ScalarType::kFloat32,
          "out_type must be type or kFloat32");
  require(problem.broadcast.size() <= kMaxBroadcastTerms, "at most " + std::to_string(kMaxBroadcastTerms) +
                                                              " broadcast terms, not " +
                                                              std::to_string(problem.broadcast.size()));
  require(problem.candidate.rows == problem.batch, "candidate.rows is " + std::to_string(problem.candidate.rows) +
                                                       " but batch is " + std::to_string(problem.batch));
  check_term(problem, problem.candidate, "candidate");
  for (size_t i = 0; i < problem.broadcast.size(); ++i) {
    const std::string name = "broadcast[" + std::to_string(i) + "]";
    check_term(problem, problem.broadcast[i], name);
    require(problem.broadcast[i].index != nullptr || problem.batch == 0, name + ".index is null");
  }
}

void check_config(const LinearCompressionConfig& config) {
  const auto& sizes = linear_compression_block_sizes();
  require(std::find(sizes.begin(), sizes.end(), config.block_m) != sizes.end(),
          "no kernel for block_m " + std::to_string(config.block_m));
  require(config.cluster == 1 || config.cluster == 2, "cluster must be 1 or 2");
  require(config.broadcast_blocks == 1 || config.broadcast_blocks == 2, "broadcast_blocks must be 1 or 2");
  require(config.ctas >= config.cluster && config.ctas % config.cluster == 0,
          "ctas must be a positive multiple of cluster");
}

// Where everything lies in the workspace, in bytes.
struct WorkspacePlan {
  int64_t units = 0;
  size_t flags = 0;
  size_t partial_sums = 0;
  std::vector<size_t> w_copies;  // one entry a term, the candidate last; used where a copy is needed
  std::vector<size_t> e_copies;
  size_t bytes = 0;
};

std::vector<const LinearCompressionTerm*> terms_of(const LinearCompressionProblem& problem) {
  std::vector<const LinearCompressionTerm*> terms;
  for (const LinearCompressionTerm& term : problem.broadcast) {
    terms.push_back(&term);
  }
  terms.push_back(&problem.candidate);
  return terms;
}

WorkspacePlan plan_workspace(const LinearCompressionProblem& problem, const LinearCompressionConfig& config) {
  WorkspacePlan plan;
  size_t end = 0;
  const auto reserve = [&](int64_t bytes) {
    const size_t begin = end;
    end += round_up(bytes, kSectionAlignment);
    return begin;
  };
  const int64_t column_blocks = ceil_divide(problem.n, kBlockColumns);
  for (const LinearCompressionTerm& term : problem.broadcast) {
    plan.units += term.rows * column_blocks * ceil_divide(problem.m, config.block_m);
  }
  reserve(sizeof(uint64_t));  // the tickets are first
  plan.flags = reserve(plan.units * static_cast<int64_t>(sizeof(uint64_t)));
  // The kernel reads the first unit in place of a missing one.
  plan.partial_sums =
      reserve(std::max<int64_t>(plan.units, 1) * config.block_m * kBlockColumns * static_cast<int64_t>(sizeof(float)));
  for (const LinearCompressionTerm* term : terms_of(problem)) {
    constexpr int64_t kElementBytes = 2;
    plan.w_copies.push_back(
        reserve(needs_copy_of_w(*term) ? problem.m * round_up(term->k, kAlignedElements) * kElementBytes : 0));
    plan.e_copies.push_back(reserve(
        needs_copy_of_e(*term) ? term->rows * term->k * round_up(problem.n, kAlignedElements) * kElementBytes : 0));
  }
  plan.bytes = end;
  return plan;
}

void launch(const LinearCompressionParams& params, ScalarType type, const LinearCompressionConfig& config,
            cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;
  switch (config.block_m) {
#define IKBO_CASE(BLOCK_M)                                                     \
  case BLOCK_M:                                                                \
    error = launch_linear_compression_##BLOCK_M(params, type, config, stream); \
    break;
    IKBO_LINEAR_COMPRESSION_BLOCKS(IKBO_CASE)
#undef IKBO_CASE
  }
  check(error, "cannot launch");
}

int multiprocessors_of_current_device() {
  int device = 0;
  int count = 0;
  check(cudaGetDevice(&device), "no current device");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cannot count multiprocessors");
  return count;
}

}  // namespace

LinearCompressionShape shape_of(const LinearCompressionProblem& problem) {
  LinearCompressionShape shape{problem.batch, problem.m, problem.n, problem.candidate.k, {}, {}};
  for (const LinearCompressionTerm& term : problem.broadcast) {
    shape.rows_broadcast.push_back(term.rows);
    shape.k_broadcast.push_back(term.k);
  }
  return shape;
}

LinearCompressionConfig choose_linear_compression_config(const LinearCompressionProblem& problem) {
  check_problem(problem);
  return choose_linear_compression_config(shape_of(problem), multiprocessors_of_current_device());
}

size_t linear_compression_workspace_bytes(const LinearCompressionProblem& problem,
                                          const LinearCompressionConfig& config) {
  check_problem(problem);
  check_config(config);
  return plan_workspace(problem, config).bytes;
}

void linear_compression(const LinearCompressionProblem& problem, const LinearCompressionConfig& config, void* workspace,
                        size_t workspace_bytes, LinearCompressionStage stage, cudaStream_t stream) {
  check_problem(problem);
  check_config(config);
  if (problem.batch == 0 || problem.m == 0 || problem.n == 0) {
    return;
  }
  require(problem.out != nullptr, "out is null");
  const WorkspacePlan plan = plan_workspace(problem, config);
  require(workspace != nullptr && reinterpret_cast<uintptr_t>(workspace) % kSectionAlignment == 0,
          "the workspace must be aligned to 256 bytes");
  require(workspace_bytes >= plan.bytes, "the workspace has " + std::to_string(workspace_bytes) + " bytes, not the " +
                                             std::to_string(plan.bytes) + " needed");
  auto* const base = static_cast<uint8_t*>(workspace);

  LinearCompressionParams params{};
  params.broadcast_terms = static_cast<int32_t>(problem.broadcast.size());
  params.column_blocks = static_cast<int32_t>(ceil_divide(problem.n, kBlockColumns));
  params.m_tiles = static_cast<int32_t>(ceil_divide(problem.m, config.block_m));
  params.m = problem.m;
  params.n = problem.n;
  params.out_pointer = problem.out;
  params.out_is_float32 = problem.out_type == ScalarType::kFloat32;
  params.store_by_copy_engine = !params.out_is_float32 && problem.n % kAlignedElements == 0 && aligned(problem.out);
  params.tickets = reinterpret_cast<uint64_t*>(base);
  params.flags = reinterpret_cast<uint64_t*>(base + plan.flags);
  params.units = plan.units;
  params.partial_sums = reinterpret_cast<float*>(base + plan.partial_sums);

  int64_t tiles = 0;
  int64_t units = 0;
  const auto terms = terms_of(problem);
  const bool is_fp16 = problem.type == ScalarType::kFloat16;
  std::vector<AlignRows> copies;
  for (size_t i = 0; i < terms.size(); ++i) {
    const LinearCompressionTerm& term = *terms[i];
    LinearCompressionTermParams& out = params.terms[i];
    // Candidates come in pairs.
    const bool is_candidate = i + 1 == terms.size();
    const int64_t blocks = (is_candidate ? round_up(term.rows, 2) : term.rows) * params.column_blocks;
    out.tile_blocks = is_candidate ? kBlocksOfTile : config.broadcast_blocks;
    tiles += ceil_divide(blocks, int64_t{out.tile_blocks} * config.cluster) * params.m_tiles;
    require(tiles < std::numeric_limits<int32_t>::max() - 2 * int64_t{config.ctas}, "2^31 or more tiles of work");
    out.tile_end = static_cast<int32_t>(tiles);
    out.steps = static_cast<int32_t>(ceil_divide(term.k, kBlockK));
    out.rows = static_cast<int32_t>(term.rows);
    out.unit_begin = units;
    out.index = term.index;
    out.has_maps = term.k > 0 && term.rows > 0;
    units += is_candidate ? 0 : blocks * params.m_tiles;
    if (!out.has_maps) {
      continue;
    }
    const void* w = term.w;
    int64_t w_row_stride = term.w_row_stride;
    if (needs_copy_of_w(term)) {
      void* copy = base + plan.w_copies[i];
      const int64_t stride = round_up(term.k, kAlignedElements);
      copies.push_back({.from = w,
                        .sizes = {1, 1, problem.m},
                        .strides = {0, 0, w_row_stride},
                        .columns = term.k,
                        .to = copy,
                        .to_rows = problem.m,
                        .to_columns = stride});
      w = copy;
      w_row_stride = stride;
    }
    const void* e = term.e;
    int64_t e_row_stride = term.e_row_stride;
    int64_t e_batch_stride = term.e_batch_stride;
    if (needs_copy_of_e(term)) {
      void* copy = base + plan.e_copies[i];
      const int64_t stride = round_up(problem.n, kAlignedElements);
      copies.push_back({.from = e,
                        .sizes = {1, term.rows, term.k},
                        .strides = {0, e_batch_stride, e_row_stride},
                        .columns = problem.n,
                        .to = copy,
                        .to_rows = term.rows * term.k,
                        .to_columns = stride});
      e = copy;
      e_row_stride = stride;
      e_batch_stride = term.k * stride;
    }
    if (term.rows == 1) {
      e_batch_stride = round_up(term.k * e_row_stride, kAlignedElements);  // not used, but must be a legal stride
    }
    params.w[i] = hopper::tensor_map_16_bit(w, is_fp16, {term.k, problem.m}, {w_row_stride},
                                            {kBlockK, share_of_w(config.block_m, config.cluster)}, kName);
    params.e[i] = hopper::tensor_map_16_bit(e, is_fp16, {problem.n, term.k, term.rows}, {e_row_stride, e_batch_stride},
                                            {kBlockColumns, kBoxRowsOfE, 1}, kName);
  }
  if (!copies.empty()) {
    align_rows(copies, stream);
  }

  if (params.store_by_copy_engine) {
    params.out =
        hopper::tensor_map_16_bit(problem.out, is_fp16, {problem.n, problem.m, problem.batch},
                                  {problem.n, problem.m * problem.n}, {kBlockColumns, config.block_m, 1}, kName);
  }

  const int broadcast_tiles = params.broadcast_terms == 0 ? 0 : params.terms[params.broadcast_terms - 1].tile_end;
  if (stage == LinearCompressionStage::kFusedWs) {
    params.tile_begin = 0;
    params.tile_end = static_cast<int32_t>(tiles);
    params.use_flags = broadcast_tiles > 0;
    launch(params, problem.type, config, stream);
    return;
  }
  if (broadcast_tiles > 0) {
    params.tile_begin = 0;
    params.tile_end = broadcast_tiles;
    launch(params, problem.type, config, stream);
  }
  params.tile_begin = broadcast_tiles;
  params.tile_end = static_cast<int32_t>(tiles);
  launch(params, problem.type, config, stream);
}

}  // namespace ikbo::kernels
