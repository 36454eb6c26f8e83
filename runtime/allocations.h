#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>

namespace ikbo::runtime {

/// Counts the bytes that PyTorch's allocators hand out on this thread while it lives.
///
/// The allocators report to a thread-local sink, so allocations on other threads are not seen: measure with one
/// intra-operator thread.
class AllocationCount {
 public:
  AllocationCount();

  /// Handed out since the last reset.
  std::int64_t bytes() const { return sink_->bytes; }
  /// Most bytes in use at a time since the last reset, of all that were handed out while this lives.
  std::int64_t peak() const { return sink_->peak; }
  void reset() {
    sink_->bytes = 0;
    sink_->peak = sink_->live;
  }

 private:
  struct Sink final : public c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void* ptr, std::int64_t size, std::size_t allocated, std::size_t reserved,
                           c10::Device device) override;
    bool memoryProfilingEnabled() const override { return true; }
    std::int64_t bytes = 0;
    std::int64_t live = 0;
    std::int64_t peak = 0;
  };
  std::shared_ptr<Sink> sink_;
  c10::DebugInfoGuard guard_;
};

}  // namespace ikbo::runtime
