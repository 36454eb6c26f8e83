// What is measured for one shape of linear compression: our stages and the same work by cuBLAS.
#pragma once

#include <cublas_v2.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/gpu/lce_inputs.h"

namespace ikbo::bench {

struct LceCase {
  int64_t batch = 1024;
  int64_t m = 433;
  int64_t n = 256;
  int64_t k_user = 1178;
  int64_t k_candidate = 866;
  int64_t ratio = 70;  // candidates a user
  kernels::ScalarType type = kernels::ScalarType::kBFloat16;

  int64_t users() const { return (batch + ratio - 1) / ratio; }
  double useful_operations() const {
    return 2.0 * static_cast<double>(m * n) *
           (static_cast<double>(batch * k_candidate) + static_cast<double>(users() * k_user));
  }
};

struct Contestant {
  std::string name;
  std::string kind;  // "ours", "stage" (what our stages improve on) or "peer"
  double operations = 0;
  std::function<void(int call, cudaStream_t stream)>
      run;  // successive calls go through successive copies of the inputs
};

class Cublas {
 public:
  Cublas();
  ~Cublas();
  // out[b] (m, n) = w (m, k) e[b] (k, n), row-major, w shared by the batch unless w_batch_stride says otherwise.
  void multiply(const void* w, int64_t w_row_stride, const void* e, void* out, int64_t batch, int64_t m, int64_t n,
                int64_t k, kernels::ScalarType type, cudaStream_t stream, int64_t w_batch_stride = 0,
                int64_t e_batch_stride = -1);

 private:
  cublasHandle_t handle_ = nullptr;
  testing::DeviceBuffer workspace_;
};

// The inputs of a case, in as many copies as it takes to be several times the L2 cache, and all that works on them.
class LceContest {
 public:
  LceContest(const LceCase& shape, Cublas& cublas, bool with_slow_stages);
  const std::vector<Contestant>& contestants() const { return contestants_; }
  void add_ours(const std::string& name, const kernels::LinearCompressionConfig& config,
                kernels::LinearCompressionStage stage);
  kernels::LinearCompressionShape shape() const;
  // Compares fused_ws with float64 on the first copy of the inputs, and the broadcast GEMM if it takes part.
  struct Errors {
    testing::Comparison ours;
    testing::Comparison broadcast;
  };
  Errors errors(bool with_broadcast);

 private:
  struct Copy {
    std::unique_ptr<testing::LceInputs> inputs;
    std::unique_ptr<testing::DeviceBuffer> e_candidate_padded, e_user_padded;  // zero rows up to a multiple of 8
  };

  void add_library_stages(bool with_slow_stages);
  void broadcast_stage(const Copy& copy, cudaStream_t stream);
  testing::DeviceBuffer* scratch(size_t bytes);

  LceCase case_;
  Cublas& cublas_;
  std::vector<Copy> copies_;
  std::unique_ptr<testing::DeviceBuffer> w_candidate_padded_, w_user_padded_, w_candidate_, w_user_, w_joined_;
  std::vector<std::unique_ptr<testing::DeviceBuffer>> scratch_;
  testing::DeviceBuffer* joined_ = nullptr;
  testing::DeviceBuffer* user_out_ = nullptr;
  std::vector<Contestant> contestants_;
};

}  // namespace ikbo::bench
