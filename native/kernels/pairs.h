// Sixteen-bit integer vectors of attention over int8 keys and values: i16x32, two elements for each of sixteen lanes,
// and their exact products. A product of a code (up to 127) and a number of 15 bits is summed up to 256 times in 32.
#pragma once
#include "linear_int.h"

namespace paceline::PL_ISA {

constexpr int kMaxI16 = 32767;

#if defined(PL_ISA_avx512) || defined(PL_ISA_avx512bf16)
struct i16x32 {
  __m512i v;
};
PL_INLINE i16x32 widen_pairs(const int8_t* p) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p))}; }
// acc += each lane's two elements of a times the two at x.
PL_INLINE i32x16 dot2(i32x16 acc, i16x32 a, const int16_t* x) {
  int two;
  std::memcpy(&two, x, 4);
  return {_mm512_dpwssd_epi32(acc.v, a.v, _mm512_set1_epi32(two))};
}
// Sixteen numbers of a: nearest even. Precondition: they are in [-32767, 32767].
PL_INLINE void store_i16(int16_t* p, f32x16 a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a.v)));
}

#elif defined(PL_ISA_avx2)
struct i16x32 {
  __m256i lo, hi;
};
PL_INLINE i16x32 widen_pairs(const int8_t* p) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + 16)))};
}
PL_INLINE i32x16 dot2(i32x16 acc, i16x32 a, const int16_t* x) {
  const __m256i two = broadcast4(x);
  return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(a.lo, two)),
          _mm256_add_epi32(acc.hi, _mm256_madd_epi16(a.hi, two))};
}
PL_INLINE void store_i16(int16_t* p, f32x16 a) {
  const __m256i w = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(w, 0xD8));
}

#elif defined(PL_ISA_neon)
struct i16x32 {
  int16x8_t v[4];
};
PL_INLINE i16x32 widen_pairs(const int8_t* p) {
  i16x32 r;
  for (int i = 0; i < 4; i++) r.v[i] = vmovl_s8(vld1_s8(p + 8 * i));
  return r;
}
PL_INLINE i32x16 dot2(i32x16 acc, i16x32 a, const int16_t* x) {
  int32_t two;
  std::memcpy(&two, x, 4);
  const int16x4_t b = vreinterpret_s16_s32(vdup_n_s32(two));
  for (int i = 0; i < 4; i++) {
    const int32x4_t low = vmull_s16(vget_low_s16(a.v[i]), b), high = vmull_s16(vget_high_s16(a.v[i]), b);
    acc.v[i] = vaddq_s32(acc.v[i], vpaddq_s32(low, high));
  }
  return acc;
}
PL_INLINE void store_i16(int16_t* p, f32x16 a) {
  for (int i = 0; i < 4; i++) vst1_s16(p + 4 * i, vqmovn_s32(vcvtnq_s32_f32(a.v[i])));
}

#else
struct i16x32 {
  int16_t v[32];
};
PL_INLINE i16x32 widen_pairs(const int8_t* p) {
  i16x32 r;
  for (int i = 0; i < 32; i++) r.v[i] = p[i];
  return r;
}
PL_INLINE i32x16 dot2(i32x16 acc, i16x32 a, const int16_t* x) {
  for (int i = 0; i < 16; i++) acc.v[i] += a.v[2 * i] * x[0] + a.v[2 * i + 1] * x[1];
  return acc;
}
PL_INLINE void store_i16(int16_t* p, f32x16 a) {
  for (int i = 0; i < 16; i++) p[i] = int16_t(__builtin_nearbyintf(a.v[i]));
}
#endif

}  // namespace paceline::PL_ISA
