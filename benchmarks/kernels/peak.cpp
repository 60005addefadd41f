// Prints what `threads` cores reach together (argument 1, default 1): GMAC/s from registers of the byte multiply, of
// the bf16 dot product (null where the target has none) and of the f32 fused multiply-add, and GB/s read from memory.
#include <immintrin.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

static double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds from the first thread's start of f(thread) to the last one's end, the best of several tries.
template <class F>
static double best_of(int tries, int num_threads, F&& f) {
  double best = 1e9;
  for (int i = 0; i < tries; i++) {
    std::barrier<> start_line(num_threads);
    std::vector<double> starts(num_threads), ends(num_threads);
    auto timed = [&](int thread) {
      start_line.arrive_and_wait();
      starts[thread] = now();
      f(thread);
      ends[thread] = now();
    };
    std::vector<std::thread> others;
    for (int thread = 1; thread < num_threads; thread++) others.emplace_back(timed, thread);
    timed(0);
    for (std::thread& other : others) other.join();
    best =
        std::min(best, *std::max_element(ends.begin(), ends.end()) - *std::min_element(starts.begin(), starts.end()));
  }
  return best;
}

// One instruction or pair that multiplies and adds: its operands, its accumulator, and the products it adds to it.
#ifdef __AVX512F__
struct F32 {
  using Operand = __m512;
  using Sum = __m512;
  static constexpr int kMacs = 16;
  static Sum mac(Sum sum, Operand a, Operand b) { return _mm512_fmadd_ps(a, b, sum); }
};
#else
struct F32 {
  using Operand = __m256;
  using Sum = __m256;
  static constexpr int kMacs = 8;
  static Sum mac(Sum sum, Operand a, Operand b) { return _mm256_fmadd_ps(a, b, sum); }
};
#endif

#ifdef __AVX512VNNI__
struct Int8 {
  using Operand = __m512i;
  using Sum = __m512i;
  static constexpr int kMacs = 64;
  static Sum mac(Sum sum, Operand a, Operand b) { return _mm512_dpbusd_epi32(sum, a, b); }
};
#else
struct Int8 {
  using Operand = __m256i;
  using Sum = __m256i;
  static constexpr int kMacs = 32;
  static Sum mac(Sum sum, Operand a, Operand b) { return _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b)); }
};
#endif

#ifdef __AVX512BF16__
struct Bf16 {
  using Operand = __m512bh;
  using Sum = __m512;
  static constexpr int kMacs = 32;
  static Sum mac(Sum sum, Operand a, Operand b) { return _mm512_dpbf16_ps(sum, a, b); }
};
#endif

template <class Op>
static double gmac_s(int num_threads) {
  constexpr long kLoops = 2000000, kChains = 8;  // enough chains for two units of latency 4
  const double seconds = best_of(30, num_threads, [](int) {
    typename Op::Operand a0{}, a1{}, b0{}, b1{}, b2{}, b3{};
    typename Op::Sum c0{}, c1{}, c2{}, c3{}, c4{}, c5{}, c6{}, c7{};
    for (long i = 0; i < kLoops; i++) {
      // Unknown to the compiler each time, or it would compute one chain for all.
      asm volatile("" : "+v"(a0), "+v"(a1), "+v"(b0), "+v"(b1), "+v"(b2), "+v"(b3));
      c0 = Op::mac(c0, a0, b0), c1 = Op::mac(c1, a0, b1), c2 = Op::mac(c2, a0, b2), c3 = Op::mac(c3, a0, b3);
      c4 = Op::mac(c4, a1, b0), c5 = Op::mac(c5, a1, b1), c6 = Op::mac(c6, a1, b2), c7 = Op::mac(c7, a1, b3);
    }
    asm volatile("" ::"v"(c0), "v"(c1), "v"(c2), "v"(c3), "v"(c4), "v"(c5), "v"(c6), "v"(c7));
  });
  return double(num_threads) * kLoops * kChains * Op::kMacs / seconds / 1e9;
}

static double gb_s(int num_threads) {
  const size_t num_vectors = (size_t(256) << 20) / sizeof(__m256i) / num_threads;  // 256 MiB in all: beyond any cache
  std::vector<std::vector<uint64_t>> memory(num_threads, std::vector<uint64_t>(num_vectors * 4, 1));
  const double seconds = best_of(5, num_threads, [&](int thread) {
    __m256i sum{};
    const __m256i_u* p = reinterpret_cast<const __m256i_u*>(memory[thread].data());
    for (size_t i = 0; i < num_vectors; i++) sum = _mm256_add_epi64(sum, p[i]);
    asm volatile("" ::"v"(sum));
  });
  return double(num_vectors * sizeof(__m256i)) * num_threads / seconds / 1e9;
}

int main(int argc, char** argv) {
  const int num_threads = argc > 1 ? std::max(1, std::atoi(argv[1])) : 1;
  std::printf("{\"threads\": %d, \"gmac_s\": %.1f, \"f32_gmac_s\": %.1f, ", num_threads, gmac_s<Int8>(num_threads),
              gmac_s<F32>(num_threads));
#ifdef __AVX512BF16__
  std::printf("\"bf16_gmac_s\": %.1f, ", gmac_s<Bf16>(num_threads));
#else
  std::printf("\"bf16_gmac_s\": null, ");
#endif
  std::printf("\"gb_s\": %.2f}\n", gb_s(num_threads));
}
