#include "runtime/random_inputs.h"

#include <ATen/ops/aminmax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "graph/error.h"
#include "graph/jagged.h"

namespace ikbo::runtime {

using graph::Side;

constexpr std::int64_t kLongestBag = 6;  // of many lengths, as drawn

RandomInputs::RandomInputs(const graph::Archive& transformed, const graph::Specification& specification,
                           std::uint64_t seed)
    : layout_(transformed.program, specification),
      ids_(find_id_ranges(transformed)),
      user_symbol_(specification.user_symbol),
      candidate_symbol_(specification.candidate_symbol),
      random_(seed) {
  const bool sampled = transformed.sample_inputs.size() == layout_.inputs().size();
  for (std::size_t i = 0; i < layout_.inputs().size(); ++i) {
    const graph::TensorMeta& meta = transformed.program.graph.tensors.at(layout_.inputs()[i].value);
    metas_.push_back(meta);
    Bounds bounds;
    const at::Tensor sample = sampled ? transformed.sample_inputs[i] : at::Tensor();
    if (sample.defined() && sample.numel() > 0 && at::isIntegralType(sample.scalar_type(), false)) {
      const auto [low, high] = at::aminmax(sample);
      bounds = {low.item().toLong(), high.item().toLong()};
      if (bounds.min == bounds.max)
        bounds = {std::min<std::int64_t>(0, bounds.min), std::max<std::int64_t>(1, bounds.max)};
    }
    bounds_.push_back(bounds);
    note_whole_numbers(i, sample);
    for (std::size_t d = 0; d < meta.sizes.size(); ++d) {
      for (const std::string& symbol : meta.sizes[d].symbols()) {
        if (symbol == user_symbol_ || symbol == candidate_symbol_ || symbols_.contains(symbol)) continue;
        const bool known = sample.defined() && d < static_cast<std::size_t>(sample.dim()) &&
                           meta.sizes[d] == graph::Expr::symbol(symbol);
        std::int64_t size = known ? sample.size(static_cast<std::int64_t>(d)) : 5;
        const auto range = transformed.program.ranges.find(symbol);
        if (range != transformed.program.ranges.end()) {
          if (range->second.min) size = std::max(size, *range->second.min);
          if (range->second.max) size = std::min(size, *range->second.max);
        }
        symbols_[symbol] = size;
      }
    }
  }
}

void RandomInputs::note_whole_numbers(std::size_t input, const at::Tensor& sample) {
  if (!sample.defined() || sample.dim() == 0 || sample.numel() == 0) return;
  if (!at::isFloatingType(sample.scalar_type())) return;
  const at::Tensor rows = sample.to(at::kDouble).reshape({sample.size(0), -1}).contiguous();
  const auto* values = rows.const_data_ptr<double>();
  std::vector<Bounds> positions;
  bool any = false;
  for (std::int64_t p = 0; p < rows.size(1); ++p) {
    double low = values[p];
    double high = values[p];
    bool whole = true;
    for (std::int64_t r = 0; r < rows.size(0); ++r) {
      const double v = values[r * rows.size(1) + p];
      whole = whole && v == std::floor(v) && std::abs(v) < 1e9;
      low = std::min(low, v);
      high = std::max(high, v);
    }
    whole = whole && low < high;  // a constant says nothing of its range
    any = any || whole;
    positions.push_back(whole ? Bounds{static_cast<std::int64_t>(low), static_cast<std::int64_t>(high)} : Bounds{1, 0});
  }
  if (any) whole_[input] = std::move(positions);
}

std::int64_t RandomInputs::uniform(std::int64_t min, std::int64_t max) {
  return std::uniform_int_distribution<std::int64_t>(min, std::max(min, max))(random_);
}

at::Tensor RandomInputs::draw_input(std::size_t input, const std::vector<std::int64_t>& sizes) {
  const at::ScalarType type = graph::scalar_type(metas_[input].dtype);
  if (at::isComplexType(type)) fail("input '{}' is complex, which cannot be drawn", layout_.inputs()[input].name);
  // Drawn in float64, which holds every id exactly.
  at::Tensor values = at::empty(sizes, at::kDouble);
  auto* out = values.mutable_data_ptr<double>();
  std::normal_distribution<double> normal;
  for (std::int64_t i = 0; i < values.numel(); ++i) {
    out[i] = at::isFloatingType(type) ? normal(random_)
             : type == at::kBool      ? static_cast<double>(uniform(0, 1))
                                      : static_cast<double>(uniform(bounds_[input].min, bounds_[input].max));
  }
  if (const auto whole = whole_.find(input); whole != whole_.end()) {
    const auto& positions = whole->second;
    for (std::int64_t i = 0; i < values.numel(); ++i) {
      const Bounds& b = positions[static_cast<std::size_t>(i) % positions.size()];
      if (b.min <= b.max) out[i] = static_cast<double>(uniform(b.min, b.max));
    }
  }
  at::Tensor low = at::full(sizes, -std::numeric_limits<double>::infinity(), at::kDouble);
  at::Tensor high = at::full(sizes, std::numeric_limits<double>::infinity(), at::kDouble);
  bool ids = false;
  for (const IdRange& range : ids_) {
    if (range.value != layout_.inputs()[input].value) continue;
    ids = true;
    // Negative indices mean rows from the end; models are given the others.
    const bool mixed = range.min < 0 && range.max >= 0;
    id_elements(low, range).clamp_min_(mixed ? 0.0 : static_cast<double>(range.min));
    id_elements(high, range).clamp_max_(static_cast<double>(range.max));
  }
  if (ids) {
    const auto* lo = low.const_data_ptr<double>();
    const auto* hi = high.const_data_ptr<double>();
    for (std::int64_t i = 0; i < values.numel(); ++i) {
      if (hi[i] == std::numeric_limits<double>::infinity()) continue;
      out[i] = static_cast<double>(uniform(static_cast<std::int64_t>(lo[i]), static_cast<std::int64_t>(hi[i])));
    }
  }
  return values.to(type);
}

std::vector<at::Tensor> RandomInputs::draw(std::int64_t users, std::int64_t candidates) {
  std::map<std::string, std::int64_t> values = symbols_;
  values[user_symbol_] = users;
  values[candidate_symbol_] = candidates;
  std::map<std::string, at::Tensor> offsets;
  for (const graph::JaggedInput& bags : layout_.jagged()) {
    const std::size_t at = layout_.position(bags.offsets);
    const std::int64_t rows = layout_.inputs()[at].side == Side::kRequestOnly ? users : candidates;
    std::vector<std::int64_t> bounds{0};
    for (std::int64_t i = 0; i < rows; ++i) bounds.push_back(bounds.back() + uniform(0, kLongestBag));
    offsets[bags.offsets] =
        graph::bag_offsets(bags, at::tensor(bounds, at::kLong), graph::scalar_type(metas_[at].dtype));
    for (const std::string& value : bags.values) {
      for (const std::string& total : metas_[layout_.position(value)].sizes[0].symbols()) values[total] = bounds.back();
    }
  }
  std::vector<at::Tensor> tensors;
  for (std::size_t i = 0; i < metas_.size(); ++i) {
    if (const auto drawn = offsets.find(layout_.inputs()[i].value); drawn != offsets.end()) {
      tensors.push_back(drawn->second);
      continue;
    }
    if (layout_.inputs()[i].side == Side::kIndex) {
      tensors.emplace_back();
      continue;
    }
    std::vector<std::int64_t> sizes;
    for (const graph::Expr& size : metas_[i].sizes) {
      const auto value = size.evaluate(values);
      if (!value || *value < 0) fail("input '{}': size {} is not known", layout_.inputs()[i].name, size.str());
      sizes.push_back(*value);
    }
    tensors.push_back(draw_input(i, sizes));
  }
  return tensors;
}

at::Tensor RandomInputs::mapping(const std::string& kind, std::int64_t users, std::int64_t candidates) {
  at::Tensor index = at::empty({candidates}, at::kInt);
  auto* out = index.mutable_data_ptr<std::int32_t>();
  const std::int64_t absent = kind == "unsorted" && users > 1 ? uniform(0, users - 1) : -1;
  for (std::int64_t i = 0; i < candidates; ++i) {
    std::int64_t user = kind == "even" ? i * users / candidates : uniform(0, users - 1);
    while (user == absent) user = uniform(0, users - 1);
    out[i] = static_cast<std::int32_t>(user);
  }
  if (kind == "uneven") std::sort(out, out + candidates);
  return index;
}

}  // namespace ikbo::runtime
