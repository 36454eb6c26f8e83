#include "runtime/ids.h"

#include <ATen/ops/aminmax.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/trunc.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <unordered_map>

#include "graph/error.h"
#include "runtime/id_offsets.h"

namespace ikbo::runtime {
namespace {

using graph::Argument;
using graph::Node;

struct Producer {
  const Node* node = nullptr;
  std::size_t position = 0;  // in the list of its results
};

std::string operator_name(const Node& node) {
  // "torch.ops.aten.slice.Tensor" -> "slice"
  const std::string prefix = "torch.ops.";
  if (node.target.rfind(prefix, 0) != 0) return node.target;
  const std::string rest = node.target.substr(prefix.size());
  const std::size_t first = rest.find('.');
  const std::size_t last = rest.rfind('.');
  if (first == std::string::npos || first == last) return rest;
  return rest.substr(first + 1, last - first - 1);
}

std::optional<std::int64_t> integer(const Argument* argument) {
  if (argument == nullptr) return std::nullopt;
  if (const auto* v = std::get_if<std::int64_t>(argument)) return *v;
  if (const auto* v = std::get_if<graph::SymInt>(argument); v != nullptr && v->name() == nullptr) {
    return std::get<std::int64_t>(v->value);
  }
  return std::nullopt;
}

std::vector<std::int64_t> integers(const Argument* argument) {
  if (argument == nullptr) return {};
  if (const auto* v = std::get_if<std::vector<std::int64_t>>(argument)) return *v;
  std::vector<std::int64_t> values;
  if (const auto* list = std::get_if<graph::SymIntListArg>(argument)) {
    for (const graph::SymInt& v : list->values) {
      if (v.name() != nullptr) return {};
      values.push_back(std::get<std::int64_t>(v.value));
    }
  }
  if (const auto v = integer(argument)) values.push_back(*v);
  return values;
}

std::string tensor_name(const Node& node, const std::string& argument) {
  const Argument* found = node.find(argument);
  const auto* tensor = found == nullptr ? nullptr : std::get_if<graph::TensorArg>(found);
  return tensor == nullptr ? std::string() : tensor->name;
}

// The values an index may have, and through which elements of a value it comes.
struct Query {
  std::string value;
  std::vector<DimRange> columns;
  std::int64_t min = 0;
  std::int64_t max = 0;
  std::string table;
};

class Tracer {
 public:
  explicit Tracer(const graph::Archive& archive) : graph_(archive.program.graph), offsets_(archive) {
    const graph::Program& program = archive.program;
    for (const graph::UserInput& input : graph::user_inputs(program)) inputs_.insert(input.value);
    for (const graph::InputSpec& spec : program.input_specs) {
      for (const std::string& name : graph::value_names(spec.value)) targets_[name] = spec.target;
    }
    for (const Node& node : graph_.nodes) {
      const std::vector<std::string> names = graph::output_names(node);
      for (std::size_t i = 0; i < names.size(); ++i) producers_[names[i]] = {&node, i};
    }
  }

  std::vector<IdRange> run() {
    for (const Node& node : graph_.nodes) start(node);
    return std::move(found_);
  }

 private:
  std::optional<std::int64_t> size(const std::string& value, std::int64_t dim) const {
    const auto meta = graph_.tensors.find(value);
    if (meta == graph_.tensors.end()) return std::nullopt;
    const auto rank = static_cast<std::int64_t>(meta->second.sizes.size());
    if (dim < 0) dim += rank;
    if (dim < 0 || dim >= rank) return std::nullopt;
    return meta->second.sizes[static_cast<std::size_t>(dim)].as_integer();
  }

  std::optional<std::int64_t> rank(const std::string& value) const {
    const auto meta = graph_.tensors.find(value);
    if (meta == graph_.tensors.end()) return std::nullopt;
    return static_cast<std::int64_t>(meta->second.sizes.size());
  }

  std::string table_name(const std::string& value) const {
    const auto target = targets_.find(value);
    return target == targets_.end() || target->second.empty() ? value : target->second;
  }

  void start(const Node& node) {
    const std::string name = operator_name(node);
    if (name == "embedding") {
      begin(tensor_name(node, "weight"), 0, tensor_name(node, "indices"), false);
    } else if (name == "embedding_bag" || name == "_embedding_bag" || name == "_embedding_bag_forward_only") {
      begin(tensor_name(node, "weight"), 0, tensor_name(node, "indices"), false);
    } else if (name == "index_select" || name == "gather") {
      const auto dim = integer(node.find("dim"));
      if (dim) begin(tensor_name(node, "self"), *dim, tensor_name(node, "index"), false);
    } else if (name == "index") {
      const Argument* indices = node.find("indices");
      const auto* list = indices == nullptr ? nullptr : std::get_if<graph::OptionalTensorListArg>(indices);
      if (list == nullptr) return;
      std::int64_t dim = 0;
      for (const auto& index : list->names) {
        if (index && is_mask(*index)) return;
        if (index) begin(tensor_name(node, "self"), dim, *index, true);
        ++dim;
      }
    } else if (name == "one_hot") {
      const auto classes = integer(node.find("num_classes"));
      if (classes && *classes > 0) trace({tensor_name(node, "self"), {}, 0, *classes - 1, "one_hot"});
    }
  }

  bool is_mask(const std::string& value) const {
    const auto meta = graph_.tensors.find(value);
    return meta != graph_.tensors.end() &&
           (meta->second.dtype == graph::DType::kBool || meta->second.dtype == graph::DType::kUInt8);
  }

  void begin(const std::string& table, std::int64_t dim, const std::string& index, bool negative) {
    if (table.empty() || index.empty()) return;
    const auto rows = size(table, dim);
    if (!rows || *rows < 1) return;
    trace({index, {}, negative ? -*rows : 0, *rows - 1, table_name(table)});
  }

  void trace(const Query& query) {
    if (query.value.empty()) return;
    std::string key = fmt::format("{} {} {} {}", query.value, query.min, query.max, query.table);
    for (const DimRange& c : query.columns) key += fmt::format(" {}:{}:{}", c.dim, c.begin, c.end);
    if (!visited_.insert(std::move(key)).second) return;
    if (inputs_.contains(query.value)) {
      found_.push_back({query.value, query.columns, query.min, query.max, query.table});
      return;
    }
    const auto producer = producers_.find(query.value);
    if (producer != producers_.end()) step(query, *producer->second.node, producer->second.position);
  }

  static Query moved(const Query& query, std::string value, std::vector<DimRange> columns) {
    Query next = query;
    next.value = std::move(value);
    next.columns = std::move(columns);
    return next;
  }

  void step(const Query& query, const Node& node, std::size_t position) {
    static const std::set<std::string> kSame = {"to",     "_to_copy",   "clone",           "contiguous", "alias",
                                                "detach", "lift_fresh", "lift_fresh_copy", "long",       "int"};
    static const std::set<std::string> kReshape = {"view",    "reshape", "_unsafe_view",
                                                   "flatten", "squeeze", "view_copy"};
    const std::string name = operator_name(node);
    std::string self = tensor_name(node, "self");
    if (self.empty()) self = tensor_name(node, "input");
    if (kSame.contains(name)) {
      trace(moved(query, self, query.columns));
    } else if (name == "slice") {
      slice(query, node, self);
    } else if (name == "select") {
      select(query, node, self);
    } else if (name == "unsqueeze") {
      unsqueeze(query, node, self);
    } else if (kReshape.contains(name)) {
      // A selection of elements is followed through a change of shape only where it is of all of them.
      if (query.columns.empty()) trace(moved(query, self, {}));
    } else if (name == "transpose" || name == "permute" || name == "t") {
      permute(query, node, self, name);
    } else if (name == "expand" || name == "repeat" || name == "repeat_interleave") {
      if (query.columns.empty()) trace(moved(query, self, {}));
    } else if (name == "broadcast" && tensor_name(node, "x_user") != "") {
      trace(moved(query, tensor_name(node, "x_user"), query.columns));
    } else if (name == "index_select" && integer(node.find("dim")) == 0) {
      trace(moved(query, self, query.columns));
    } else if (name == "cat") {
      cat(query, node);
    } else if (name == "stack") {
      stack(query, node);
    } else if (name == "split" || name == "split_with_sizes" || name == "chunk" || name == "unbind") {
      split(query, node, self, name, position);
    } else if (name == "add" || name == "sub") {
      shift(query, node, self, name == "add" ? 1 : -1);
    }
  }

  static DimRange* find(std::vector<DimRange>& columns, std::int64_t dim) {
    for (DimRange& c : columns) {
      if (c.dim == dim) return &c;
    }
    return nullptr;
  }

  std::optional<std::int64_t> dim_of(const Node& node, const std::string& value, std::int64_t extra = 0) const {
    const Argument* argument = node.find("dim");
    std::optional<std::int64_t> dim = argument == nullptr ? std::int64_t{0} : integer(argument);
    const auto r = rank(value);
    if (!dim || !r) return std::nullopt;
    return *dim < 0 ? *dim + *r + extra : *dim;
  }

  void slice(const Query& query, const Node& node, const std::string& self) {
    const auto dim = dim_of(node, self);
    if (!dim || integer(node.find("step")).value_or(1) != 1) return;
    const auto rows = size(self, *dim);
    const std::int64_t all = rows.value_or(std::numeric_limits<std::int64_t>::max());
    std::int64_t begin = 0;
    std::int64_t end = all;
    const auto bound = [&](const char* which, std::int64_t& value) {
      const Argument* argument = node.find(which);
      if (argument == nullptr || std::holds_alternative<graph::NoneArg>(*argument)) return true;
      const auto given = integer(argument);
      if (!given || (*given < 0 && !rows)) return false;
      value = std::clamp<std::int64_t>(*given < 0 ? *given + *rows : *given, 0, all);
      return true;
    };
    if (!bound("start", begin) || !bound("end", end)) return;
    std::vector<DimRange> columns = query.columns;
    if (begin == 0 && end == all) return trace(moved(query, self, columns));
    if (DimRange* c = find(columns, *dim)) {
      c->begin += begin;
      c->end = std::min(c->end + begin, end);
    } else {
      columns.push_back({*dim, begin, end});
    }
    trace(moved(query, self, columns));
  }

  void select(const Query& query, const Node& node, const std::string& self) {
    const auto dim = dim_of(node, self);
    const auto index = integer(node.find("index"));
    if (!dim || !index) return;
    const auto rows = size(self, *dim);
    if (*index < 0 && !rows) return;
    const std::int64_t at = *index < 0 ? *index + *rows : *index;
    std::vector<DimRange> columns = query.columns;
    for (DimRange& c : columns) c.dim += c.dim >= *dim ? 1 : 0;
    columns.push_back({*dim, at, at + 1});
    trace(moved(query, self, columns));
  }

  void unsqueeze(const Query& query, const Node& node, const std::string& self) {
    const auto dim = dim_of(node, self, 1);
    if (!dim) return;
    std::vector<DimRange> columns;
    for (DimRange c : query.columns) {
      if (c.dim == *dim) continue;
      c.dim -= c.dim > *dim ? 1 : 0;
      columns.push_back(c);
    }
    trace(moved(query, self, columns));
  }

  void permute(const Query& query, const Node& node, const std::string& self, const std::string& name) {
    const auto r = rank(self);
    if (!r) return;
    std::vector<std::int64_t> order;
    for (std::int64_t i = 0; i < *r; ++i) order.push_back(i);
    if (name == "permute") {
      order = integers(node.find("dims"));
      if (static_cast<std::int64_t>(order.size()) != *r) return;
    } else if (*r >= 2) {
      std::int64_t a = name == "t" ? 0 : integer(node.find("dim0")).value_or(0);
      std::int64_t b = name == "t" ? 1 : integer(node.find("dim1")).value_or(0);
      a += a < 0 ? *r : 0;
      b += b < 0 ? *r : 0;
      if (a < 0 || b < 0 || a >= *r || b >= *r) return;
      std::swap(order[static_cast<std::size_t>(a)], order[static_cast<std::size_t>(b)]);
    }
    std::vector<DimRange> columns = query.columns;
    for (DimRange& c : columns) {
      if (c.dim >= *r) return;
      const std::int64_t source = order[static_cast<std::size_t>(c.dim)];
      c.dim = source < 0 ? source + *r : source;
    }
    trace(moved(query, self, columns));
  }

  // What of `query` falls on [offset, offset + rows) of `dim`, seen from there.
  static std::optional<std::vector<DimRange>> part(const Query& query, std::int64_t dim, std::int64_t offset,
                                                   std::int64_t rows) {
    std::vector<DimRange> columns = query.columns;
    DimRange* c = find(columns, dim);
    if (c == nullptr) return columns;
    c->begin = std::max<std::int64_t>(c->begin - offset, 0);
    c->end = std::min(c->end - offset, rows);
    if (c->begin >= c->end) return std::nullopt;
    return columns;
  }

  void cat(const Query& query, const Node& node) {
    const Argument* argument = node.find("tensors");
    const auto* list = argument == nullptr ? nullptr : std::get_if<graph::TensorListArg>(argument);
    if (list == nullptr || list->names.empty()) return;
    const auto dim = dim_of(node, list->names.front());
    if (!dim) return;
    std::vector<DimRange> columns = query.columns;
    const bool restricted = find(columns, *dim) != nullptr;
    std::int64_t offset = 0;
    for (const std::string& name : list->names) {
      const auto rows = size(name, *dim);
      if (restricted && !rows) return;
      if (const auto inner = part(query, *dim, offset, rows.value_or(0))) trace(moved(query, name, *inner));
      offset += rows.value_or(0);
    }
  }

  void stack(const Query& query, const Node& node) {
    const Argument* argument = node.find("tensors");
    const auto* list = argument == nullptr ? nullptr : std::get_if<graph::TensorListArg>(argument);
    if (list == nullptr || list->names.empty()) return;
    const auto dim = dim_of(node, list->names.front(), 1);
    if (!dim) return;
    for (std::size_t i = 0; i < list->names.size(); ++i) {
      const auto inner = part(query, *dim, static_cast<std::int64_t>(i), 1);
      if (!inner) continue;
      std::vector<DimRange> columns;
      for (DimRange c : *inner) {
        if (c.dim == *dim) continue;
        c.dim -= c.dim > *dim ? 1 : 0;
        columns.push_back(c);
      }
      trace(moved(query, list->names[i], columns));
    }
  }

  void split(const Query& query, const Node& node, const std::string& self, const std::string& name,
             std::size_t position) {
    const auto dim = dim_of(node, self);
    if (!dim) return;
    const std::vector<std::string> outputs = graph::output_names(node);
    std::vector<DimRange> columns = query.columns;
    if (name == "unbind") {
      for (DimRange& c : columns) c.dim += c.dim >= *dim ? 1 : 0;
      columns.push_back({*dim, static_cast<std::int64_t>(position), static_cast<std::int64_t>(position) + 1});
      return trace(moved(query, self, columns));
    }
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < position; ++i) {
      const auto rows = size(outputs[i], *dim);
      if (!rows) return;
      begin += *rows;
    }
    const auto rows = size(outputs[position], *dim);
    if (!rows) return;
    if (DimRange* c = find(columns, *dim)) {
      c->begin += begin;
      c->end += begin;
    } else {
      columns.push_back({*dim, begin, begin + *rows});
    }
    trace(moved(query, self, columns));
  }

  // ids + constant: a number, or one a field where fields share a table.
  void shift(const Query& query, const Node& node, const std::string& self, std::int64_t sign) {
    if (integer(node.find("alpha")).value_or(1) != 1) return;
    if (const auto other = integer(node.find("other"))) return trace(shifted(query, self, sign * *other));
    std::string ids = self;
    auto offsets = offsets_.along_last(tensor_name(node, "other"));
    if (!offsets && sign > 0) {  // constant + ids
      offsets = offsets_.along_last(self);
      ids = tensor_name(node, "other");
    }
    const auto r = rank(ids);
    if (!offsets || !r || rank(query.value) != r) return;
    if (offsets->size() == 1) return trace(shifted(query, ids, sign * offsets->front()));
    if (*r < 1 || size(ids, *r - 1) != static_cast<std::int64_t>(offsets->size())) return;
    for (std::size_t i = 0; i < offsets->size(); ++i) {
      Query next = shifted(query, ids, sign * (*offsets)[i]);
      const auto at = static_cast<std::int64_t>(i);
      if (DimRange* c = find(next.columns, *r - 1)) {
        if (at < c->begin || at >= c->end) continue;
        *c = {*r - 1, at, at + 1};
      } else {
        next.columns.push_back({*r - 1, at, at + 1});
      }
      trace(next);
    }
  }

  static Query shifted(const Query& query, const std::string& value, std::int64_t offset) {
    Query next = moved(query, value, query.columns);
    next.min -= offset;
    next.max -= offset;
    return next;
  }

  const graph::Graph& graph_;
  const IdOffsets offsets_;
  std::set<std::string> inputs_;
  std::unordered_map<std::string, std::string> targets_;
  std::unordered_map<std::string, Producer> producers_;
  std::set<std::string> visited_;
  std::vector<IdRange> found_;
};

}  // namespace

std::vector<IdRange> find_id_ranges(const graph::Archive& archive) {
  return Tracer(archive).run();
}

at::Tensor id_elements(const at::Tensor& input, const IdRange& range) {
  at::Tensor elements = input;
  for (const DimRange& c : range.columns) {
    if (c.dim >= elements.dim()) continue;
    const std::int64_t begin = std::min(c.begin, elements.size(c.dim));
    const std::int64_t end = std::min(c.end, elements.size(c.dim));
    elements = elements.narrow(c.dim, begin, std::max<std::int64_t>(end - begin, 0));
  }
  return elements;
}

std::optional<BadId> find_bad_id(const at::Tensor& input, const IdRange& range) {
  const at::Tensor elements = id_elements(input, range);
  if (elements.numel() == 0 || input.scalar_type() == at::kBool) return std::nullopt;
  const auto low = static_cast<double>(range.min);
  const auto high = static_cast<double>(range.max);
  // Floating-point ids (a packed matrix) are cut towards zero by the cast.
  const at::Tensor whole = at::isFloatingType(elements.scalar_type()) ? elements.to(at::kDouble).trunc() : elements;
  const auto [smallest, largest] = at::aminmax(whole);
  if (smallest.item().toDouble() >= low && largest.item().toDouble() <= high) return std::nullopt;
  const at::Tensor bad = whole.lt(range.min).logical_or(whole.gt(range.max)).logical_or(whole.ne(whole));
  const at::Tensor where = at::nonzero(bad);
  if (where.size(0) == 0) return std::nullopt;
  BadId result;
  at::Tensor element = whole;
  for (std::int64_t d = 0; d < where.size(1); ++d) {
    const std::int64_t index = where[0][d].item<std::int64_t>();
    element = element.select(0, index);
    std::int64_t offset = 0;
    for (const DimRange& c : range.columns) offset += c.dim == d ? c.begin : 0;
    result.position.push_back(index + offset);
  }
  const double value = element.item().toDouble();
  result.value = std::isfinite(value) ? static_cast<std::int64_t>(value) : std::numeric_limits<std::int64_t>::min();
  return result;
}

}  // namespace ikbo::runtime
