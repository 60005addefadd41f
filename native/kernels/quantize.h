// Activation quantisation, shared by every kernel that writes a q8 row (layout in kernels.h).
#pragma once
#include "kernels.h"
#include "simd.h"

namespace paceline::PL_ISA {

// Below this a group is all zeros: 127 / max|x| would overflow.
constexpr float kSmallestMax = 1e-36f;

// Largest lane of `a`, whose lanes are finite or whatever the caller discards: max needs no order.
PL_INLINE float max_lane(f32x16 a) {
#if defined(PL_ISA_avx512) || defined(PL_ISA_avx512bf16)
  return _mm512_reduce_max_ps(a.v);
#elif defined(PL_ISA_avx2)
  __m256 m = _mm256_max_ps(a.lo, a.hi);
  __m128 h = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
  h = _mm_max_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
#elif defined(PL_ISA_neon)
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3])));
#else
  return reduce_max(a);
#endif
}

PL_INLINE int sum_i8x16(const int8_t* q) {
#if defined(PL_ISA_avx2) || defined(PL_ISA_avx512) || defined(PL_ISA_avx512bf16)
  const __m128i biased = _mm_xor_si128(_mm_loadu_si128((const __m128i*)q), _mm_set1_epi8(-128));
  const __m128i s = _mm_sad_epu8(biased, _mm_setzero_si128());
  return _mm_cvtsi128_si32(s) + _mm_extract_epi16(s, 4) - 16 * 128;
#elif defined(PL_ISA_neon)
  return vaddlvq_s8(vld1q_s8(q));
#else
  int s = 0;
  for (int i = 0; i < 16; i++) s += q[i];
  return s;
#endif
}

struct Q8Row {  // the parts of a q8 row of K columns
  int8_t* q;
  float* scale;
  float* sum;
  int16_t* half_sum;
};
PL_INLINE Q8Row q8_row(uint8_t* row, int k) {
  const size_t padded = q8_padded(k), groups = padded / 32;
  float* scale = (float*)(row + padded);
  return {(int8_t*)row, scale, scale + groups, (int16_t*)(scale + 2 * groups)};
}

// One group of 32 as its two halves a and b.
PL_INLINE void quantize_group(f32x16 a, f32x16 b, const Q8Row& out, size_t g) {
  const float amax = max_lane(max(abs(a), abs(b)));
  const bool is_zero = !(amax >= kSmallestMax);
  const float scale = is_zero ? 0.0f : amax / 127.0f;
  const f32x16 inverse = set1(is_zero ? 0.0f : 127.0f / amax);
  int8_t* q = out.q + g * 32;
  store_i8(q, mul(a, inverse));
  store_i8(q + 16, mul(b, inverse));
  const int s0 = sum_i8x16(q), s1 = sum_i8x16(q + 16);
  out.scale[g] = scale;
  out.sum[g] = scale * float(s0 + s1);
  out.half_sum[2 * g] = int16_t(s0);
  out.half_sum[2 * g + 1] = int16_t(s1);
}

// x[k] (any alignment) to one q8 row. A row that holds a NaN or an infinity becomes NaN as a whole, so that the error
// reaches the logits instead of turning into plausible numbers. `row` may not overlap x.
inline void quantize_row(const float* x, int k, uint8_t* row) {
  const Q8Row out = q8_row(row, k);
  const int groups = int(q8_padded(k) / 32), whole = k / 32;
  f32x16 poison = set1(0.0f);  // 0 * x: NaN where x is not finite
  for (int g = 0; g < whole; g++) {
    const f32x16 a = load(x + g * 32), b = load(x + g * 32 + 16);
    poison = fma(b, set1(0.0f), fma(a, set1(0.0f), poison));
    quantize_group(a, b, out, g);
  }
  if (whole < groups) {
    float tail[32] = {};
    for (int i = whole * 32; i < k; i++) tail[i - whole * 32] = x[i];
    const f32x16 a = load(tail), b = load(tail + 16);
    poison = fma(b, set1(0.0f), fma(a, set1(0.0f), poison));
    quantize_group(a, b, out, whole);
  }
  if (reduce_add(poison) == 0.0f) return;
  const float nan = __builtin_nanf("");
  std::memset(row, 0, q8_padded(k));
  for (int g = 0; g < groups; g++) {
    out.scale[g] = out.sum[g] = nan;
    out.half_sum[2 * g] = out.half_sum[2 * g + 1] = 0;
  }
}

}  // namespace paceline::PL_ISA
