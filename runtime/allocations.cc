#include "runtime/allocations.h"

namespace ikbo::runtime {

AllocationCount::AllocationCount()
    : sink_(std::make_shared<Sink>()), guard_(c10::DebugInfoKind::PROFILER_STATE, sink_) {}

void AllocationCount::Sink::reportMemoryUsage(void* /*ptr*/, std::int64_t size, std::size_t /*allocated*/,
                                              std::size_t /*reserved*/, c10::Device /*device*/) {
  // Frees come as negative sizes.
  if (size > 0) bytes += size;
}

}  // namespace ikbo::runtime
