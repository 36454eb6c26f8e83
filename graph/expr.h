#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace ikbo::graph {

/// A size in an exported program: an integer expression over symbols such as the batch.
///
/// Kept as a polynomial with integer coefficients over atoms, so that equal sizes compare equal however they were
/// written. An atom is a symbol, or a call that is no polynomial (FloorDiv, Mod, Max, ...) with expressions as
/// arguments. Archives write expressions as SymPy's `srepr`: Mul(Integer(50), Symbol('s51', positive=True, ...)).
class Expr {
 public:
  Expr() = default;          // 0
  Expr(std::int64_t value);  // NOLINT: sizes are integers most of the time
  static Expr symbol(std::string name);
  /// A call that stays unevaluated, e.g. call("FloorDiv", {a, b}); folded when all arguments are integers.
  static Expr call(std::string function, std::vector<Expr> arguments);

  /// Reads SymPy's srepr. Throws ikbo::Error where the text is not such an expression.
  static Expr parse(std::string_view srepr);
  /// SymPy's srepr, readable by parse and by torch.export.load.
  std::string srepr() const;
  /// For people: "50*B_user".
  std::string str() const;

  std::optional<std::int64_t> as_integer() const;
  bool is_integer(std::int64_t value) const { return as_integer() == value; }
  std::set<std::string> symbols() const;
  bool depends_on(const std::string& symbol) const;

  Expr substitute(const std::map<std::string, Expr>& values) const;
  /// The value under an assignment of all symbols; nothing where a symbol is missing, a divisor is 0, or a call
  /// unknown.
  std::optional<std::int64_t> evaluate(const std::map<std::string, std::int64_t>& values) const;

  /// m where this == m * symbol and m does not depend on symbol; nothing otherwise.
  std::optional<Expr> multiple_of(const std::string& symbol) const;
  /// q where this == q * divisor as polynomials (divisor a monomial or equal to this); nothing otherwise.
  std::optional<Expr> exact_quotient(const Expr& divisor) const;

  /// The expression as a sum of products, for whoever computes it step by step.
  struct Factor {
    std::string name;             // of a symbol, or of a call
    std::vector<Expr> arguments;  // of a call
    bool is_call = false;
  };
  struct Term {
    std::int64_t coefficient = 0;
    std::vector<Factor> factors;
  };
  std::vector<Term> terms() const;

  friend Expr operator+(const Expr& a, const Expr& b);
  friend Expr operator-(const Expr& a, const Expr& b);
  friend Expr operator*(const Expr& a, const Expr& b);
  friend bool operator==(const Expr& a, const Expr& b);

 private:
  struct Atom;
  using AtomPtr = std::shared_ptr<const Atom>;
  struct Monomial {
    std::vector<AtomPtr> atoms;  // sorted by key, repeated for powers
    std::string key;
    bool operator<(const Monomial& other) const { return key < other.key; }
  };
  static Monomial product(const Monomial& a, const Monomial& b);
  void add(const Monomial& monomial, std::int64_t coefficient);

  std::map<Monomial, std::int64_t> terms_;
};

}  // namespace ikbo::graph
