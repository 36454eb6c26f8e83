#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <numeric>

#include "kernels/hopper/launch.h"
#include "kernels/hopper/tensor_map.h"
#include "kernels/target_attention.h"
#include "kernels/target_attention_kernel.cuh"
#include "kernels/target_attention_launch.h"
#include "kernels/target_attention_setup.cuh"

namespace ikbo::kernels {
namespace {

constexpr int64_t kAlignedElements = 8;  // 16 bytes, what the copy engine wants of addresses and strides
constexpr size_t kSectionAlignment = 256;

bool aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

bool aligned_stride(int64_t stride, int64_t size) {
  return size <= 1 || (stride > 0 && stride % kAlignedElements == 0);
}

// Whether every row of queries begins at a multiple of 16 bytes.
bool queries_are_aligned(const TargetAttentionProblem& p) {
  const int64_t users = p.kv_offsets != nullptr ? 1 : p.users;
  const bool self_is = p.self_q == nullptr || (aligned(p.self_q) && aligned_stride(p.self_q_user_stride, users) &&
                                               aligned_stride(p.self_q_row_stride, p.length) &&
                                               aligned_stride(p.self_q_head_stride, p.q_heads));
  return self_is && (p.candidates * p.seeds == 0 ||
                     (aligned(p.q) && aligned_stride(p.q_candidate_stride, p.candidates) &&
                      aligned_stride(p.q_seed_stride, p.seeds) && aligned_stride(p.q_head_stride, p.q_heads)));
}

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("target_attention: ") + what + ": " + cudaGetErrorString(error));
  }
}

int64_t group_of(const TargetAttentionProblem& p) {
  return p.q_heads / p.kv_heads;
}

int64_t rows_of_candidate(const TargetAttentionProblem& p) {
  return p.seeds * group_of(p);
}

int64_t most_tiles(const TargetAttentionProblem& p, int64_t tile_rows) {
  // Runs of rows, each of which may end in a partial tile.
  int64_t runs = std::min(p.candidates, p.users + 1);
  int64_t rows = p.candidates * rows_of_candidate(p);
  if (p.self_q != nullptr) {
    const bool packed = p.kv_offsets != nullptr;
    runs += packed ? p.users + 2 : 2 * p.users;  // histories, and what belongs to none
    rows += (packed ? 1 : p.users) * p.length * group_of(p);
  }
  return (rows / tile_rows + runs) * p.kv_heads;
}

TileList list_of(const TargetAttentionProblem& p) {
  if (p.users > kMostListedUsers || p.head_dim > kMostListedDim) return TileList::kTiles;
  return p.candidates <= kMostOwnCandidates ? TileList::kOwnUsers : TileList::kUsers;
}

// Bytes needed; the sections of `workspace`, where one is given.
size_t lay_out(const TargetAttentionProblem& p, void* base, AttentionWorkspace* workspace) {
  size_t end = 0;
  const auto reserve = [&](auto*& section, int64_t count) {
    if (workspace != nullptr)
      section = reinterpret_cast<std::remove_reference_t<decltype(section)>>(static_cast<char*>(base) + end);
    const size_t bytes = static_cast<size_t>(count) * sizeof(*section);
    end += (bytes + kSectionAlignment - 1) / kSectionAlignment * kSectionAlignment;
  };
  AttentionWorkspace unused{};
  AttentionWorkspace& w = workspace != nullptr ? *workspace : unused;
  reserve(w.header, 1);
  reserve(w.count, p.users + 1);
  reserve(w.begin, p.users + 1);
  reserve(w.cursor, p.users + 1);
  reserve(w.tile_begin, p.users + 1);
  reserve(w.order, p.candidates);
  reserve(w.tiles, most_tiles(p, kHalfRows));
  reserve(w.users, kMostListedUsers + 1);
  reserve(w.matrix, list_of(p) == TileList::kUsers ? (p.users + 1) * kMatrixCtas : 0);
  return end;
}

// The stride of a dimension of one element may be anything, but must be legal.
int64_t legal_stride(int64_t stride, int64_t size) {
  return size <= 1 ? kAlignedElements : stride;
}

// Keys or values, in boxes of 64 elements of D by `keys` rows.
CUtensorMap history_map(const TargetAttentionProblem& p, const void* pointer, int64_t user_stride, int64_t row_stride,
                        int64_t head_stride, int keys) {
  const bool packed = p.kv_offsets != nullptr;
  const int64_t users = packed ? 1 : p.users;
  return hopper::tensor_map_16_bit(
      pointer, p.type == ScalarType::kFloat16, {p.head_dim, p.length, p.kv_heads, users},
      {legal_stride(row_stride, p.length), legal_stride(head_stride, p.kv_heads), legal_stride(user_stride, users)},
      {kPanel, keys, 1, 1}, "target_attention");
}

// The maps of queries whose packed rows lie as (owners, rows of an owner, query heads), and of their results, where
// these have boxes that tiles are made of: every half of a tile begins at a multiple of kHalfRows of them, and an
// owner's rows at multiples of `rows_of_owner` times the group.
void make_query_maps(AttentionParams& params, int queries, int64_t owners, int64_t rows, int64_t rows_of_owner) {
  const TargetAttentionProblem& p = params.problem;
  AttentionQueries& of = params.queries[queries];
  const int64_t group = group_of(p);
  const int64_t piece = std::gcd(rows_of_owner * group, int64_t{kHalfRows});
  constexpr int64_t kLeastPiece = 4;  // smaller ones are copied faster by threads
  if (of.q == nullptr || owners * rows == 0 || piece < kLeastPiece || piece % group != 0) return;
  of.piece_bits = static_cast<int32_t>(std::countr_zero(static_cast<uint64_t>(piece)));
  params.q[queries] = hopper::tensor_map_16_bit(
      of.q, p.type == ScalarType::kFloat16, {p.head_dim, p.q_heads, rows, owners},
      {legal_stride(of.head_stride, p.q_heads), legal_stride(of.row_stride, rows),
       legal_stride(of.owner_stride, owners)},
      {kPanel, static_cast<int>(group), static_cast<int>(piece / group), 1}, "target_attention");
  const int64_t out_piece = std::min<int64_t>(piece, kWarpRows);
  constexpr int64_t kMostRows = int64_t{1} << 31;  // that a Divisor divides
  if (!params.rows_by_vectors || out_piece % group != 0 || owners * rows * p.q_heads >= kMostRows) return;
  of.out_piece_bits = static_cast<int32_t>(std::countr_zero(static_cast<uint64_t>(out_piece)));
  params.out[queries] = hopper::tensor_map_16_bit(
      of.out, p.type == ScalarType::kFloat16, {p.head_dim, p.q_heads, owners * rows},
      {legal_stride(p.head_dim, p.q_heads), legal_stride(p.q_heads * p.head_dim, owners * rows)},
      {kPanel, static_cast<int>(group), static_cast<int>(out_piece / group)}, "target_attention");
}

// Rows of a history, on average where histories are packed.
int64_t typical_length(const TargetAttentionProblem& p) {
  return p.kv_offsets != nullptr ? p.length / std::max<int64_t>(p.users, 1) : p.length;
}

// Rows of a candidate's that tiles have as a whole, and boxes of unaligned ones in them: rows that are eight seeds
// apart are a multiple of 16 bytes apart.
struct Boxes {
  int64_t piece;
  int64_t count;
};
Boxes boxes_of(int64_t seeds, int64_t group) {
  return {std::gcd(seeds * group, int64_t{kHalfRows}), kAlignedElements * group};
}

// Windows of queries, where boxes have several rows. Behind a history's last row there may be no memory: its rows are
// in none.
void make_windows(UnalignedAttentionParams& params) {
  const TargetAttentionProblem& p = params.problem;
  AttentionQueries& of = params.queries[kTarget];
  params.queries[kSelf].piece_bits = params.queries[kSelf].box_bits = of.piece_bits = of.box_bits = 0;
  const std::array<int64_t, 3> sizes = {p.candidates, p.seeds, p.q_heads};
  const std::array<int64_t, 3> strides = {of.owner_stride, of.row_stride, of.head_stride};
  constexpr int64_t kMostStride = int64_t{1} << 35;
  if (p.candidates * p.seeds == 0 || !unaligned_queries_have_boxes(p.seeds, p.q_heads, p.kv_heads)) return;
  if (*std::ranges::min_element(strides) < 0 || of.row_stride == 0 || of.row_stride > kMostStride) return;
  const Boxes boxes = boxes_of(p.seeds, group_of(p));
  of.piece_bits = std::countr_zero(static_cast<uint64_t>(boxes.piece));
  of.box_bits = std::countr_zero(static_cast<uint64_t>(boxes.piece / boxes.count));
  int64_t span = 0;
  int64_t step = kAlignedElements;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] <= 1) continue;
    span += (sizes[i] - 1) * strides[i];
    step = std::gcd(step, strides[i]);
  }
  params.q_rows = row_windows({.first = of.q,
                               .span = span,
                               .step = step,
                               .size = p.head_dim,
                               .box_rows = 1 << of.box_bits,
                               .box_stride = kAlignedElements * of.row_stride,
                               .is_fp16 = p.type == ScalarType::kFloat16},
                              "target_attention");
}

// In turns, one warpgroup's weights are computed while the other one has the matrix unit. That pays where a block's
// weights take as long as its products do, and where histories are short; else both are faster without waiting.
bool takes_turns(const TargetAttentionProblem& p) {
  constexpr int64_t kShort = 768;
  return p.head_dim <= 64 || (p.head_dim <= 128 && typical_length(p) <= kShort);
}

template <typename T, int DIM, int KEYS, RowPath PATH>
void launch(KernelParams<PATH>& params, int multiprocessors, cudaStream_t stream) {
  const TargetAttentionProblem& p = params.problem;
  if (p.length > 0 && p.users > 0) {
    params.k = history_map(p, p.k, p.k_user_stride, p.k_row_stride, p.k_head_stride, KEYS);
    params.v = history_map(p, p.v, p.v_user_stride, p.v_row_stride, p.v_head_stride, KEYS);
  }
  const auto ctas = static_cast<unsigned>(std::min<int64_t>(multiprocessors, most_tiles(p, params.tile_rows)));
  using Memory = KernelMemory<T, DIM, KEYS, PATH>;
  params.list = list_of(p);
  if (params.list == TileList::kTiles) set_up_attention(params, multiprocessors, stream);
  if (params.list == TileList::kUsers) list_users_of_many(params, stream);
  const auto kernel = attention_kernel<T, DIM, KEYS, PATH>;
  constexpr size_t kBytes = sizeof(Memory);
  static_assert(kBytes <= 227 * 1024, "the memory of a CTA fits a multiprocessor");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes)),
        "cannot have the shared memory");
  check(hopper::launch_early(kernel, ctas, kAttentionThreads, kBytes, stream, params), "cannot launch");
}

template <typename T, RowPath PATH>
void launch(KernelParams<PATH>& params, int multiprocessors, cudaStream_t stream) {
  constexpr int kKeys = 128;
  const int64_t dim = params.problem.head_dim;
  if constexpr (PATH == RowPath::kStaged) {
    launch<T, 128, kStagedKeys, PATH>(params, multiprocessors, stream);
  } else if (dim <= 64) {
    launch<T, 64, kKeys, PATH>(params, multiprocessors, stream);
  } else if (dim <= 128) {
    launch<T, 128, kKeys, PATH>(params, multiprocessors, stream);
  } else {
    launch<T, 256, 80, PATH>(params, multiprocessors, stream);
  }
}

template <typename T>
void launch(AttentionParams& params, int multiprocessors, cudaStream_t stream) {
  const TargetAttentionProblem& p = params.problem;
  if (!queries_are_aligned(p)) {
    UnalignedAttentionParams unaligned{params, {}};
    make_windows(unaligned);
    launch<T, RowPath::kUnaligned>(unaligned, multiprocessors, stream);
    return;
  }
  make_query_maps(params, kTarget, p.candidates, p.seeds, p.seeds);
  // Rows behind a tile's last are the next history's, and not used.
  make_query_maps(params, kSelf, p.kv_offsets != nullptr ? 1 : p.users, p.length, kHalfRows);
  const bool has_boxes = std::max(params.queries[kTarget].out_piece_bits, params.queries[kSelf].out_piece_bits) >= 0;
  // Above D 128 there is no room for staged results, and up to 64 it was not measured.
  const bool suits_dim = p.head_dim > 64 && p.head_dim <= 128;
  if (has_boxes && suits_dim && typical_length(p) > kLeastStagedBlocks * kStagedKeys) {
    launch<T, RowPath::kStaged>(params, multiprocessors, stream);
  } else {
    launch<T, RowPath::kDirect>(params, multiprocessors, stream);
  }
}

}  // namespace

bool unaligned_queries_have_boxes(int64_t seeds, int64_t q_heads, int64_t kv_heads) {
  constexpr int64_t kLeastRows = 2;  // single ones are copied faster by threads
  const Boxes boxes = boxes_of(seeds, q_heads / kv_heads);
  return boxes.count > 0 && boxes.piece % (boxes.count * kLeastRows) == 0;
}

bool target_attention_supported(const TargetAttentionProblem& p) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const bool sixteen_bit = p.type == ScalarType::kFloat16 || p.type == ScalarType::kBFloat16;
  const bool fp32 = p.type == ScalarType::kFloat32;
  const int64_t users = p.kv_offsets != nullptr ? 1 : p.users;
  const auto history_fits = [&](const void* pointer, int64_t user, int64_t row, int64_t head) {
    return aligned(pointer) && aligned_stride(user, users) && aligned_stride(row, p.length) &&
           aligned_stride(head, p.kv_heads);
  };
  const bool suits_unit = sixteen_bit && p.scale >= 0 &&
                          history_fits(p.k, p.k_user_stride, p.k_row_stride, p.k_head_stride) &&
                          history_fits(p.v, p.v_user_stride, p.v_row_stride, p.v_head_stride);
  const bool self_counts =
      p.self_q == nullptr || (p.length * group_of(p) < kMost && users * p.length * p.q_heads < 2 * kMost);
  return (fp32 || suits_unit) && self_counts && p.head_dim <= 256 && p.length <= kMost && p.users < kMost &&
         p.candidates < kMost && p.candidates * rows_of_candidate(p) < kMost &&
         p.candidates * p.seeds * p.q_heads < 2 * kMost && most_tiles(p, kHalfRows) < kMost;
}

size_t target_attention_workspace_bytes(const TargetAttentionProblem& problem) {
  check_target_attention(problem);
  return lay_out(problem, nullptr, nullptr);
}

void target_attention(const TargetAttentionProblem& problem, void* workspace, size_t workspace_bytes,
                      cudaStream_t stream) {
  check_target_attention(problem);
  if (!target_attention_supported(problem)) {
    throw std::invalid_argument(
        "target_attention: type, strides or sizes do not suit it: see target_attention_supported");
  }
  if ((problem.candidates * problem.seeds == 0 && problem.self_q == nullptr) || most_tiles(problem, kTileRows) == 0)
    return;
  AttentionParams params{};
  const size_t needed = lay_out(problem, workspace, &params.workspace);
  if (workspace == nullptr || reinterpret_cast<uintptr_t>(workspace) % kSectionAlignment != 0) {
    throw std::invalid_argument("target_attention: the workspace must be aligned to 256 bytes");
  }
  if (workspace_bytes < needed) {
    throw std::invalid_argument("target_attention: the workspace has " + std::to_string(workspace_bytes) +
                                " bytes, not the " + std::to_string(needed) + " needed");
  }
  constexpr double kLog2OfE = 1.4426950408889634;
  params.problem = problem;
  const bool packed = problem.kv_offsets != nullptr;
  // Behind the last of queries of 16 bits whose dimensions, but the innermost, have these sizes and strides.
  const auto end_of = [&](const void* q, std::array<int64_t, 3> sizes, std::array<int64_t, 3> strides) -> const void* {
    int64_t elements = problem.head_dim;
    for (size_t i = 0; i < sizes.size(); ++i) {
      elements += std::max<int64_t>(sizes[i] - 1, 0) * std::max<int64_t>(strides[i], 0);
    }
    return q == nullptr ? nullptr : static_cast<const uint16_t*>(q) + elements;
  };
  params.rows_of_candidate = rows_of_candidate(problem) > 0 ? divisor_of(rows_of_candidate(problem)) : Divisor{};
  params.queries[kTarget] = {.q = problem.q,
                             .end = end_of(problem.q, {problem.candidates, problem.seeds, problem.q_heads},
                                           {problem.q_candidate_stride, problem.q_seed_stride, problem.q_head_stride}),
                             .owner_stride = problem.q_candidate_stride,
                             .row_stride = problem.q_seed_stride,
                             .head_stride = problem.q_head_stride,
                             .out = problem.out,
                             .logsumexp = problem.logsumexp,
                             .piece_bits = -1,
                             .out_piece_bits = -1,
                             .box_bits = 0,
                             .rows_of_owner = static_cast<uint32_t>(problem.seeds)};
  params.queries[kSelf] = {
      .q = problem.self_q,
      .end = end_of(problem.self_q, {packed ? 1 : problem.users, problem.length, problem.q_heads},
                    {packed ? 0 : problem.self_q_user_stride, problem.self_q_row_stride, problem.self_q_head_stride}),
      .owner_stride = packed ? 0 : problem.self_q_user_stride,
      .row_stride = problem.self_q_row_stride,
      .head_stride = problem.self_q_head_stride,
      .out = problem.self_out,
      .logsumexp = problem.self_logsumexp,
      .piece_bits = -1,
      .out_piece_bits = -1,
      .box_bits = 0,
      .rows_of_owner = packed ? 0 : static_cast<uint32_t>(problem.length)};
  params.group = divisor_of(group_of(problem));
  params.q_heads = divisor_of(problem.q_heads);
  params.rows_by_vectors =
      problem.head_dim % kAlignedElements == 0 && aligned(problem.out) && aligned(problem.self_out);
  params.takes_turns = takes_turns(problem);
  // A scale of 0 makes all weights equal; as the smallest number it still keeps -infinity what it is.
  params.scale_log2 = std::max(static_cast<float>(problem.scale * kLog2OfE), std::numeric_limits<float>::min());
  int device = 0;
  int multiprocessors = 0;
  check(cudaGetDevice(&device), "no current device");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
        "cannot count multiprocessors");
  const bool spreads = problem.type != ScalarType::kFloat32 && most_tiles(problem, kHalfRows) <= multiprocessors;
  params.tile_rows = spreads ? kHalfRows : kTileRows;
  if (problem.type == ScalarType::kFloat32) {
    set_up_attention(params, multiprocessors, stream);
    launch_attention_fp32(params, most_tiles(problem, kTileRows), multiprocessors, stream);
  } else if (problem.type == ScalarType::kFloat16) {
    launch<__half>(params, multiprocessors, stream);
  } else {
    launch<__nv_bfloat16>(params, multiprocessors, stream);
  }
}

}  // namespace ikbo::kernels
