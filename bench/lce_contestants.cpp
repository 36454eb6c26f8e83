#include "bench/lce_contestants.h"

#include <algorithm>
#include <stdexcept>

#include "bench/lce_steps.h"
#include "kernels/linear_compression_reference.h"

namespace ikbo::bench {
namespace {

using kernels::LinearCompressionConfig;
using kernels::LinearCompressionStage;
using kernels::ScalarType;
using testing::check;
using testing::DeviceBuffer;

constexpr size_t kCublasWorkspaceBytes = size_t{32} << 20;  // what PyTorch gives it on Hopper
constexpr size_t kColdBytes = size_t{300} << 20;            // several times the L2 cache
constexpr int64_t kMostCopies = 48;
constexpr int64_t kElementBytes = 2;

void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw std::runtime_error(std::string(what) + ": " + cublasGetStatusString(status));
  }
}

int64_t round_up(int64_t a, int64_t b) {
  return (a + b - 1) / b * b;
}

// (rows, k, n) with k padded by zero rows.
std::unique_ptr<DeviceBuffer> pad_k(const void* e, int64_t rows, int64_t k, int64_t padded_k, int64_t n) {
  auto to = std::make_unique<DeviceBuffer>(rows * padded_k * n * kElementBytes);
  check(cudaMemset(to->as(), 0, to->bytes()), "cudaMemset");
  check(cudaMemcpy2D(to->as(), padded_k * n * kElementBytes, e, k * n * kElementBytes, k * n * kElementBytes, rows,
                     cudaMemcpyDeviceToDevice),
        "padding");
  return to;
}

// (m, columns) with another row stride, what is between zero.
std::unique_ptr<DeviceBuffer> restride(const void* w, int64_t stride, int64_t m, int64_t columns, int64_t to_stride) {
  auto to = std::make_unique<DeviceBuffer>(m * to_stride * kElementBytes);
  check(cudaMemset(to->as(), 0, to->bytes()), "cudaMemset");
  check(cudaMemcpy2D(to->as(), to_stride * kElementBytes, w, stride * kElementBytes, columns * kElementBytes, m,
                     cudaMemcpyDeviceToDevice),
        "copying weights");
  return to;
}

}  // namespace

Cublas::Cublas() : workspace_(kCublasWorkspaceBytes) {
  check(cublasCreate(&handle_), "cublasCreate");
}
Cublas::~Cublas() {
  cublasDestroy(handle_);
}

void Cublas::multiply(const void* w, int64_t w_row_stride, const void* e, void* out, int64_t batch, int64_t m,
                      int64_t n, int64_t k, ScalarType type, cudaStream_t stream, int64_t w_batch_stride,
                      int64_t e_batch_stride) {
  check(cublasSetStream(handle_, stream), "cublasSetStream");
  check(cublasSetWorkspace(handle_, workspace_.as(), workspace_.bytes()), "cublasSetWorkspace");
  const cudaDataType_t data = type == ScalarType::kFloat16 ? CUDA_R_16F : CUDA_R_16BF;
  const float one = 1;
  const float zero = 0;
  // cuBLAS is column-major: out^T (n, m) = e^T (n, k) w^T (k, m).
  check(
      cublasGemmStridedBatchedEx_64(handle_, CUBLAS_OP_N, CUBLAS_OP_N, n, m, k, &one, e, data, n,
                                    e_batch_stride < 0 ? k * n : e_batch_stride, w, data, w_row_stride, w_batch_stride,
                                    &zero, out, data, n, m * n, batch, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
      "cublasGemmStridedBatchedEx");
}

LceContest::LceContest(const LceCase& shape, Cublas& cublas, bool with_slow_stages) : case_(shape), cublas_(cublas) {
  const testing::LceSize size{
      shape.batch, shape.m,    shape.n,         shape.k_candidate, {{shape.users(), shape.k_user}},
      shape.type,  shape.type, /*align_w=*/true};
  const int64_t bytes_a_copy =
      (shape.batch * (shape.k_candidate + shape.m) + shape.users() * shape.k_user) * shape.n * kElementBytes;
  const int64_t copies = std::clamp<int64_t>(static_cast<int64_t>(kColdBytes) / bytes_a_copy, 1, kMostCopies);
  const int64_t k_candidate = round_up(shape.k_candidate, 8);
  const int64_t k_user = round_up(shape.k_user, 8);
  for (int64_t i = 0; i < copies; ++i) {
    Copy copy;
    copy.inputs = std::make_unique<testing::LceInputs>(size, 1000 + i, testing::Mapping::kSorted);
    const auto& problem = copy.inputs->problem();
    copy.e_candidate_padded = pad_k(problem.candidate.e, shape.batch, shape.k_candidate, k_candidate, shape.n);
    copy.e_user_padded = pad_k(problem.broadcast[0].e, shape.users(), shape.k_user, k_user, shape.n);
    copies_.push_back(std::move(copy));
  }
  // All copies take the weights of the first, so that the weights of a model stay the same as in serving.
  const auto& first = copies_[0].inputs->problem();
  const auto& candidate = first.candidate;
  const auto& user = first.broadcast[0];
  w_candidate_padded_ = restride(candidate.w, candidate.w_row_stride, shape.m, shape.k_candidate, k_candidate);
  w_user_padded_ = restride(user.w, user.w_row_stride, shape.m, shape.k_user, k_user);
  w_candidate_ = restride(candidate.w, candidate.w_row_stride, shape.m, shape.k_candidate, shape.k_candidate);
  w_user_ = restride(user.w, user.w_row_stride, shape.m, shape.k_user, shape.k_user);
  const int64_t k = shape.k_user + shape.k_candidate;
  w_joined_ = std::make_unique<DeviceBuffer>(shape.m * k * kElementBytes);
  for (const auto& [from, stride, columns, at] :
       {std::tuple(user.w, user.w_row_stride, shape.k_user, int64_t{0}),
        std::tuple(candidate.w, candidate.w_row_stride, shape.k_candidate, shape.k_user)}) {
    check(cudaMemcpy2D(w_joined_->as<uint16_t>() + at, k * kElementBytes, from, stride * kElementBytes,
                       columns * kElementBytes, shape.m, cudaMemcpyDeviceToDevice),
          "joining weights");
  }
  user_out_ = scratch(shape.users() * shape.m * shape.n * kElementBytes);
  if (with_slow_stages) {
    joined_ = scratch(shape.batch * k * shape.n * kElementBytes);
  }
  add_library_stages(with_slow_stages);
}

DeviceBuffer* LceContest::scratch(size_t bytes) {
  scratch_.push_back(std::make_unique<DeviceBuffer>(bytes));
  return scratch_.back().get();
}

kernels::LinearCompressionShape LceContest::shape() const {
  return kernels::shape_of(copies_[0].inputs->problem());
}

void LceContest::broadcast_stage(const Copy& copy, cudaStream_t stream) {
  const auto& problem = copy.inputs->problem();
  const int64_t k = case_.k_user + case_.k_candidate;
  broadcast_and_concatenate(problem.broadcast[0].e, problem.candidate.e, problem.broadcast[0].index, joined_->as(),
                            case_.batch, case_.k_user, case_.k_candidate, case_.n, stream);
  cublas_.multiply(w_joined_->as(), k, joined_->as(), problem.out, case_.batch, case_.m, case_.n, k, case_.type,
                   stream);
}

void LceContest::add_library_stages(bool with_slow_stages) {
  const double useful = case_.useful_operations();
  const auto copy_of = [this](int call) -> const Copy& { return copies_[call % copies_.size()]; };
  if (with_slow_stages) {
    contestants_.push_back({"broadcast", "stage", useful,
                            [=, this](int call, cudaStream_t stream) { broadcast_stage(copy_of(call), stream); }});
    contestants_.push_back({"decomposed", "stage", useful, [=, this](int call, cudaStream_t stream) {
                              const auto& problem = copy_of(call).inputs->problem();
                              cublas_.multiply(w_user_->as(), case_.k_user, problem.broadcast[0].e, user_out_->as(),
                                               case_.users(), case_.m, case_.n, case_.k_user, case_.type, stream);
                              cublas_.multiply(w_candidate_->as(), case_.k_candidate, problem.candidate.e, problem.out,
                                               case_.batch, case_.m, case_.n, case_.k_candidate, case_.type, stream);
                              gather_and_add(user_out_->as(), problem.broadcast[0].index, problem.out, case_.batch,
                                             case_.m * case_.n, case_.type, stream);
                            }});
  }
  const int64_t k_candidate = round_up(case_.k_candidate, 8);
  const int64_t k_user = round_up(case_.k_user, 8);
  const auto user_gemm = [=, this](const Copy& copy, cudaStream_t stream) {
    cublas_.multiply(w_user_padded_->as(), k_user, copy.e_user_padded->as(), user_out_->as(), case_.users(), case_.m,
                     case_.n, k_user, case_.type, stream);
  };
  const auto candidate_gemm = [=, this](const Copy& copy, cudaStream_t stream) {
    cublas_.multiply(w_candidate_padded_->as(), k_candidate, copy.e_candidate_padded->as(), copy.inputs->problem().out,
                     case_.batch, case_.m, case_.n, k_candidate, case_.type, stream);
  };
  contestants_.push_back({"decomposed_padded", "stage", useful, [=, this](int call, cudaStream_t stream) {
                            const Copy& copy = copy_of(call);
                            user_gemm(copy, stream);
                            candidate_gemm(copy, stream);
                            const auto& problem = copy.inputs->problem();
                            gather_and_add(user_out_->as(), problem.broadcast[0].index, problem.out, case_.batch,
                                           case_.m * case_.n, case_.type, stream);
                          }});
  const double mn = 2.0 * static_cast<double>(case_.m * case_.n);
  contestants_.push_back({"candidate_gemm_alone", "peer", mn * static_cast<double>(case_.batch * case_.k_candidate),
                          [=](int call, cudaStream_t stream) { candidate_gemm(copy_of(call), stream); }});
  contestants_.push_back({"user_gemm_alone", "peer", mn * static_cast<double>(case_.users() * case_.k_user),
                          [=](int call, cudaStream_t stream) { user_gemm(copy_of(call), stream); }});
}

void LceContest::add_ours(const std::string& name, const LinearCompressionConfig& config,
                          LinearCompressionStage stage) {
  DeviceBuffer* workspace = scratch(kernels::linear_compression_workspace_bytes(copies_[0].inputs->problem(), config));
  contestants_.push_back({name, "ours", case_.useful_operations(), [=, this](int call, cudaStream_t stream) {
                            auto problem = copies_[call % copies_.size()].inputs->problem();
                            const auto& first = copies_[0].inputs->problem();
                            problem.candidate.w = first.candidate.w;
                            problem.broadcast[0].w = first.broadcast[0].w;
                            kernels::linear_compression(problem, config, workspace->as(), workspace->bytes(), stage,
                                                        stream);
                          }});
}

LceContest::Errors LceContest::errors(bool with_broadcast) {
  Errors errors;
  const auto& problem = copies_[0].inputs->problem();
  DeviceBuffer reference(problem.batch * problem.m * problem.n * sizeof(double));
  kernels::linear_compression_reference(problem, reference.as<double>(), nullptr);
  const auto config = kernels::choose_linear_compression_config(problem);
  DeviceBuffer workspace(kernels::linear_compression_workspace_bytes(problem, config));
  copies_[0].inputs->poison_out();
  kernels::linear_compression(problem, config, workspace.as(), workspace.bytes(), LinearCompressionStage::kFusedWs,
                              nullptr);
  errors.ours = testing::compare(problem, reference.as<double>());
  if (with_broadcast) {
    copies_[0].inputs->poison_out();
    broadcast_stage(copies_[0], nullptr);
    errors.broadcast = testing::compare(problem, reference.as<double>());
  }
  return errors;
}

}  // namespace ikbo::bench
