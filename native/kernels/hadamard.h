// A head's columns mixed so that each has a share of all: a few far above the rest would leave the rest few codes.
#pragma once
#include "simd.h"

namespace paceline::PL_ISA {

// Sums and differences of neighbours, then of pairs, then of fours: x[8] times a Hadamard matrix.
#if defined(PL_ISA_avx2) || defined(PL_ISA_avx512) || defined(PL_ISA_avx512bf16)
PL_INLINE __m256 sums_and_differences(__m256 x, __m256 swapped, __m256 minus) {
  return _mm256_add_ps(swapped, _mm256_xor_ps(x, minus));
}
PL_INLINE void mix_eight(float* x) {
  const float n = -0.0f;
  __m256 v = _mm256_loadu_ps(x);
  v = sums_and_differences(v, _mm256_permute_ps(v, 0xB1), _mm256_setr_ps(0, n, 0, n, 0, n, 0, n));
  v = sums_and_differences(v, _mm256_permute_ps(v, 0x4E), _mm256_setr_ps(0, 0, n, n, 0, 0, n, n));
  v = sums_and_differences(v, _mm256_permute2f128_ps(v, v, 1), _mm256_setr_ps(0, 0, 0, 0, n, n, n, n));
  _mm256_storeu_ps(x, v);
}
#else
PL_INLINE void mix_eight(float* x) {
  for (int half = 1; half < 8; half *= 2) {
    float y[8];
    for (int i = 0; i < 8; i++) y[i] = i & half ? x[i - half] - x[i] : x[i] + x[i + half];
    std::memcpy(x, y, sizeof y);
  }
}
#endif

// x[n] = x H, H a Hadamard matrix over sqrt(p) on each run of p columns; p is the largest power of two that divides n,
// and at least 8. H is its own inverse, and scores are the same between queries and keys that are both mixed (QuaRot,
// Ashkboos 2024).
inline void mix_columns(float* x, int n) {
  const int run = n & -n;
  float factor = 1.0f;
  for (int left = run; left > 1; left /= 4) factor *= left == 2 ? 0.707106781f : 0.5f;
  for (int i = 0; i < n; i += 8) mix_eight(x + i);
  for (int i = 0; run > 8 && i < n; i += 16) {
    for (int j = i; j < i + 8; j++) {
      const float a = x[j], b = x[j + 8];
      x[j] = a + b;
      x[j + 8] = a - b;
    }
  }
  for (int half = 16; half < run; half *= 2) {
    for (int i = 0; i < n; i += 2 * half) {
      for (int j = i; j < i + half; j += 16) {
        const f32x16 a = load(x + j), b = load(x + j + half);
        store(x + j, add(a, b));
        store(x + j + half, sub(a, b));
      }
    }
  }
  for (int i = 0; i < n; i++) x[i] *= factor;
}

}  // namespace paceline::PL_ISA
