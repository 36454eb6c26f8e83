// The part of target attention on the CPU that is compiled once for each instruction set: the softmax of a block.
#pragma once

#include <cstdint>

namespace ikbo::cpu {

/// Folds one block of logits of a row into its running softmax. `logits` (count) become the block's weights relative to
/// the row's new maximum; `maximum` and `sum` are updated (−∞ and 0 before the first block). Returns the factor by
/// which what was summed before must be multiplied. Bits depend on the arguments alone.
template <typename Acc>
using SoftmaxBlock = Acc (*)(Acc* logits, int64_t count, Acc* maximum, Acc* sum);

#define IKBO_DECLARE_CAPABILITY(capability) \
  namespace capability {                    \
  template <typename Acc>                   \
  SoftmaxBlock<Acc> softmax_block();        \
  }
IKBO_DECLARE_CAPABILITY(DEFAULT)
IKBO_DECLARE_CAPABILITY(AVX2)
IKBO_DECLARE_CAPABILITY(AVX512)
#undef IKBO_DECLARE_CAPABILITY

}  // namespace ikbo::cpu
