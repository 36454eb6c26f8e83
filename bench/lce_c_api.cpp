// Linear compression for callers without C++, such as the driver that measures it beside the public kernels.
#include <cstring>
#include <exception>
#include <string>

#include "kernels/linear_compression.h"

namespace {

thread_local std::string last_error;

}  // namespace

extern "C" {

struct IkboLceCall {
  int64_t batch, m, n, k_candidate, users, k_user;
  int64_t w_candidate_row_stride, w_user_row_stride;
  const void *w_candidate, *e_candidate, *w_user, *e_user;
  const int32_t* index;
  void* out;
  void* workspace;
  int64_t workspace_bytes;
  void* stream;
  int32_t is_fp16;
  int32_t single_launch;
  int32_t block_m;  // 0: chosen for the shape
  int32_t cluster;
};

const char* ikbo_lce_error() {
  return last_error.c_str();
}

// Without a workspace: the bytes that it takes. With one: 0 once the call is enqueued. -1 is an error.
int64_t ikbo_lce(const IkboLceCall* call) {
  using namespace ikbo::kernels;
  try {
    LinearCompressionProblem problem;
    problem.batch = call->batch;
    problem.m = call->m;
    problem.n = call->n;
    problem.type = problem.out_type = call->is_fp16 != 0 ? ScalarType::kFloat16 : ScalarType::kBFloat16;
    problem.candidate = {call->w_candidate, call->w_candidate_row_stride,
                         call->e_candidate, call->k_candidate * call->n,
                         call->n,           call->batch,
                         call->k_candidate, nullptr};
    problem.broadcast = {{call->w_user, call->w_user_row_stride, call->e_user, call->k_user * call->n, call->n,
                          call->users, call->k_user, call->index}};
    problem.out = call->out;
    LinearCompressionConfig config = choose_linear_compression_config(problem);
    if (call->block_m != 0) {
      config = {call->block_m, call->cluster, config.ctas / call->cluster * call->cluster};
    }
    if (call->workspace == nullptr) {
      return static_cast<int64_t>(linear_compression_workspace_bytes(problem, config));
    }
    linear_compression(problem, config, call->workspace, static_cast<size_t>(call->workspace_bytes),
                       call->single_launch != 0 ? LinearCompressionStage::kFusedWs : LinearCompressionStage::kFused,
                       static_cast<cudaStream_t>(call->stream));
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return -1;
  }
}

}  // extern "C"
