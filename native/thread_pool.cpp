#include "thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace paceline {
namespace {

constexpr uint64_t kIdle = 0xffff;  // the op between two runs
constexpr int kSpins = 400;         // pauses before sleeping: 10 to 20 us, about the length of a small op

uint64_t op_of(uint64_t state) { return state >> 16 & 0xffff; }
uint64_t inside(uint64_t state) { return state & 0xffff; }
uint64_t run_and_op(uint64_t state) { return state >> 16; }
uint64_t make_state(uint64_t run, uint64_t op) { return run << 32 | op << 16; }

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

void futex(std::atomic<uint32_t>* word, int op, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) : state_(make_state(0, kIdle)) {
  workers_.reserve(size_t(num_threads - 1));
  for (int i = 1; i < num_threads; i++) {
    workers_.emplace_back([this, i] {
      pthread_setname_np(pthread_self(), "paceline");
      while (!stopping_.load(std::memory_order_acquire)) {
        participate(i);
        wait_while(run_and_op(make_state(state_.load() >> 32, kIdle)));
      }
    });
  }
}

ThreadPool::~ThreadPool() {
  stopping_.store(true);
  epoch_.fetch_add(1);
  futex(&epoch_, FUTEX_WAKE, INT32_MAX);
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(int num_ops, RunOp run_op, void* context) {
  if (num_ops == 0) return;
  if (workers_.empty()) {
    for (int op = 0; op < num_ops; op++) run_op(context, op, 0);
    return;
  }
  num_ops_ = num_ops;
  run_op_ = run_op;
  context_ = context;
  state_.store(make_state((state_.load() >> 32) + 1, 0));
  wake();
  participate(0);
}

// Works until the run is over.
void ThreadPool::participate(int thread) {
  for (;;) {
    uint64_t state = state_.load();
    if (op_of(state) == kIdle) return;
    if (!state_.compare_exchange_weak(state, state + 1)) continue;
    run_op_(context_, int(op_of(state)), thread);
    leave(state);
  }
}

// The last one out opens the next op; the others wait for that.
void ThreadPool::leave(uint64_t entered) {
  uint64_t op = op_of(entered), next = op + 1 == uint64_t(num_ops_) ? kIdle : op + 1;
  uint64_t opened = make_state(entered >> 32, next), state = state_.load();
  while (!state_.compare_exchange_weak(state, inside(state) == 1 ? opened : state - 1)) {}
  if (inside(state) == 1)
    wake();
  else
    wait_while(run_and_op(entered));
}

// Returns when the state's run or op has changed, or the pool stops: spins a little, then sleeps.
void ThreadPool::wait_while(uint64_t current) {
  auto is_over = [&] { return run_and_op(state_.load()) != current || stopping_.load(); };
  for (int i = 0; i < kSpins; i++) {
    if (is_over()) return;
    pause();
  }
  sleepers_.fetch_add(1);
  for (;;) {
    uint32_t epoch = epoch_.load();
    if (is_over()) break;
    futex(&epoch_, FUTEX_WAIT, epoch);
  }
  sleepers_.fetch_sub(1);
}

// Sequentially consistent with wait_while: either we see its sleeper or it sees the new state.
void ThreadPool::wake() {
  if (sleepers_.load() == 0) return;
  epoch_.fetch_add(1);
  futex(&epoch_, FUTEX_WAKE, INT32_MAX);
}

}  // namespace paceline
