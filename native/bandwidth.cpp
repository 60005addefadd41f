#include "bandwidth.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

namespace paceline {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// One stream does not keep enough lines in flight to fill a core's share of the bus; four do.
uint64_t sum_streams(const uint64_t* data, size_t words) {
  constexpr size_t kStreams = 4;
  const size_t part = words / kStreams;
  uint64_t sums[kStreams] = {};
  for (size_t i = 0; i + 8 <= part; i += 8)
    for (size_t s = 0; s < kStreams; s++)
      for (size_t j = 0; j < 8; j++) sums[s] += data[s * part + i + j];
  return sums[0] + sums[1] + sums[2] + sums[3];
}

}  // namespace

double read_bandwidth(size_t bytes, int num_threads, double seconds) {
  void* map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) return 0;
#ifdef MADV_HUGEPAGE
  madvise(map, bytes, MADV_HUGEPAGE);
#endif
  const size_t words = bytes / sizeof(uint64_t) / size_t(num_threads);
  std::atomic<int> arrived{0};
  std::atomic<uint64_t> sink{0};
  std::vector<double> best(size_t(num_threads), 0.0);
  auto work = [&](int thread) {
    auto* data = static_cast<uint64_t*>(map) + size_t(thread) * words;
    for (size_t i = 0; i < words; i += 512) data[i] = i;  // an untouched page would read as the shared zero page
    arrived.fetch_add(1);
    while (arrived.load() < num_threads) std::this_thread::yield();
    for (const auto start = Clock::now(); seconds_since(start) < seconds;) {
      const auto pass = Clock::now();
      sink.fetch_add(sum_streams(data, words), std::memory_order_relaxed);
      best[size_t(thread)] = std::max(best[size_t(thread)], double(words * sizeof(uint64_t)) / seconds_since(pass));
    }
  };
  std::vector<std::thread> threads;
  for (int t = 1; t < num_threads; t++) threads.emplace_back(work, t);
  work(0);
  for (auto& thread : threads) thread.join();
  munmap(map, bytes);
  double total = 0;
  for (double rate : best) total += rate;
  return total;
}

}  // namespace paceline
