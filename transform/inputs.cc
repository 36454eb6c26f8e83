#include "transform/inputs.h"

#include <fnmatch.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "graph/error.h"

namespace ikbo::transform {
namespace {

using graph::UserInput;

// "a,b[:,0:3],c" -> "a", "b[:,0:3]", "c": commas inside brackets belong to the pattern.
std::vector<std::string> split_patterns(const std::vector<std::string>& given) {
  std::vector<std::string> patterns;
  for (const std::string& text : given) {
    std::string current;
    int depth = 0;
    for (const char c : text) {
      if (c == '[') ++depth;
      if (c == ']') --depth;
      if (c == ',' && depth <= 0) {
        patterns.push_back(current);
        current.clear();
      } else if (c != ' ') {
        current.push_back(c);
      }
    }
    patterns.push_back(current);
  }
  std::erase(patterns, "");
  return patterns;
}

std::string list_inputs(const graph::Program& program, const std::vector<UserInput>& inputs) {
  std::string text;
  for (const UserInput& i : inputs) {
    const auto it = program.graph.tensors.find(i.value);
    text += fmt::format("\n  {:<24} {}", i.name, it == program.graph.tensors.end() ? "" : graph::describe(it->second));
  }
  return text;
}

struct Range {
  std::int64_t from = 0;
  std::int64_t to = 0;
};

// "X[:,0:17]" -> "X" and the range; nothing where the text has no column range.
std::optional<std::pair<std::string, Range>> parse_columns(const std::string& pattern) {
  const std::size_t open = pattern.rfind("[:,");
  if (open == std::string::npos || pattern.back() != ']') return std::nullopt;
  const std::string body = pattern.substr(open + 3, pattern.size() - open - 4);
  const std::size_t colon = body.find(':');
  Range r;
  const auto number = [&](const std::string& text, std::int64_t& value) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    return error == std::errc() && end == text.data() + text.size() && value >= 0;
  };
  const bool ok = colon == std::string::npos
                      ? number(body, r.from)
                      : number(body.substr(0, colon), r.from) && number(body.substr(colon + 1), r.to);
  if (!ok) fail("--request-only '{}': a column range is written X[:,from:to] with numbers, or X[:,column]", pattern);
  if (colon == std::string::npos) r.to = r.from + 1;
  return std::pair(pattern.substr(0, open), r);
}

bool matches(const std::string& pattern, const UserInput& input) {
  for (const std::string* text : {&input.name, &input.value, &input.path}) {
    if (pattern == *text) return true;
  }
  // In paths, brackets are no character class.
  return fnmatch(pattern.c_str(), input.name.c_str(), 0) == 0 || fnmatch(pattern.c_str(), input.value.c_str(), 0) == 0;
}

// The symbol of an input's first dimension; empty where that dimension is fixed.
std::string leading_symbol(const graph::TensorMeta& meta) {
  if (meta.sizes.empty()) return {};
  const auto symbols = meta.sizes[0].symbols();
  if (symbols.size() == 1 && meta.sizes[0] == graph::Expr::symbol(*symbols.begin())) return *symbols.begin();
  return {};
}

// The values and offsets of bags go to one side together.
void check_jagged(const std::vector<JaggedBags>& jagged, const RequestOnly& request_only, const InputSides& sides) {
  for (const JaggedBags& bags : jagged) {
    const bool whole = request_only.whole.contains(bags.input.offsets);
    for (const std::string& value : bags.input.values) {
      if (request_only.columns.contains(value)) {
        fail("--request-only marks columns of '{}', but it holds the values of bags of many lengths: mark all of it",
             value);
      }
      if (request_only.whole.contains(value) == whole) continue;
      fail("'{}' holds the values of the bags of '{}': mark both --request-only, or none", value, bags.input.offsets);
    }
    if (!sides.broadcasts_inside()) continue;
    fail(
        "the model spreads request-only rows over its candidates by itself, and takes bags of many lengths ('{}'), "
        "which the transform does not support together. Export it with one dynamic batch, or pad the bags to a matrix "
        "(batch, length)",
        bags.input.offsets);
  }
}

}  // namespace

RequestOnly select_request_only(const graph::Program& program, const std::vector<UserInput>& inputs,
                                const std::vector<std::string>& given) {
  const auto patterns = split_patterns(given);
  if (patterns.empty())
    fail("no input is marked request-only (--request-only); the inputs are:{}", list_inputs(program, inputs));
  RequestOnly selected;
  for (const std::string& pattern : patterns) {
    const auto columns = parse_columns(pattern);
    const std::string& name = columns ? columns->first : pattern;
    bool any = false;
    for (const UserInput& input : inputs) {
      if (!matches(name, input)) continue;
      any = true;
      if (!columns) {
        selected.whole[input.value] = true;
        continue;
      }
      const auto& meta = program.graph.tensors.at(input.value);
      const auto width = meta.sizes.size() == 2 ? meta.sizes[1].as_integer() : std::nullopt;
      if (!width) {
        fail(
            "--request-only '{}': '{}' is {}, but a column range needs a matrix (batch, columns) with a fixed number "
            "of columns",
            pattern, input.name, graph::describe(meta));
      }
      if (columns->second.from >= columns->second.to || columns->second.to > *width) {
        fail("--request-only '{}': '{}' has columns 0 to {}", pattern, input.name, *width - 1);
      }
      selected.columns[input.value].emplace_back(columns->second.from, columns->second.to);
    }
    if (!any) fail("--request-only '{}' matches no input; the inputs are:{}", pattern, list_inputs(program, inputs));
  }
  const auto name_of = [&](const std::string& value) {
    return std::find_if(inputs.begin(), inputs.end(), [&](const UserInput& i) { return i.value == value; })->name;
  };
  for (auto it = selected.columns.begin(); it != selected.columns.end();) {
    auto& ranges = it->second;
    if (selected.whole.contains(it->first)) {
      fail("--request-only marks '{}' twice: as a whole and by columns", name_of(it->first));
    }
    std::sort(ranges.begin(), ranges.end());
    std::int64_t covered = 0;
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      if (i > 0 && ranges[i].first < ranges[i - 1].second) {
        fail("--request-only marks columns {} to {} of '{}' twice", ranges[i].first,
             std::min(ranges[i].second, ranges[i - 1].second) - 1, name_of(it->first));
      }
      covered += ranges[i].second - ranges[i].first;
    }
    if (covered == program.graph.tensors.at(it->first).sizes[1].as_integer()) {  // all of them: the whole input
      selected.whole[it->first] = true;
      it = selected.columns.erase(it);
    } else {
      ++it;
    }
  }
  return selected;
}

InputSides sides_of(const graph::Program& program, const std::vector<UserInput>& inputs,
                    const RequestOnly& request_only, const std::string& index) {
  InputSides sides;
  sides.jagged = find_jagged(program, inputs);
  // Bags that nothing reads: the runtime makes their offsets, and their values are passed as they come. A model that
  // spreads rows by itself takes them as it did.
  const bool spreads = !index.empty() || std::any_of(inputs.begin(), inputs.end(), [&](const UserInput& input) {
    const auto& sizes = program.graph.tensors.at(input.value).sizes;
    return request_only.whole.contains(input.value) && !sizes.empty() && sizes[0].is_integer(1);
  });
  const UnreadBags unread = spreads ? UnreadBags() : find_unread_bags(program, inputs);
  sides.jagged.insert(sides.jagged.end(), unread.offsets.begin(), unread.offsets.end());
  // Values and offsets follow the batch that their bags have.
  std::map<std::string, std::string> of_bags;
  for (const JaggedBags& bags : sides.jagged) {
    of_bags[bags.input.offsets] = bags.batch;
    for (const std::string& value : bags.input.values) of_bags[value] = bags.batch;
  }
  const auto meta_of = [&](const UserInput& input) -> const graph::TensorMeta& {
    return program.graph.tensors.at(input.value);
  };
  const auto symbol_of = [&](const UserInput& input) {
    if (unread.values.contains(input.value)) return std::string();
    const auto bags = of_bags.find(input.value);
    return bags == of_bags.end() ? leading_symbol(meta_of(input)) : bags->second;
  };
  const auto marked = [&](const UserInput& input) {
    return request_only.whole.contains(input.value) || request_only.columns.contains(input.value);
  };
  std::string index_symbol;
  if (!index.empty()) {
    const auto found =
        std::find_if(inputs.begin(), inputs.end(), [&](const UserInput& i) { return matches(index, i); });
    if (found == inputs.end())
      fail("--index '{}' matches no input; the inputs are:{}", index, list_inputs(program, inputs));
    const graph::TensorMeta& meta = meta_of(*found);
    index_symbol = symbol_of(*found);
    const bool integers = meta.dtype == graph::DType::kInt64 || meta.dtype == graph::DType::kInt32;
    if (marked(*found) || index_symbol.empty() || meta.sizes.size() != 1 || !integers) {
      fail(
          "--index '{}' is {}: it must be a vector of int32 or int64 with one entry a candidate (a dynamic batch), and "
          "not "
          "request-only",
          found->name, graph::describe(meta));
    }
    sides.index = found->value;
  }
  // Frozen batches say nothing where no input has a dynamic one: an export of a single example.
  const bool any_batch = std::any_of(inputs.begin(), inputs.end(), [&](const UserInput& input) {
    return !request_only.whole.contains(input.value) && input.value != sides.index && !symbol_of(input).empty();
  });
  for (const UserInput& input : inputs) {
    const graph::TensorMeta& meta = meta_of(input);
    const std::string symbol = symbol_of(input);
    graph::InputEntry entry{input.value, input.name, input.path, graph::Side::kShared};
    if (input.value == sides.index) {
      entry.side = graph::Side::kIndex;
    } else if (symbol.empty() && marked(input) && !unread.values.contains(input.value)) {
      const bool one = request_only.whole.contains(input.value) && !meta.sizes.empty() && meta.sizes[0].is_integer(1);
      if (!one || !any_batch || !index.empty()) {
        fail(
            "request-only input '{}' is {}: its first dimension is not a dynamic batch. Export the model with a "
            "dynamic "
            "batch (torch.export.Dim) in the first dimension of every batched input, and an example batch of at least "
            "2{}",
            input.name, graph::describe(meta),
            one || !any_batch ? "" : "; or, if the model broadcasts one user's row itself, with a batch of 1");
      }
      entry.side = graph::Side::kRequestOnly;
      sides.single.insert(input.value);
    } else if (!symbol.empty()) {
      entry.side = request_only.whole.contains(input.value) ? graph::Side::kRequestOnly : graph::Side::kCandidate;
      if (entry.side == graph::Side::kCandidate && sides.candidate_symbol.empty()) sides.candidate_symbol = symbol;
    }
    if (!symbol.empty() && std::find(sides.symbols.begin(), sides.symbols.end(), symbol) == sides.symbols.end()) {
      sides.symbols.push_back(symbol);
    }
    sides.inputs.push_back(entry);
  }
  check_jagged(sides.jagged, request_only, sides);
  if (!any_batch) {
    fail("every batched input is marked request-only: no input is left that differs from candidate to candidate");
  }
  if (!sides.index.empty()) {
    for (const UserInput& input : inputs) {
      const std::string symbol = symbol_of(input);
      if (marked(input) && symbol != index_symbol) sides.user_symbols.insert(symbol);
    }
    for (const UserInput& input : inputs) {
      const std::string symbol = symbol_of(input);
      if (!marked(input) && sides.user_symbols.contains(symbol)) {
        fail("--index '{}': input '{}' shares the batch of request-only inputs, but is not marked request-only", index,
             input.name);
      }
    }
    if (sides.user_symbols.empty()) {
      fail(
          "--index '{}': request-only inputs share its batch. Export them with a batch of their own (another "
          "torch.export.Dim), of which the index picks the rows",
          index);
    }
    sides.candidate_symbol = index_symbol;
  }
  return sides;
}

}  // namespace ikbo::transform
