// torch.ops.ikbo.use_linear_compression_configs and linear_compression_config: what was measured on a device, for all
// models of the process. A measurement belongs to a kind of device and the sizes of an operator, not to a model, and
// all configurations give the same bits: two models with the same operator may share it.
#include "ops/cuda/measured.h"

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/measured_configs.h"
#include "ops/cuda/call.h"

namespace ikbo::cuda {
namespace {

using kernels::LinearCompressionShape;
using kernels::MeasuredConfigs;
using kernels::MeasuredPoint;
using kernels::MeasuredShape;

constexpr const char* kUse = "ikbo::use_linear_compression_configs";

struct Measured {
  std::shared_mutex mutex;  // held by operators while they look one up, some tens of nanoseconds
  std::map<c10::DeviceIndex, MeasuredConfigs> devices;
};

Measured& measured() {
  static Measured instance;
  return instance;
}

const cudaDeviceProp& properties_of(const char* op, c10::Device device) {
  TORCH_CHECK_VALUE(device.is_cuda() && device.has_index(), op, ": device is ", device, ", expected cuda:N");
  const auto devices = c10::cuda::device_count();
  TORCH_CHECK_VALUE(device.index() >= 0 && device.index() < devices, op, ": device is ", device, ", but there are ",
                    static_cast<int>(devices), " GPUs");
  return *at::cuda::getDeviceProperties(device.index());
}

std::vector<MeasuredPoint> points_of(const MeasuredShape& shape, at::IntArrayRef candidates, at::IntArrayRef rows,
                                     at::IntArrayRef block_m, at::IntArrayRef cluster) {
  const size_t terms = shape.k_broadcast.size();
  TORCH_CHECK_VALUE(block_m.size() == candidates.size() && cluster.size() == candidates.size() &&
                        rows.size() == candidates.size() * terms,
                    kUse, ": candidates has ", candidates.size(), " points, block_m ", block_m.size(), ", cluster ",
                    cluster.size(), ", and rows_bcast ", rows.size(), " values for ", terms, " broadcast terms");
  // What does not fit becomes what no kernel has.
  const auto number = [](int64_t value) {
    return static_cast<int>(std::clamp<int64_t>(value, 0, std::numeric_limits<int>::max()));
  };
  std::vector<MeasuredPoint> points;
  for (size_t i = 0; i < candidates.size(); ++i) {
    points.push_back({candidates[i], rows.slice(i * terms, terms).vec(), number(block_m[i]), number(cluster[i])});
  }
  return points;
}

// False, and nothing is used, where the device is another than was measured on.
bool use_configs(c10::Device device, const std::string& device_name, int64_t multiprocessors, at::ScalarType dtype,
                 int64_t m, int64_t n, int64_t k_cand, at::IntArrayRef k_bcast, at::IntArrayRef candidates,
                 at::IntArrayRef rows_bcast, at::IntArrayRef block_m, at::IntArrayRef cluster) {
  const cudaDeviceProp& properties = properties_of(kUse, device);
  if (device_name != properties.name || multiprocessors != properties.multiProcessorCount) return false;
  const MeasuredShape shape{scalar_type_of(dtype), m, n, k_cand, k_bcast.vec()};
  const std::vector<MeasuredPoint> points = points_of(shape, candidates, rows_bcast, block_m, cluster);
  Measured& all = measured();
  const std::unique_lock lock(all.mutex);
  try {
    all.devices.try_emplace(device.index(), properties.multiProcessorCount).first->second.add(shape, points);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
  return true;
}

std::tuple<int64_t, int64_t, bool> config_of(c10::Device device, at::ScalarType dtype, int64_t m, int64_t n,
                                             int64_t k_cand, at::IntArrayRef k_bcast, int64_t candidates,
                                             at::IntArrayRef rows_bcast) {
  constexpr const char* kConfig = "ikbo::linear_compression_config";
  properties_of(kConfig, device);
  TORCH_CHECK_VALUE(k_bcast.size() == rows_bcast.size(), kConfig, ": k_bcast has ", k_bcast.size(),
                    " terms and rows_bcast ", rows_bcast.size());
  const LinearCompressionShape shape{candidates, m, n, k_cand, rows_bcast.vec(), k_bcast.vec()};
  const Choice choice = choose_config(shape, scalar_type_of(dtype), device.index());
  return {choice.config.block_m, choice.config.cluster, choice.measured};
}

}  // namespace

Choice choose_config(const LinearCompressionShape& shape, kernels::ScalarType type, c10::DeviceIndex device) {
  Measured& all = measured();
  {
    const std::shared_lock lock(all.mutex);
    const auto configs = all.devices.find(device);
    if (configs != all.devices.end()) {
      if (const auto found = configs->second.find(shape, type)) return {*found, true};
    }
  }
  const int multiprocessors = at::cuda::getDeviceProperties(device)->multiProcessorCount;
  return {kernels::choose_linear_compression_config(shape, multiprocessors), false};
}

TORCH_LIBRARY_FRAGMENT(ikbo, m) {
  m.def(
      "use_linear_compression_configs(Device device, str device_name, int multiprocessors, ScalarType dtype, int m, "
      "int n, int k_cand, int[] k_bcast, int[] candidates, int[] rows_bcast, int[] block_m, int[] cluster) -> bool",
      use_configs);
  m.def(
      "linear_compression_config(Device device, ScalarType dtype, int m, int n, int k_cand, int[] k_bcast, "
      "int candidates, int[] rows_bcast) -> (int block_m, int cluster, bool measured)",
      config_of);
}

}  // namespace ikbo::cuda
