#include "probe.h"

#include <sys/mman.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <limits>
#include <thread>
#include <vector>

namespace paceline {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kMinRounds = 3;
constexpr size_t kRoundBytes = size_t(64) << 20;  // a thread's; a round is long beside the barrier
constexpr long kRoundLoops = 1'000'000;

double seconds_between(Clock::time_point a, Clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

// Seconds of the fastest round, in which every thread runs f(thread), from the first start to the last end. Rounds go
// on for `seconds`.
template <class F>
double best_round(int num_threads, double seconds, F f) {
  std::barrier<> line(num_threads);
  std::vector<Clock::time_point> begins(static_cast<size_t>(num_threads)), ends(begins);
  bool is_over = false;
  double best = std::numeric_limits<double>::infinity();
  auto work = [&](int thread) {
    const auto start = Clock::now();
    for (int round = 1;; round++) {
      line.arrive_and_wait();
      if (is_over) return;
      begins[size_t(thread)] = Clock::now();
      f(thread);
      ends[size_t(thread)] = Clock::now();
      line.arrive_and_wait();
      if (thread) continue;
      best = std::min(best, seconds_between(*std::min_element(begins.begin(), begins.end()),
                                            *std::max_element(ends.begin(), ends.end())));
      is_over = round >= kMinRounds && seconds_between(start, Clock::now()) > seconds;
    }
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < num_threads; thread++) others.emplace_back(work, thread);
  work(0);
  for (std::thread& other : others) other.join();
  return best;
}

}  // namespace

double read_bandwidth(const KernelTable& table, size_t bytes, int num_threads, double seconds) {
  void* map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) return 0;
#ifdef MADV_HUGEPAGE
  madvise(map, bytes, MADV_HUGEPAGE);
#endif
  auto* data = static_cast<float*>(map);
  for (size_t i = 0; i < bytes / sizeof(float); i += 1024) data[i] = 0;  // untouched pages are one page
  const size_t part = bytes / size_t(num_threads) / 256 * 256;
  const size_t passes = std::max<size_t>(1, kRoundBytes / part);
  const double best = best_round(num_threads, seconds, [&](int thread) {
    const float* begin = data + size_t(thread) * part / sizeof(float);
    for (size_t i = 0; i < passes; i++) table.read_memory(begin, part / sizeof(float));
  });
  munmap(map, bytes);
  return double(part * passes) * num_threads / best;
}

double peak_macs(const Probe& probe, int num_threads, double seconds) {
  if (!probe.run) return 0;
  const double best = best_round(num_threads, seconds, [&](int) { probe.run(kRoundLoops); });
  return double(kRoundLoops) * probe.macs_per_loop * num_threads / best;
}

}  // namespace paceline
