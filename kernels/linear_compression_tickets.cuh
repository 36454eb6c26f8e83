// Who computes which tile, and which broadcast tiles are ready: a few words of workspace that may hold anything before
// a launch. Tickets are drawn in order, broadcast tiles have the first ones, and only candidates wait; so whatever a
// candidate waits for has been drawn by a cluster that runs and will finish, however few clusters are resident.
#pragma once

#include "kernels/hopper/sync.h"
#include "kernels/linear_compression_params.h"

namespace ikbo::kernels {

// The upper half of a valid ticket word, and what a set flag holds: NaN in every 16-bit half of it, whether fp16 or
// bf16, so that no sensible data left in a workspace looks like it. Neither is left behind: the last cluster clears the
// flags.
constexpr uint64_t kTicketTag = 0xffb5'ffe9ull << 32;
constexpr uint64_t kTagMask = 0xffff'ffffull << 32;
constexpr uint64_t kFlagSet = 0xffa9'ffd3'ffc7'fff1ull;

__device__ inline uint32_t draw_ticket(uint64_t* tickets) {
  uint64_t old = hopper::add_relaxed(tickets, 1);
  if ((old & kTagMask) != kTicketTag) {
    // The word held something else: one cluster makes it valid, then all who saw that draw again.
    for (old = hopper::load_relaxed(tickets); (old & kTagMask) != kTicketTag; old = hopper::load_relaxed(tickets)) {
      hopper::compare_and_swap(tickets, old, kTicketTag);
    }
    old = hopper::add_relaxed(tickets, 1);
  }
  return static_cast<uint32_t>(old);
}

__device__ inline void await_flag(const uint64_t* flag) {
  while (hopper::load_acquire(flag) != kFlagSet) {
    __nanosleep(64);
  }
}

// One warp a cluster, once the cluster neither sets nor awaits flags any more. Every cluster has then drawn exactly one
// ticket past the end, and draws one more here; the last one clears the flags and makes the tickets start at 0 again.
__device__ inline void leave_and_reset(const LinearCompressionParams& params, uint32_t lane) {
  uint64_t old = 0;
  if (lane == 0) {
    old = hopper::add_acquire_release(params.tickets, 1);
  }
  old = __shfl_sync(0xffffffff, old, 0);
  const uint32_t tickets = params.tile_end - params.tile_begin;
  if (static_cast<uint32_t>(old) != tickets + 2 * hopper::cluster_count() - 1) {
    return;
  }
  if (params.use_flags) {
    for (int64_t i = lane; i < params.units; i += 32) {
      params.flags[i] = 0;
    }
  }
  if (lane == 0) {
    *params.tickets = kTicketTag;
  }
}

}  // namespace ikbo::kernels
