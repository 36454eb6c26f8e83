#include "ops/cpu/row_linear.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <memory>

#include "ops/cpu/capability.h"
#include "ops/cpu/row_linear_kernel.h"

namespace ikbo::cpu {
namespace {

template <typename T, typename Out>
const RowLinearKernels<T, Out>& kernels() {
  return IKBO_CPU_KERNEL(row_linear_kernels<T, Out>());
}

int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Up to this many chunks of rows a packed panel is used too little to be worth a place in memory.
constexpr int64_t kFewChunks = 4;

}  // namespace

template <typename Acc>
int64_t packed_width(int64_t n) {
  const int64_t vector = kernels<Acc, Acc>().vector_columns;
  return divide_up(n, vector) * vector;
}

template <typename T, typename Out>
void run(const RowLinear<T, Out>& job) {
  using Acc = AccOf<T>;
  if (job.batch == 0 || job.n == 0) return;
  const auto& kernel = kernels<T, Out>();
  const int64_t panels = divide_up(job.n, kernel.panel_columns);
  const int64_t chunks = divide_up(job.batch, kChunkRows);
  const auto panel_columns = [&](int64_t panel) {
    return std::min(kernel.panel_columns, job.n - panel * kernel.panel_columns);
  };
  const auto pack = [&](int64_t panel, Acc* to) {
    kernel.pack(job, panel * kernel.panel_columns, panel_columns(panel), to);
  };
  const auto compute = [&](int64_t chunk, int64_t panel, const Acc* packed, Acc* scratch) {
    const int64_t row = chunk * kChunkRows;
    kernel.compute(job, row, std::min(kChunkRows, job.batch - row), panel * kernel.panel_columns, panel_columns(panel),
                   packed, scratch);
  };
  const auto make_scratch = [&] {
    return std::unique_ptr<Acc[]>(
        kernel.needs_scratch(job) ? new Acc[static_cast<size_t>(std::min(kChunkRows, job.batch) * job.k)] : nullptr);
  };
  const int64_t panel_work = kernel.panel_columns * std::max<int64_t>(job.k, 1);
  const bool in_place = chunks <= kFewChunks && kernel.reads_in_place(job);

  if (chunks <= kFewChunks && panels >= at::get_num_threads()) {
    // Few candidates: reading W is most of the work, so a panel is packed into the cache and used at once.
    at::parallel_for(0, panels, divide_up(kGrainWork, panel_work), [&](int64_t begin, int64_t end) {
      const std::unique_ptr<Acc[]> packed(in_place ? nullptr : new Acc[static_cast<size_t>(panel_work)]);
      const std::unique_ptr<Acc[]> scratch = make_scratch();
      for (int64_t p = begin; p < end; ++p) {
        if (!in_place) pack(p, packed.get());
        for (int64_t c = 0; c < chunks; ++c) compute(c, p, packed.get(), scratch.get());
      }
    });
    return;
  }

  const std::unique_ptr<Acc[]> packed(in_place ? nullptr
                                               : new Acc[static_cast<size_t>(packed_width<Acc>(job.n) * job.k)]);
  const auto packed_panel = [&](int64_t panel) {
    return in_place ? nullptr : packed.get() + panel * kernel.panel_columns * job.k;
  };
  if (!in_place) {
    at::parallel_for(0, panels, divide_up(kGrainWork, panel_work), [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) pack(p, packed_panel(p));
    });
  }
  // Many candidates spread over threads by rows, fewer by columns as well: a task is a chunk of rows by some panels.
  const int64_t splits = chunks >= 4 * at::get_num_threads() ? 1 : panels;
  const int64_t panels_per_task = divide_up(panels, splits);
  const int64_t task_work = kChunkRows * panel_work * panels_per_task;
  at::parallel_for(0, chunks * splits, divide_up(kGrainWork, task_work), [&](int64_t begin, int64_t end) {
    const std::unique_ptr<Acc[]> scratch = make_scratch();
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % splits * panels_per_task;
      for (int64_t p = first; p < std::min(panels, first + panels_per_task); ++p) {
        compute(task / splits, p, packed_panel(p), scratch.get());
      }
    }
  });
}

template int64_t packed_width<float>(int64_t n);
template int64_t packed_width<double>(int64_t n);
template void run(const RowLinear<double, double>& job);
template void run(const RowLinear<float, float>& job);
template void run(const RowLinear<c10::BFloat16, c10::BFloat16>& job);
template void run(const RowLinear<c10::BFloat16, float>& job);
template void run(const RowLinear<c10::Half, c10::Half>& job);
template void run(const RowLinear<c10::Half, float>& job);

}  // namespace ikbo::cpu
