#include "ops/cuda/library_product.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "ops/cuda/aligned_rows.h"
#include "ops/linear.h"

namespace ikbo::cuda {
namespace {

// What kernels are chosen for, whatever a call's batch is.
constexpr int64_t kChosenForRows = 1024;
constexpr int64_t kChosenForBatch = 256;
constexpr int64_t kMostBatches = 32768;  // of one call: more do not fit a grid's third dimension
constexpr int64_t kAlignment = 16;       // bytes, of every row of a and b
// A chain of sums in fp32 is cut after so many: its rounding error grows with its length.
constexpr int64_t kLongestChain = 1024;

void check(cublasStatus_t status, const char* what) {
  TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, "cuBLASLt: ", what, ": ", cublasLtGetStatusString(status));
}

template <typename Handle, cublasStatus_t (*DESTROY)(Handle)>
struct Destroy {
  void operator()(Handle handle) const { DESTROY(handle); }
};
template <typename Handle, cublasStatus_t (*DESTROY)(Handle)>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroy<Handle, DESTROY>>;
using MatmulDescription = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

// Matrices are column-major, as cuBLAS wants them: d (m, n) = a' (m, k) b (k, n), a' = a or its transpose.
struct Shape {
  at::ScalarType type;
  bool a_transposed;
  bool batched;  // over a and d
  bool tf32;
  int64_t m, n, k;
  c10::DeviceIndex device;

  auto key() const { return std::tie(type, a_transposed, batched, tf32, m, n, k, device); }
  bool operator<(const Shape& other) const { return key() < other.key(); }
};

struct Operand {
  const void* data;
  int64_t leading;  // elements from one column to the next
  int64_t batch_stride;
};

cudaDataType_t data_type(at::ScalarType type) {
  return type == at::kDouble  ? CUDA_R_64F
         : type == at::kFloat ? CUDA_R_32F
         : type == at::kHalf  ? CUDA_R_16F
                              : CUDA_R_16BF;
}

MatmulDescription describe(const Shape& shape) {
  const bool wide = shape.type == at::kDouble;
  const cublasComputeType_t compute = wide         ? CUBLAS_COMPUTE_64F
                                      : shape.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                   : CUBLAS_COMPUTE_32F;
  cublasLtMatmulDesc_t description = nullptr;
  check(cublasLtMatmulDescCreate(&description, compute, wide ? CUDA_R_64F : CUDA_R_32F), "no description");
  MatmulDescription owned(description);
  const cublasOperation_t operation = shape.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  check(cublasLtMatmulDescSetAttribute(description, CUBLASLT_MATMUL_DESC_TRANSA, &operation, sizeof(operation)),
        "no transposition");
  return owned;
}

Layout lay_out(at::ScalarType type, int64_t rows, int64_t columns, int64_t leading, int64_t batches,
               int64_t batch_stride) {
  cublasLtMatrixLayout_t layout = nullptr;
  check(cublasLtMatrixLayoutCreate(&layout, data_type(type), static_cast<uint64_t>(rows),
                                   static_cast<uint64_t>(columns), leading),
        "no layout");
  Layout owned(layout);
  const auto count = static_cast<int32_t>(batches);
  check(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count)),
        "no batch count");
  check(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &batch_stride,
                                         sizeof(batch_stride)),
        "no batch stride");
  return owned;
}

struct Layouts {
  Layout a, b, d;
};

Layouts lay_out(const Shape& shape, int64_t n, int64_t batches, const Operand& a, const Operand& b) {
  const auto sums = sum_type(shape.type);
  return {shape.a_transposed ? lay_out(shape.type, shape.k, shape.m, a.leading, batches, a.batch_stride)
                             : lay_out(shape.type, shape.m, shape.k, a.leading, batches, a.batch_stride),
          lay_out(shape.type, shape.k, n, b.leading, batches, b.batch_stride),
          lay_out(sums, shape.m, n, shape.m, batches, shape.m * n)};
}

cublasLtMatmulAlgo_t choose(const Shape& shape) {
  const MatmulDescription description = describe(shape);
  const int64_t n = shape.batched ? shape.n : kChosenForRows;
  const int64_t elements = kAlignment / static_cast<int64_t>(c10::elementSize(shape.type));
  const auto up = [&](int64_t size) { return (size + elements - 1) / elements * elements; };
  const Layouts layouts =
      lay_out(shape, n, shape.batched ? kChosenForBatch : 1,
              {nullptr, up(shape.a_transposed ? shape.k : shape.m), up(shape.m) * shape.k}, {nullptr, up(shape.k), 0});
  cublasLtMatmulPreference_t preference = nullptr;
  check(cublasLtMatmulPreferenceCreate(&preference), "no preference");
  const Preference owned(preference);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)), "no preference");
  };
  // Neither a workspace nor a reduction: K is never split.
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{0});
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(kAlignment));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(kAlignment));
  const auto item = static_cast<int64_t>(c10::elementSize(sum_type(shape.type)));
  const auto d_alignment = static_cast<uint32_t>(std::min(kAlignment, (shape.m * item) & -(shape.m * item)));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, d_alignment);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, d_alignment);
  std::array<cublasLtMatmulHeuristicResult_t, 16> results{};
  int found = 0;
  check(cublasLtMatmulAlgoGetHeuristic(at::cuda::getCurrentCUDABlasLtHandle(), description.get(), layouts.a.get(),
                                       layouts.b.get(), layouts.d.get(), layouts.d.get(), preference,
                                       static_cast<int>(results.size()), results.data(), &found),
        "no kernel for a product");
  for (int i = 0; i < found; ++i) {
    const auto& algorithm = results[static_cast<size_t>(i)].algo;
    int32_t splits = 1;
    size_t written = 0;
    cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits, sizeof(splits),
                                         &written);
    if (results[static_cast<size_t>(i)].state == CUBLAS_STATUS_SUCCESS && splits <= 1) return algorithm;
  }
  TORCH_CHECK(false, "cuBLASLt: no kernel for a product of ", shape.m, " x ", shape.k, " by ", shape.k, " x ", n,
              " of ", shape.type);
}

cublasLtMatmulAlgo_t chosen(const Shape& shape) {
  static std::mutex mutex;
  static std::map<Shape, cublasLtMatmulAlgo_t> known;
  const std::lock_guard lock(mutex);
  const auto found = known.find(shape);
  return found != known.end() ? found->second : known.emplace(shape, choose(shape)).first->second;
}

// d = a' b, or added to d.
void multiply(const Shape& shape, int64_t n, int64_t batches, const Operand& a, const Operand& b, bool add,
              const at::Tensor& out) {
  const cublasLtMatmulAlgo_t algorithm = chosen(shape);
  const MatmulDescription description = describe(shape);
  const Layouts layouts = lay_out(shape, n, batches, a, b);
  const double one64 = 1, beta64 = add ? 1 : 0;
  const float one32 = 1, beta32 = add ? 1.0f : 0.0f;
  const bool wide = shape.type == at::kDouble;
  void* const d = out.mutable_data_ptr();
  check(cublasLtMatmul(at::cuda::getCurrentCUDABlasLtHandle(), description.get(),
                       wide ? static_cast<const void*>(&one64) : &one32, a.data, layouts.a.get(), b.data,
                       layouts.b.get(), wide ? static_cast<const void*>(&beta64) : &beta32, d, layouts.d.get(), d,
                       layouts.d.get(), &algorithm, nullptr, 0, c10::cuda::getCurrentCUDAStream()),
        "a product failed");
}

int64_t longest_chain(at::ScalarType type, int64_t k) {
  return type == at::kFloat ? std::min(kLongestChain, k) : k;
}

bool tf32(at::ScalarType type) {
  return type == at::kFloat && at::globalContext().allowTF32CuBLAS();
}

}  // namespace

at::Tensor row_product(const at::Tensor& x, const at::Tensor& w) {
  const auto type = x.scalar_type();
  const int64_t rows = x.size(0), features = w.size(0), k = x.size(1);
  const auto options = x.options().dtype(sum_type(type));
  if (rows == 0 || features == 0 || k == 0) return at::zeros({rows, features}, options);
  at::Tensor out = at::empty({rows, features}, options);
  const int64_t chain = longest_chain(type, k);
  for (int64_t first = 0; first < k; first += chain) {
    const int64_t terms = std::min(chain, k - first);
    const Shape shape{type,  /*a_transposed=*/true, /*batched=*/false, tf32(type), features, 0,
                      terms, x.device().index()};
    multiply(shape, rows, 1, {w.narrow(1, first, terms).const_data_ptr(), w.stride(0), 0},
             {x.narrow(1, first, terms).const_data_ptr(), x.stride(0), 0}, first > 0, out);
  }
  return out;
}

at::Tensor stack_product(const at::Tensor& w, const at::Tensor& e) {
  const auto type = e.scalar_type();
  const int64_t rows = e.size(0), m = w.size(0), k = w.size(1), n = e.size(2);
  const auto options = e.options().dtype(sum_type(type));
  if (rows == 0 || m == 0 || k == 0 || n == 0) return at::zeros({rows, m, n}, options);
  const std::vector<at::Tensor> operands = with_aligned_rows({e, w}, c10::cuda::getCurrentCUDAStream());
  const at::Tensor& regular_e = operands[0];
  const at::Tensor& regular_w = operands[1];
  at::Tensor out = at::empty({rows, m, n}, options);
  const int64_t chain = longest_chain(type, k);
  for (int64_t first = 0; first < k; first += chain) {
    const int64_t terms = std::min(chain, k - first);
    const Shape shape{type, /*a_transposed=*/false, /*batched=*/true, tf32(type), n, m, terms, e.device().index()};
    const at::Tensor part_of_w = regular_w.narrow(1, first, terms);
    for (int64_t row = 0; row < rows; row += kMostBatches) {
      const int64_t count = std::min(kMostBatches, rows - row);
      const at::Tensor part = regular_e.narrow(0, row, count).narrow(1, first, terms);
      multiply(shape, m, count, {part.const_data_ptr(), part.stride(1), part.stride(0)},
               {part_of_w.const_data_ptr(), part_of_w.stride(0), 0}, first > 0, out.narrow(0, row, count));
    }
  }
  return out;
}

}  // namespace ikbo::cuda
