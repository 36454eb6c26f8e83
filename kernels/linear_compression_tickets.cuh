// Who computes which tile, and which broadcast tiles are ready: a few words of workspace that may hold anything before
// a launch. Tickets are drawn in order, broadcast tiles have the first ones, and only candidates wait; so whatever a
// candidate waits for has been drawn by a cluster that runs and will finish, however few clusters are resident.
#pragma once

#include "kernels/hopper/sync.h"
#include "kernels/linear_compression_params.h"
#include "kernels/tickets.cuh"

namespace ikbo::kernels {

// What a set flag holds: NaN in every 16-bit half of it, as in a valid ticket word (kernels/tickets.cuh). No flag is
// left behind: the last cluster clears them.
constexpr uint64_t kFlagSet = 0xffa9'ffd3'ffc7'fff1ull;

__device__ inline void await_flag(const uint64_t* flag) {
  while (hopper::load_acquire(flag) != kFlagSet) {
    __nanosleep(64);
  }
}

// One warp a cluster, once the cluster neither sets nor awaits flags any more. Every cluster has then drawn exactly one
// ticket past the end, and draws one more here; the last one clears the flags and makes the tickets start at 0 again.
__device__ inline void leave_and_reset(const LinearCompressionParams& params, uint32_t lane) {
  const uint32_t tickets = params.tile_end - params.tile_begin;
  bool is_last = false;
  if (lane == 0) is_last = leaves_tickets_last(params.tickets, tickets, hopper::cluster_count());
  if (!__shfl_sync(0xffff'ffff, static_cast<int>(is_last), 0)) return;
  if (params.use_flags) {
    for (int64_t i = lane; i < params.units; i += 32) {
      params.flags[i] = 0;
    }
  }
  if (lane == 0) {
    rewind_tickets(params.tickets);
  }
}

}  // namespace ikbo::kernels
