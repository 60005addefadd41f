// Threads that run the ops of a step together.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace paceline {

// An op is done when its work is all taken and nobody is still inside it: who has been preempted outside of an op is
// not waited for, and skips the ops that were done meanwhile. So a neighbour on our core costs at most one item an op.
class ThreadPool {
 public:
  using RunOp = void (*)(void* context, int op, int thread);

  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return int(workers_.size()) + 1; }
  // Calls run_op for ops 0 .. num_ops-1 in order, each on as many threads as come; the caller is thread 0. `run_op`
  // returns when nothing of the op is left to take. Everything of an op happens before anything of the next.
  void run(int num_ops, RunOp run_op, void* context);

 private:
  void participate(int thread);
  void leave(uint64_t entered);
  void wait_while(uint64_t run_and_op);
  void wake();

  // run number << 32 | op << 16 | threads inside the op
  alignas(64) std::atomic<uint64_t> state_;
  alignas(64) std::atomic<uint32_t> epoch_{0};  // what sleepers wait on
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
  int num_ops_ = 0;
  RunOp run_op_ = nullptr;
  void* context_ = nullptr;
  std::vector<std::thread> workers_;
};

}  // namespace paceline
