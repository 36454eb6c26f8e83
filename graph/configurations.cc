#include "graph/configurations.h"

#include <cmath>
#include <limits>

#include "graph/error.h"

namespace ikbo::graph {
namespace {

constexpr std::int64_t kLargest = std::numeric_limits<std::int32_t>::max();

/// A member of the list with the path by which a message names it.
class Place {
 public:
  Place(const Json& json, std::string path) : json_(json), path_(std::move(path)) {}

  Place at(const char* name) const {
    if (!json_.is_object()) wrong("an object");
    const auto found = json_.find(name);
    if (found == json_.end()) fail("{} has no '{}'", path_, name);
    return {*found, path_ + "." + name};
  }

  std::int64_t integer(std::int64_t least) const {
    if (!json_.is_number_integer()) wrong("an integer");
    // Unsigned numbers beyond 63 bits come back negative.
    const auto value = json_.get<std::int64_t>();
    if (value < least || value > kLargest) fail("{} is {}, expected {} to {}", path_, json_.dump(), least, kLargest);
    return value;
  }

  double time() const {
    if (!json_.is_number()) wrong("a number");
    const auto value = json_.get<double>();
    if (!std::isfinite(value) || value < 0) fail("{} is {}, expected a time", path_, json_.dump());
    return value;
  }

  std::string text() const {
    if (!json_.is_string()) wrong("a text");
    return json_.get<std::string>();
  }

  std::vector<std::int64_t> integers(std::int64_t least) const {
    std::vector<std::int64_t> values;
    for_each([&](const Place& place) { values.push_back(place.integer(least)); });
    return values;
  }

  template <typename F>
  void for_each(const F& f) const {
    if (!json_.is_array()) wrong("a list");
    for (std::size_t i = 0; i < json_.size(); ++i) f(Place(json_[i], fmt::format("{}[{}]", path_, i)));
  }

  const std::string& path() const { return path_; }

 private:
  [[noreturn]] void wrong(const char* expected) const {
    fail("{} is {}, expected {}", path_, json_.type_name(), expected);
  }

  const Json& json_;
  std::string path_;
};

MeasuredPoint read_point(const Place& place, std::size_t terms) {
  MeasuredPoint point;
  point.candidates = place.at("candidates").integer(1);
  point.rows = place.at("rows").integers(0);
  if (point.rows.size() != terms) {
    fail("{}.rows has {} numbers for {} broadcast terms", place.path(), point.rows.size(), terms);
  }
  point.block_m = static_cast<int>(place.at("block_m").integer(1));
  point.cluster = static_cast<int>(place.at("cluster").integer(1));
  point.microseconds = place.at("us").time();
  point.by_model_microseconds = place.at("us_by_model").time();
  return point;
}

MeasuredCompression read_compression(const Place& place) {
  MeasuredCompression shape;
  shape.dtype = place.at("dtype").text();
  if (shape.dtype != "bfloat16" && shape.dtype != "float16") {
    fail("{}.dtype is '{}', expected bfloat16 or float16", place.path(), shape.dtype);
  }
  shape.m = place.at("m").integer(1);
  shape.n = place.at("n").integer(1);
  shape.k_candidate = place.at("k_candidate").integer(0);
  shape.k_broadcast = place.at("k_broadcast").integers(0);
  place.at("points").for_each(
      [&](const Place& point) { shape.points.push_back(read_point(point, shape.k_broadcast.size())); });
  return shape;
}

}  // namespace

bool MeasuredCompression::same_shape(const MeasuredCompression& other) const {
  return dtype == other.dtype && m == other.m && n == other.n && k_candidate == other.k_candidate &&
         k_broadcast == other.k_broadcast;
}

Json measured_to_json(const std::vector<MeasuredDevice>& devices) {
  Json list = Json::array();
  for (const MeasuredDevice& device : devices) {
    Json shapes = Json::array();
    for (const MeasuredCompression& shape : device.linear_compression) {
      Json points = Json::array();
      for (const MeasuredPoint& point : shape.points) {
        points.push_back({{"candidates", point.candidates},
                          {"rows", point.rows},
                          {"block_m", point.block_m},
                          {"cluster", point.cluster},
                          {"us", point.microseconds},
                          {"us_by_model", point.by_model_microseconds}});
      }
      shapes.push_back({{"dtype", shape.dtype},
                        {"m", shape.m},
                        {"n", shape.n},
                        {"k_candidate", shape.k_candidate},
                        {"k_broadcast", shape.k_broadcast},
                        {"points", std::move(points)}});
    }
    list.push_back({{"device", device.device},
                    {"multiprocessors", device.multiprocessors},
                    {"linear_compression", std::move(shapes)}});
  }
  return list;
}

std::vector<MeasuredDevice> measured_from_json(const Json& json) {
  std::vector<MeasuredDevice> devices;
  Place(json, "configurations").for_each([&](const Place& place) {
    MeasuredDevice& device = devices.emplace_back();
    device.device = place.at("device").text();
    device.multiprocessors = static_cast<int>(place.at("multiprocessors").integer(1));
    place.at("linear_compression").for_each([&](const Place& shape) {
      device.linear_compression.push_back(read_compression(shape));
    });
  });
  return devices;
}

}  // namespace ikbo::graph
