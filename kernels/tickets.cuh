// Tickets that CTAs draw from one word of workspace, which may hold anything before the launch.
#pragma once

#include "kernels/hopper/sync.h"

namespace ikbo::kernels {

// The upper half of a valid word: NaN in both of its 16-bit halves, whether fp16 or bf16, so that no sensible data left
// in a workspace looks like it.
constexpr uint64_t kTicketTag = 0xffb5'ffe9ull << 32;
constexpr uint64_t kTagMask = 0xffff'ffffull << 32;

// 0, 1, 2 and so on.
__device__ inline uint32_t draw_ticket(uint64_t* word) {
  uint64_t old = hopper::add_relaxed(word, 1);
  if ((old & kTagMask) != kTicketTag) {
    // The word held something else: one makes it valid, then all who saw that draw again.
    for (old = hopper::load_relaxed(word); (old & kTagMask) != kTicketTag; old = hopper::load_relaxed(word)) {
      hopper::compare_and_swap(word, old, kTicketTag);
    }
    old = hopper::add_relaxed(word, 1);
  }
  return static_cast<uint32_t>(old);
}

// Each of the `drawers` comes here once, when it has drawn exactly one ticket that is none of the first `tickets`, and
// draws one more. Whether it is the last.
__device__ inline bool leaves_tickets_last(uint64_t* word, uint32_t tickets, uint32_t drawers) {
  return static_cast<uint32_t>(hopper::add_acquire_release(word, 1)) == tickets + 2 * drawers - 1;
}

// By the last one: the next launch starts at 0 again.
__device__ inline void rewind_tickets(uint64_t* word) {
  *word = kTicketTag;
}

}  // namespace ikbo::kernels
