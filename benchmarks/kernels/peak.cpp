// Prints what one core reaches: integer GMAC/s of its byte multiply from registers, and GB/s read from memory.
#include <immintrin.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <vector>

static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

template <class F> static double best_of(int tries, F&& f) {
  double best = 1e9;
  for (int i = 0; i < tries; i++) {
    const double start = now();
    f();
    const double took = now() - start;
    best = took < best ? took : best;
  }
  return best;
}

#ifdef __AVX512VNNI__
using Int = __m512i;
using Unaligned = __m512i_u;
static Int zero() { return _mm512_setzero_si512(); }
static Int multiply_add(Int acc, Int a, Int b) { return _mm512_dpbusd_epi32(acc, a, b); }
#else
using Int = __m256i;
using Unaligned = __m256i_u;
static Int zero() { return _mm256_setzero_si256(); }
static Int multiply_add(Int acc, Int a, Int b) { return _mm256_add_epi16(acc, _mm256_maddubs_epi16(a, b)); }
#endif

int main() {
  constexpr long kLoops = 1000000, kChains = 8;
  const double multiply_s = best_of(10, [] {
    Int a0 = zero(), a1 = a0, b0 = a0, b1 = a0, b2 = a0, b3 = a0;
    Int c0 = a0, c1 = a0, c2 = a0, c3 = a0, c4 = a0, c5 = a0, c6 = a0, c7 = a0;
    for (long i = 0; i < kLoops; i++) {
      // Unknown to the compiler each time, or it would compute one chain for all.
      asm volatile("" : "+v"(a0), "+v"(a1), "+v"(b0), "+v"(b1), "+v"(b2), "+v"(b3));
      c0 = multiply_add(c0, a0, b0), c1 = multiply_add(c1, a0, b1), c2 = multiply_add(c2, a0, b2), c3 = multiply_add(c3, a0, b3);
      c4 = multiply_add(c4, a1, b0), c5 = multiply_add(c5, a1, b1), c6 = multiply_add(c6, a1, b2), c7 = multiply_add(c7, a1, b3);
    }
    asm volatile("" ::"v"(c0), "v"(c1), "v"(c2), "v"(c3), "v"(c4), "v"(c5), "v"(c6), "v"(c7));
  });
  const std::vector<uint64_t> memory(size_t(256) << 17, 1);  // 256 MiB: beyond any cache
  const double read_s = best_of(5, [&] {
    Int sum = zero();
    const Unaligned* p = reinterpret_cast<const Unaligned*>(memory.data());
    for (size_t i = 0; i < memory.size() * 8 / sizeof(Int); i++) sum = multiply_add(sum, p[i], p[i]);
    asm volatile("" ::"v"(sum));
  });
  std::printf("{\"gmac_s\": %.1f, \"gb_s\": %.2f}\n", double(kLoops * kChains * sizeof(Int)) / multiply_s / 1e9,
              double(memory.size() * 8) / read_s / 1e9);
}
