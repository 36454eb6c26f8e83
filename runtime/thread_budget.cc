#include "runtime/thread_budget.h"

#include <ATen/Parallel.h>

#include <algorithm>

namespace ikbo::runtime {

ThreadBudget::ThreadBudget(int threads, int concurrent) : free_(std::max(1, concurrent)) {
  const int total = threads > 0 ? threads : at::get_num_threads();
  threads_per_run_ = std::max(1, total / free_);
}

ThreadBudget::Place::Place(ThreadBudget& budget, int threads) : budget_(budget) {
  {
    std::unique_lock lock(budget_.mutex_);
    budget_.freed_.wait(lock, [&] { return budget_.free_ > 0; });
    --budget_.free_;
  }
  // The number of threads belongs to the calling thread, in OpenMP and in MKL alike.
  previous_ = at::get_num_threads();
  if (previous_ != threads) at::set_num_threads(threads);
}

ThreadBudget::Place::~Place() {
  if (at::get_num_threads() != previous_) at::set_num_threads(previous_);
  {
    const std::lock_guard lock(budget_.mutex_);
    ++budget_.free_;
  }
  budget_.freed_.notify_one();
}

}  // namespace ikbo::runtime
