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
  constexpr long kLoops = 1000000, kChains = 10;
  const double multiply_s = best_of(10, [] {
    Int a = zero(), b = zero(), c0 = a, c1 = a, c2 = a, c3 = a, c4 = a, c5 = a, c6 = a, c7 = a, c8 = a, c9 = a;
    for (long i = 0; i < kLoops; i++) {
      // Unknown to the compiler each time, or it would compute one chain for all.
      asm volatile("" : "+v"(a), "+v"(b), "+v"(c0), "+v"(c1), "+v"(c2), "+v"(c3), "+v"(c4), "+v"(c5), "+v"(c6), "+v"(c7));
      asm volatile("" : "+v"(c8), "+v"(c9));
      c0 = multiply_add(c0, a, b), c1 = multiply_add(c1, a, b), c2 = multiply_add(c2, a, b), c3 = multiply_add(c3, a, b);
      c4 = multiply_add(c4, a, b), c5 = multiply_add(c5, a, b), c6 = multiply_add(c6, a, b), c7 = multiply_add(c7, a, b);
      c8 = multiply_add(c8, a, b), c9 = multiply_add(c9, a, b);
    }
    asm volatile("" ::"v"(c0), "v"(c1), "v"(c2), "v"(c3), "v"(c4), "v"(c5), "v"(c6), "v"(c7), "v"(c8), "v"(c9));
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
