#include "runtime/allocations.h"

#include <algorithm>

namespace ikbo::runtime {

AllocationCount::AllocationCount()
    : sink_(std::make_shared<Sink>()), guard_(c10::DebugInfoKind::PROFILER_STATE, sink_) {}

void AllocationCount::Sink::reportMemoryUsage(void* /*ptr*/, std::int64_t size, std::size_t /*allocated*/,
                                              std::size_t /*reserved*/, c10::Device /*device*/) {
  // Frees come as negative sizes, of what was allocated under the sink.
  if (size > 0) bytes += size;
  live += size;
  peak = std::max(peak, live);
}

}  // namespace ikbo::runtime
