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

#if defined(PL_ISA_avx512) || defined(PL_ISA_avx512bf16)
constexpr int kGroupsAtOnce = 16;
// Lane i is the largest lane of a[i].
PL_INLINE f32x16 max_lanes(const f32x16 (&a)[16]) {
  __m512 quarters[4];  // lane j of each 128 bits: the largest of those 128 bits of a[4 i + j]
  for (int i = 0; i < 4; i++) {
    const f32x16* v = a + 4 * i;
    const __m512 first = _mm512_max_ps(_mm512_unpacklo_ps(v[0].v, v[1].v), _mm512_unpackhi_ps(v[0].v, v[1].v));
    const __m512 last = _mm512_max_ps(_mm512_unpacklo_ps(v[2].v, v[3].v), _mm512_unpackhi_ps(v[2].v, v[3].v));
    const __m512d p = _mm512_castps_pd(first), q = _mm512_castps_pd(last);
    quarters[i] = _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(p, q)), _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)));
  }
  const __m512i evens = _mm512_set_epi64(13, 12, 9, 8, 5, 4, 1, 0), odds = _mm512_set_epi64(15, 14, 11, 10, 7, 6, 3, 2);
  auto halve = [&](__m512 p, __m512 q) {  // of the 128 bits of both, every second with the one after it
    const __m512i a = _mm512_castps_si512(p), b = _mm512_castps_si512(q);
    return _mm512_max_ps(_mm512_castsi512_ps(_mm512_permutex2var_epi64(a, evens, b)),
                         _mm512_castsi512_ps(_mm512_permutex2var_epi64(a, odds, b)));
  };
  return {halve(halve(quarters[0], quarters[1]), halve(quarters[2], quarters[3]))};
}

// Sixteen groups, with one division for all their scales and one for their inverses. The same bits as quantize_group's.
PL_INLINE void quantize_groups(const float* x, const Q8Row& out, size_t g) {
  f32x16 top[kGroupsAtOnce];
  for (int i = 0; i < kGroupsAtOnce; i++) top[i] = max(abs(load(x + 32 * i)), abs(load(x + 32 * i + 16)));
  const __m512 amax = max_lanes(top).v, most = _mm512_set1_ps(127.0f);
  const __mmask16 is_used = _mm512_cmp_ps_mask(amax, _mm512_set1_ps(kSmallestMax), _CMP_GE_OQ);
  const __m512 scale = _mm512_maskz_div_ps(is_used, amax, most);
  alignas(64) float inverse[kGroupsAtOnce];
  _mm512_store_ps(inverse, _mm512_maskz_div_ps(is_used, most, amax));
  int8_t* q = out.q + g * 32;
  for (int i = 0; i < kGroupsAtOnce; i++) {
    store_i8(q + 32 * i, mul(load(x + 32 * i), set1(inverse[i])));
    store_i8(q + 32 * i + 16, mul(load(x + 32 * i + 16), set1(inverse[i])));
  }
  const __m512i bias = _mm512_set1_epi8(-128), zero = _mm512_setzero_si512();
  const __m512i evens = _mm512_set_epi64(14, 12, 10, 8, 6, 4, 2, 0), odds = _mm512_set_epi64(15, 13, 11, 9, 7, 5, 3, 1);
  int16_t* half_sum = out.half_sum + 2 * g;
  for (int i = 0; i < kGroupsAtOnce; i += 4) {  // eight halves
    const __m512i a = _mm512_sad_epu8(_mm512_xor_si512(_mm512_loadu_si512(q + 32 * i), bias), zero);
    const __m512i b = _mm512_sad_epu8(_mm512_xor_si512(_mm512_loadu_si512(q + 32 * i + 64), bias), zero);
    const __m512i sums =
        _mm512_add_epi64(_mm512_permutex2var_epi64(a, evens, b), _mm512_permutex2var_epi64(a, odds, b));
    const __m128i words = _mm_sub_epi16(_mm512_cvtepi64_epi16(sums), _mm_set1_epi16(16 * 128));
    _mm_storeu_si128((__m128i*)(half_sum + 2 * i), words);
  }
  const __m512i group_sums = _mm512_dpwssd_epi32(zero, _mm512_loadu_si512(half_sum), _mm512_set1_epi16(1));
  _mm512_storeu_ps(out.scale + g, scale);
  _mm512_storeu_ps(out.sum + g, _mm512_mul_ps(scale, _mm512_cvtepi32_ps(group_sums)));
}
#endif

// n columns x (any alignment) to whole groups at `out`. One NaN or infinity makes all of them NaN, so that the error
// reaches the logits instead of turning into plausible numbers. `out` may not overlap x.
inline void quantize_columns(const float* x, int n, const Q8Row& out) {
  const int whole = n / 32, groups = (n + 31) / 32;
  float tail[32] = {};
  f32x16 poison = set1(0.0f);  // 0 * x: NaN where x is not finite
  int g = 0;
#if defined(PL_ISA_avx512) || defined(PL_ISA_avx512bf16)
  for (; g + kGroupsAtOnce <= whole; g += kGroupsAtOnce) {
    for (int i = 0; i < 32 * kGroupsAtOnce; i += 16) poison = fma(load(x + g * 32 + i), set1(0.0f), poison);
    quantize_groups(x + g * 32, out, g);
  }
#endif
  for (; g < groups; g++) {
    const float* from = x + g * 32;
    if (g == whole) {
      std::memcpy(tail, from, size_t(n - g * 32) * 4);
      from = tail;
    }
    const f32x16 a = load(from), b = load(from + 16);
    poison = fma(b, set1(0.0f), fma(a, set1(0.0f), poison));
    quantize_group(a, b, out, g);
  }
  if (reduce_add(poison) == 0.0f) return;
  const float nan = __builtin_nanf("");
  std::memset(out.q, 0, size_t(groups) * 32);
  for (g = 0; g < groups; g++) {
    out.scale[g] = out.sum[g] = nan;
    out.half_sum[2 * g] = out.half_sum[2 * g + 1] = 0;
  }
}

inline void quantize_row(const float* x, int k, uint8_t* row) { quantize_columns(x, k, q8_row(row, k)); }

}  // namespace paceline::PL_ISA
