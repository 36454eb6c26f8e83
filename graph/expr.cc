#include "graph/expr.h"

#include <algorithm>
#include <cctype>
#include <limits>

#include "graph/error.h"

namespace ikbo::graph {

// A symbol (no arguments), or a call that is no polynomial.
struct Expr::Atom {
  std::string name;
  std::vector<Expr> arguments;
  bool is_call = false;
  std::string key;  // srepr: equal atoms have equal keys
};

namespace {

// Sizes that overflow 64 bits name no tensor; wrapping silently would make two of them equal.
std::int64_t checked_add(std::int64_t a, std::int64_t b) {
  std::int64_t r = 0;
  if (__builtin_add_overflow(a, b, &r)) fail("a size expression overflows 64 bits");
  return r;
}
std::int64_t checked_mul(std::int64_t a, std::int64_t b) {
  std::int64_t r = 0;
  if (__builtin_mul_overflow(a, b, &r)) fail("a size expression overflows 64 bits");
  return r;
}

std::int64_t floor_div(std::int64_t a, std::int64_t b) {
  const std::int64_t q = a / b;
  return (a % b != 0 && ((a < 0) != (b < 0))) ? q - 1 : q;
}

std::optional<std::int64_t> fold(const std::string& f, const std::vector<std::int64_t>& v) {
  constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();
  const bool divisible = v.size() == 2 && v[1] != 0 && !(v[0] == kMin && v[1] == -1);
  if (f == "FloorDiv" || f == "IntTrueDiv" || f == "CleanDiv") {
    if (!divisible) return std::nullopt;
    if (f != "FloorDiv" && v[0] % v[1] != 0) return std::nullopt;
    return floor_div(v[0], v[1]);
  }
  if (f == "CeilDiv") {
    if (!divisible || v[0] == kMin) return std::nullopt;
    return -floor_div(-v[0], v[1]);
  }
  if (f == "Mod" || f == "PythonMod") {
    if (!divisible) return std::nullopt;
    return v[0] - floor_div(v[0], v[1]) * v[1];
  }
  if (f == "Max" && !v.empty()) return *std::max_element(v.begin(), v.end());
  if (f == "Min" && !v.empty()) return *std::min_element(v.begin(), v.end());
  if ((f == "PowByNatural" || f == "Pow") && v.size() == 2 && v[1] >= 0 && v[1] <= 64) {
    std::int64_t r = 1;
    for (std::int64_t i = 0; i < v[1]; ++i) {
      if (__builtin_mul_overflow(r, v[0], &r)) return std::nullopt;
    }
    return r;
  }
  return std::nullopt;
}

constexpr int kMaxDepth = 200;  // of nested expressions in an archive
constexpr std::size_t kMaxTerms = 4096;

// The grammar of srepr that sizes use: Name(arg, ..., keyword=value), 'text', integers, True, False.
class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Expr parse() {
    Expr e = expression(0);
    skip_space();
    if (at_ != text_.size()) error("text behind the expression");
    return e;
  }

 private:
  [[noreturn]] void error(const char* what) {
    fail("'{}' is not a size expression: {} at character {}", text_.substr(0, 200), what, at_);
  }
  void skip_space() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
  }
  bool accept(char c) {
    skip_space();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!accept(c)) error(c == '(' ? "'(' expected" : c == ')' ? "')' expected" : "another character expected");
  }
  std::string word() {
    skip_space();
    const std::size_t start = at_;
    while (at_ < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[at_])) != 0 || text_[at_] == '_'))
      ++at_;
    if (start == at_) error("a name expected");
    return std::string(text_.substr(start, at_ - start));
  }
  std::int64_t number() {
    skip_space();
    const bool negative = accept('-');
    const std::string digits = word();
    std::int64_t value = 0;
    for (const char c : digits) {
      if (std::isdigit(static_cast<unsigned char>(c)) == 0) error("an integer expected");
      if (__builtin_mul_overflow(value, std::int64_t{10}, &value) ||
          __builtin_add_overflow(value, std::int64_t{c - '0'}, &value)) {
        error("an integer of at most 64 bits expected");
      }
    }
    return negative ? -value : value;
  }
  std::string quoted() {
    skip_space();
    const char quote = at_ < text_.size() ? text_[at_] : ' ';
    if (quote != '\'' && quote != '"') error("a quoted name expected");
    const std::size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) error("the name is not closed");
    std::string name(text_.substr(at_ + 1, end - at_ - 1));
    for (const char c : name) {
      if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '_') error("a plain name expected");
    }
    if (name.empty()) error("a name expected");
    at_ = end + 1;
    return name;
  }

  Expr expression(int depth) {
    if (depth > kMaxDepth) error("it is nested too deeply");
    const std::string function = word();
    if (std::isdigit(static_cast<unsigned char>(function[0])) != 0) {
      at_ -= function.size();
      return number();
    }
    expect('(');
    if (function == "Integer") {
      const std::int64_t value = number();
      expect(')');
      return value;
    }
    if (function == "Symbol") {
      const std::string name = quoted();
      while (accept(',')) {  // assumptions: positive=True, integer=True
        word();
        expect('=');
        word();
      }
      expect(')');
      return Expr::symbol(name);
    }
    std::vector<Expr> arguments;
    if (!accept(')')) {
      do {
        arguments.push_back(expression(depth + 1));
      } while (accept(','));
      expect(')');
    }
    if (function == "Add") {
      Expr sum;
      for (const Expr& a : arguments) sum = sum + a;
      return sum;
    }
    if (function == "Mul") {
      Expr product = 1;
      for (const Expr& a : arguments) product = product * a;
      return product;
    }
    return Expr::call(function, std::move(arguments));
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace

Expr::Expr(std::int64_t value) {
  if (value != 0) terms_.emplace(Monomial{}, value);
}

Expr Expr::symbol(std::string name) {
  auto atom = std::make_shared<Atom>();
  // To SymPy assumptions are part of a symbol, so they are those that PyTorch gives it: sizes of inputs (s0) are
  // positive, sizes that depend on data (u0) are not known to be.
  atom->key = "Symbol('" + name + (name.starts_with("u") ? "', integer=True)" : "', positive=True, integer=True)");
  atom->name = std::move(name);
  Expr e;
  e.terms_.emplace(Monomial{{atom}, atom->key}, 1);
  return e;
}

Expr Expr::call(std::string function, std::vector<Expr> arguments) {
  std::vector<std::int64_t> values;
  for (const Expr& a : arguments) {
    if (const auto v = a.as_integer()) values.push_back(*v);
  }
  if (values.size() == arguments.size()) {
    if (const auto value = fold(function, values)) return *value;
  }
  if ((function == "Pow" || function == "PowByNatural") && arguments.size() == 2) {
    const auto exponent = arguments[1].as_integer();
    if (exponent && *exponent >= 0 && *exponent <= 8) {
      Expr power = 1;
      for (std::int64_t i = 0; i < *exponent; ++i) power = power * arguments[0];
      return power;
    }
  }
  if ((function == "FloorDiv" || function == "CleanDiv") && arguments.size() == 2) {
    if (arguments[1].is_integer(1)) return arguments[0];
    if (auto q = arguments[0].exact_quotient(arguments[1])) return *q;
  }
  auto atom = std::make_shared<Atom>();
  atom->is_call = true;
  atom->key = function + "(";
  for (std::size_t i = 0; i < arguments.size(); ++i) atom->key += (i > 0 ? ", " : "") + arguments[i].srepr();
  atom->key += ")";
  atom->name = std::move(function);
  atom->arguments = std::move(arguments);
  Expr e;
  e.terms_.emplace(Monomial{{atom}, atom->key}, 1);
  return e;
}

Expr::Monomial Expr::product(const Monomial& a, const Monomial& b) {
  Monomial m;
  m.atoms.resize(a.atoms.size() + b.atoms.size());
  std::merge(a.atoms.begin(), a.atoms.end(), b.atoms.begin(), b.atoms.end(), m.atoms.begin(),
             [](const AtomPtr& x, const AtomPtr& y) { return x->key < y->key; });
  if (m.atoms.size() > 64) fail("a size expression has a product of more than 64 factors");
  for (const AtomPtr& atom : m.atoms) m.key += (m.key.empty() ? "" : "*") + atom->key;
  return m;
}

void Expr::add(const Monomial& monomial, std::int64_t coefficient) {
  if (coefficient == 0) return;
  const auto [it, inserted] = terms_.emplace(monomial, coefficient);
  if (!inserted) {
    it->second = checked_add(it->second, coefficient);
    if (it->second == 0) terms_.erase(it);
  }
  if (terms_.size() > kMaxTerms) fail("a size expression has more than {} terms", kMaxTerms);
}

Expr operator+(const Expr& a, const Expr& b) {
  Expr sum = a;
  for (const auto& [monomial, coefficient] : b.terms_) sum.add(monomial, coefficient);
  return sum;
}

Expr operator*(const Expr& a, const Expr& b) {
  Expr result;
  for (const auto& [ma, ca] : a.terms_) {
    for (const auto& [mb, cb] : b.terms_) result.add(Expr::product(ma, mb), checked_mul(ca, cb));
  }
  return result;
}

Expr operator-(const Expr& a, const Expr& b) {
  return a + Expr(-1) * b;
}

bool operator==(const Expr& a, const Expr& b) {
  return std::equal(a.terms_.begin(), a.terms_.end(), b.terms_.begin(), b.terms_.end(),
                    [](const auto& x, const auto& y) { return x.second == y.second && x.first.key == y.first.key; });
}

Expr Expr::parse(std::string_view srepr) {
  return Parser(srepr).parse();
}

std::string Expr::srepr() const {
  if (terms_.empty()) return "Integer(0)";
  std::vector<std::string> parts;
  for (const auto& [monomial, coefficient] : terms_) {
    std::vector<std::string> factors;
    if (coefficient != 1 || monomial.atoms.empty()) factors.push_back("Integer(" + std::to_string(coefficient) + ")");
    for (const AtomPtr& atom : monomial.atoms) factors.push_back(atom->key);
    parts.push_back(factors.size() == 1 ? factors[0] : fmt::format("Mul({})", fmt::join(factors, ", ")));
  }
  return parts.size() == 1 ? parts[0] : fmt::format("Add({})", fmt::join(parts, ", "));
}

std::string Expr::str() const {
  if (terms_.empty()) return "0";
  std::string text;
  for (const auto& [monomial, coefficient] : terms_) {
    if (!text.empty()) text += coefficient < 0 ? " - " : " + ";
    const std::int64_t magnitude = text.empty() || coefficient >= 0 ? coefficient : -coefficient;
    std::vector<std::string> factors;
    if (magnitude != 1 || monomial.atoms.empty()) factors.push_back(std::to_string(magnitude));
    for (const AtomPtr& atom : monomial.atoms) {
      if (!atom->is_call) {
        factors.push_back(atom->name);
        continue;
      }
      std::vector<std::string> arguments;
      for (const Expr& a : atom->arguments) arguments.push_back(a.str());
      factors.push_back(fmt::format("{}({})", atom->name, fmt::join(arguments, ", ")));
    }
    text += fmt::format("{}", fmt::join(factors, "*"));
  }
  return text;
}

std::optional<std::int64_t> Expr::as_integer() const {
  if (terms_.empty()) return 0;
  if (terms_.size() == 1 && terms_.begin()->first.atoms.empty()) return terms_.begin()->second;
  return std::nullopt;
}

std::set<std::string> Expr::symbols() const {
  std::set<std::string> names;
  for (const auto& [monomial, coefficient] : terms_) {
    for (const AtomPtr& atom : monomial.atoms) {
      if (!atom->is_call) names.insert(atom->name);
      for (const Expr& a : atom->arguments) names.merge(a.symbols());
    }
  }
  return names;
}

bool Expr::depends_on(const std::string& symbol) const {
  return symbols().contains(symbol);
}

Expr Expr::substitute(const std::map<std::string, Expr>& values) const {
  Expr result;
  for (const auto& [monomial, coefficient] : terms_) {
    Expr term = coefficient;
    for (const AtomPtr& atom : monomial.atoms) {
      if (atom->is_call) {
        std::vector<Expr> arguments;
        for (const Expr& a : atom->arguments) arguments.push_back(a.substitute(values));
        term = term * call(atom->name, std::move(arguments));
      } else if (const auto it = values.find(atom->name); it != values.end()) {
        term = term * it->second;
      } else {
        term = term * symbol(atom->name);
      }
    }
    result = result + term;
  }
  return result;
}

std::optional<std::int64_t> Expr::evaluate(const std::map<std::string, std::int64_t>& values) const {
  std::int64_t sum = 0;
  for (const auto& [monomial, coefficient] : terms_) {
    std::int64_t term = coefficient;
    for (const AtomPtr& atom : monomial.atoms) {
      std::optional<std::int64_t> value;
      if (atom->is_call) {
        std::vector<std::int64_t> arguments;
        for (const Expr& a : atom->arguments) {
          const auto v = a.evaluate(values);
          if (!v) return std::nullopt;
          arguments.push_back(*v);
        }
        value = fold(atom->name, arguments);
      } else if (const auto it = values.find(atom->name); it != values.end()) {
        value = it->second;
      }
      if (!value || __builtin_mul_overflow(term, *value, &term)) return std::nullopt;
    }
    if (__builtin_add_overflow(sum, term, &sum)) return std::nullopt;
  }
  return sum;
}

std::vector<Expr::Term> Expr::terms() const {
  std::vector<Term> list;
  for (const auto& [monomial, coefficient] : terms_) {
    Term term;
    term.coefficient = coefficient;
    for (const AtomPtr& atom : monomial.atoms) term.factors.push_back({atom->name, atom->arguments, atom->is_call});
    list.push_back(std::move(term));
  }
  return list;
}

std::optional<Expr> Expr::multiple_of(const std::string& symbol) const {
  auto quotient = exact_quotient(Expr::symbol(symbol));
  if (!quotient || quotient->depends_on(symbol)) return std::nullopt;
  return quotient;
}

std::optional<Expr> Expr::exact_quotient(const Expr& divisor) const {
  if (divisor.terms_.empty()) return std::nullopt;
  if (*this == divisor) return Expr(1);
  if (divisor.terms_.size() != 1) return std::nullopt;
  const auto& [dm, dc] = *divisor.terms_.begin();
  Expr quotient;
  for (const auto& [monomial, coefficient] : terms_) {
    if (coefficient % dc != 0) return std::nullopt;
    Monomial rest;
    std::size_t used = 0;
    for (const AtomPtr& atom : monomial.atoms) {  // both are sorted by key
      if (used < dm.atoms.size() && dm.atoms[used]->key == atom->key) {
        ++used;
      } else {
        rest.atoms.push_back(atom);
        rest.key += (rest.key.empty() ? "" : "*") + atom->key;
      }
    }
    if (used != dm.atoms.size()) return std::nullopt;
    quotient.add(rest, coefficient / dc);
  }
  return quotient;
}

}  // namespace ikbo::graph
