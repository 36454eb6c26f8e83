#include "kernels/measured_configs.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>

namespace ikbo::kernels {
namespace {

void require(bool condition, const std::string& what) {
  if (!condition) {
    throw std::invalid_argument("measured configuration of linear_compression: " + what);
  }
}

void check_shape(const MeasuredShape& shape) {
  require(shape.type == ScalarType::kFloat16 || shape.type == ScalarType::kBFloat16,
          "the type must be float16 or bfloat16");
  require(shape.m > 0 && shape.n > 0, "m and n must be positive");
  require(shape.k_candidate >= 0, "k_candidate cannot be negative");
  for (const int64_t k : shape.k_broadcast) {
    require(k >= 0, "k_broadcast cannot be negative");
  }
}

std::string text(const MeasuredPoint& point) {
  return "block_m " + std::to_string(point.block_m) + " with cluster " + std::to_string(point.cluster);
}

std::string built_sizes() {
  std::string sizes;
  for (const int size : linear_compression_block_sizes()) {
    sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
  }
  return sizes;
}

std::optional<LinearCompressionConfig> legal_config(const LinearCompressionShape& shape, const MeasuredPoint& point,
                                                    int multiprocessors) {
  for (const LinearCompressionConfig& config : measurable_linear_compression_configs(shape, multiprocessors)) {
    if (config.block_m == point.block_m && config.cluster == point.cluster) {
      return config;
    }
  }
  return std::nullopt;
}

bool before(const MeasuredPoint& a, const MeasuredPoint& b) {
  return std::tie(a.batch, a.rows_broadcast) < std::tie(b.batch, b.rows_broadcast);
}

// The logarithm of how many times larger one is than the other.
double distance(int64_t a, int64_t b) {
  return std::log2(static_cast<double>(std::max<int64_t>(a, 1))) -
         std::log2(static_cast<double>(std::max<int64_t>(b, 1)));
}

}  // namespace

std::vector<LinearCompressionConfig> measurable_linear_compression_configs(const LinearCompressionShape& shape,
                                                                           int multiprocessors) {
  std::vector<LinearCompressionConfig> configs;
  for (const LinearCompressionConfig& config : legal_linear_compression_configs(shape, multiprocessors)) {
    const auto same = std::find_if(configs.begin(), configs.end(), [&](const LinearCompressionConfig& other) {
      return other.block_m == config.block_m && other.cluster == config.cluster;
    });
    if (same == configs.end()) {
      configs.push_back(config);
    } else if (modelled_cycles(shape, config) < modelled_cycles(shape, *same)) {
      *same = config;
    }
  }
  return configs;
}

void MeasuredConfigs::add(const MeasuredShape& shape, const std::vector<MeasuredPoint>& points) {
  check_shape(shape);
  for (const MeasuredPoint& point : points) {
    require(point.batch > 0, "the batch must be positive");
    require(point.rows_broadcast.size() == shape.k_broadcast.size(),
            std::to_string(point.rows_broadcast.size()) + " numbers of rows for " +
                std::to_string(shape.k_broadcast.size()) + " broadcast terms");
    for (const int64_t rows : point.rows_broadcast) {
      require(rows >= 0, "rows cannot be negative");
    }
    const LinearCompressionShape at{point.batch,          shape.m,          shape.n, shape.k_candidate,
                                    point.rows_broadcast, shape.k_broadcast};
    require(legal_config(at, point, multiprocessors_).has_value(),
            "there is no kernel for " + text(point) + "; tile heights are " + built_sizes() + ", clusters 1 and 2");
  }
  auto entry = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.shape == shape; });
  if (entry == entries_.end()) {
    entry = entries_.insert(entry, {shape, {}});
  }
  for (const MeasuredPoint& point : points) {
    const auto place = std::lower_bound(entry->points.begin(), entry->points.end(), point, before);
    if (place != entry->points.end() && !before(point, *place)) {
      *place = point;
    } else {
      entry->points.insert(place, point);
    }
  }
}

std::optional<LinearCompressionConfig> MeasuredConfigs::find(const LinearCompressionShape& shape,
                                                             ScalarType type) const {
  const auto entry = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) {
    return e.shape.type == type && e.shape.m == shape.m && e.shape.n == shape.n &&
           e.shape.k_candidate == shape.k_candidate && e.shape.k_broadcast == shape.k_broadcast;
  });
  if (entry == entries_.end()) {
    return std::nullopt;
  }
  const MeasuredPoint* nearest = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const MeasuredPoint& point : entry->points) {
    const double of_batch = distance(shape.batch, point.batch);
    if (std::abs(of_batch) > std::log2(kFarthestBatch)) {
      continue;
    }
    double squares = of_batch * of_batch;
    for (size_t t = 0; t < point.rows_broadcast.size(); ++t) {
      const double of_rows = distance(shape.rows_broadcast[t], point.rows_broadcast[t]);
      squares += of_rows * of_rows;
    }
    if (squares < least) {
      least = squares;
      nearest = &point;
    }
  }
  return nearest == nullptr ? std::nullopt : legal_config(shape, *nearest, multiprocessors_);
}

}  // namespace ikbo::kernels
