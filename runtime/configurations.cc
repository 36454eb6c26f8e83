#include "runtime/configurations.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <string>
#include <vector>

#include "graph/error.h"

namespace ikbo::runtime {
namespace {

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

}  // namespace

void use_configurations(const graph::Specification& specification, const c10::Device& device) {
  if (!device.is_cuda() || specification.configurations.empty()) return;
  // The operator is the CUDA library's, which is not linked but loaded when a device is opened.
  const auto use = c10::Dispatcher::singleton().findSchemaOrThrow("ikbo::use_linear_compression_configs", "");
  for (const graph::MeasuredDevice& measured : specification.configurations) {
    for (const graph::MeasuredCompression& shape : measured.linear_compression) {
      std::vector<std::int64_t> candidates;
      std::vector<std::int64_t> rows;
      std::vector<std::int64_t> block_m;
      std::vector<std::int64_t> cluster;
      for (const graph::MeasuredPoint& point : shape.points) {
        candidates.push_back(point.candidates);
        rows.insert(rows.end(), point.rows.begin(), point.rows.end());
        block_m.push_back(point.block_m);
        cluster.push_back(point.cluster);
      }
      const at::ScalarType type = shape.dtype == "float16" ? at::kHalf : at::kBFloat16;
      try {
        torch::jit::Stack stack{device,
                                measured.device,
                                measured.multiprocessors,
                                static_cast<std::int64_t>(type),
                                shape.m,
                                shape.n,
                                shape.k_candidate,
                                shape.k_broadcast,
                                candidates,
                                rows,
                                block_m,
                                cluster};
        use.callBoxed(stack);
      } catch (const c10::Error& error) {
        fail("the configurations that the archive holds for {} cannot be used: {}: measure them again with `ikbo tune`",
             measured.device, first_line(error.what_without_backtrace()));
      }
    }
  }
}

}  // namespace ikbo::runtime
