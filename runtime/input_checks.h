#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "graph/program.h"
#include "graph/specification.h"

namespace ikbo::runtime {

/// Checks a call's tensors against what the archive says of its inputs: number, rank, type, device, fixed sizes, that
/// symbolic sizes agree with each other and lie in their ranges, and, on the CPU, that offsets of bags are offsets into
/// their values (on a GPU they are not read, since the host would wait for them).
class InputChecks {
 public:
  InputChecks(const graph::Program& program, const std::vector<graph::JaggedInput>& jagged, const c10::Device& device,
              bool float64);

  /// Throws ikbo::Error that names the input as the model's author knows it, what was given and what was expected.
  void check(std::span<const at::Tensor> inputs) const;

 private:
  struct Dim {
    std::int64_t fixed = -1;  // >= 0: exactly this
    int symbol = -1;          // a plain symbol
    graph::Expr expr;         // anything else
  };
  struct Input {
    std::string name;
    at::ScalarType type = at::kFloat;
    std::vector<Dim> dims;
    std::string expected;  // "int64 [batch, 50]"
    bool checked = true;   // false where the archive says nothing of the tensor
  };
  struct Symbol {
    std::string name;
    graph::Range range;
  };
  struct Bound {
    std::int64_t value = -1;
    int input = -1;
    int dim = -1;
  };

  void bind(int symbol, std::int64_t size, int input, int dim, std::vector<Bound>& bound) const;
  void check_expressions(std::span<const at::Tensor> inputs, std::vector<Bound>& bound) const;
  void check_bags(std::span<const at::Tensor> inputs) const;
  std::string given(const at::Tensor& tensor) const;

  struct Bags {
    graph::JaggedInput names;  // as the model's author knows them
    std::size_t offsets = 0;   // positions of inputs
    std::vector<std::size_t> values;
  };

  c10::Device device_;
  bool float64_;
  std::vector<Input> inputs_;
  std::vector<Symbol> symbols_;
  std::vector<Bags> bags_;
  bool has_expressions_ = false;
};

}  // namespace ikbo::runtime
