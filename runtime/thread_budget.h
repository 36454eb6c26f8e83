#pragma once

#include <condition_variable>
#include <mutex>

namespace ikbo::runtime {

/// Divides a number of intra-operator threads over a number of concurrent runs: each run gets an equal share on its
/// own thread, and callers beyond that number wait.
class ThreadBudget {
 public:
  /// `threads` 0: as many as PyTorch would use.
  ThreadBudget(int threads, int concurrent);
  int threads_per_run() const { return threads_per_run_; }

  /// A place among the concurrent runs, with the thread count of the calling thread set while it is held.
  class Place {
   public:
    Place(ThreadBudget& budget, int threads);
    ~Place();
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

   private:
    ThreadBudget& budget_;
    int previous_;
  };

 private:
  std::mutex mutex_;
  std::condition_variable freed_;
  int free_;
  int threads_per_run_;
};

}  // namespace ikbo::runtime
