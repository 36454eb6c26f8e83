// Compiled once for each instruction set (CPU_CAPABILITY names it), like row_linear_kernel.cc.
#include "ops/cpu/attention_kernel.h"

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <cmath>
#include <limits>

namespace ikbo::cpu::CPU_CAPABILITY {
namespace {

template <typename Acc>
using Vec = at::vec::Vectorized<Acc>;

template <typename Acc>
Acc fold_softmax_block(Acc* logits, int64_t count, Acc* maximum, Acc* sum) {
  constexpr int64_t kStep = Vec<Acc>::size();
  constexpr int64_t kChains = 4;  // maxima that do not wait for each other
  const int64_t whole = count / kStep * kStep;
  const Acc lowest = -std::numeric_limits<Acc>::infinity();
  // NaN must stay: at::vec::maximum keeps it.
  const auto larger = [](const auto& a, const auto& b) { return at::vec::maximum(a, b); };
  Vec<Acc> largest[kChains] = {Vec<Acc>(lowest), Vec<Acc>(lowest), Vec<Acc>(lowest), Vec<Acc>(lowest)};
  int64_t i = 0;
  for (; i + kChains * kStep <= whole; i += kChains * kStep) {
#pragma GCC unroll 4
    for (int64_t c = 0; c < kChains; ++c) largest[c] = larger(largest[c], Vec<Acc>::loadu(logits + i + c * kStep));
  }
  for (; i < whole; i += kStep) largest[0] = larger(largest[0], Vec<Acc>::loadu(logits + i));
  Acc block =
      at::vec::vec_reduce_all<Acc>(larger, larger(larger(largest[0], largest[1]), larger(largest[2], largest[3])));
  for (; i < count; ++i) {
    block = std::isnan(logits[i]) || logits[i] > block ? logits[i] : block;
  }
  const Acc before = *maximum;
  const Acc now = std::isnan(block) || block > before ? block : before;
  *maximum = now;

  Vec<Acc> total(Acc(0));
  for (int64_t i = 0; i < whole; i += kStep) {
    const Vec<Acc> weight = (Vec<Acc>::loadu(logits + i) - Vec<Acc>(now)).exp();
    weight.store(logits + i);
    total = total + weight;
  }
  if (whole < count) {
    // The rest of the last vector is −∞, whose weight is 0.
    Acc rest[kStep];
    for (int64_t i = 0; i < kStep; ++i) rest[i] = whole + i < count ? logits[whole + i] : lowest;
    const Vec<Acc> weight = (Vec<Acc>::loadu(rest) - Vec<Acc>(now)).exp();
    weight.store(logits + whole, static_cast<int>(count - whole));
    total = total + weight;
  }
  const Acc factor = std::exp(before - now);
  *sum = *sum * factor + at::vec::vec_reduce_all<Acc>([](const auto& a, const auto& b) { return a + b; }, total);
  return factor;
}

}  // namespace

template <typename Acc>
SoftmaxBlock<Acc> softmax_block() {
  return fold_softmax_block<Acc>;
}

template SoftmaxBlock<float> softmax_block();
template SoftmaxBlock<double> softmax_block();

}  // namespace ikbo::cpu::CPU_CAPABILITY
