// E4M3, the 8-bit float of fp8 caches: sign, four bits of exponent, three of mantissa; up to 448, no infinity.
#pragma once
#include "simd.h"

namespace paceline::PL_ISA {

// Sixteen numbers, times 2^-8: their bits are those of an f16 with eight less in the exponent.
#if defined(PL_ISA_avx512) || defined(PL_ISA_avx512bf16)
PL_INLINE f32x16 load_e4m3(const uint8_t* p) {
  const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), 8);
  return {_mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16(int16_t(0xbfff))))};
}
#elif defined(PL_ISA_avx2)
PL_INLINE f32x16 load_e4m3(const uint8_t* p) {
  const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), 8);
  const __m256i half = _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16(int16_t(0xbfff)));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
}
#elif defined(PL_ISA_neon)
PL_INLINE f32x16 load_e4m3(const uint8_t* p) {
  f32x16 r;
  for (int i = 0; i < 2; i++) {
    const int16x8_t high = vreinterpretq_s16_u16(vshlq_n_u16(vmovl_u8(vld1_u8(p + 8 * i)), 8));
    const int16x8_t half = vandq_s16(vshrq_n_s16(high, 1), vdupq_n_s16(int16_t(0xbfff)));
    r.v[2 * i] = vcvt_f32_f16(vreinterpret_f16_s16(vget_low_s16(half)));
    r.v[2 * i + 1] = vcvt_f32_f16(vreinterpret_f16_s16(vget_high_s16(half)));
  }
  return r;
}
#else
PL_INLINE f32x16 load_e4m3(const uint8_t* p) {
  f32x16 r;
  for (int i = 0; i < 16; i++) r.v[i] = f16_f32(uint16_t((p[i] & 128) << 8 | (p[i] & 127) << 7));
  return r;
}
#endif

// Store as E4M3, nearest even. Precondition: numbers up to 448, or what rounds to it.
PL_INLINE void store_e4m3(uint8_t* p, f32x16 a) {
  float f[16], coarse[16];  // below 2^-6 numbers are 2^-9 apart, like floats from 2^14 on
  store(f, a);
  store(coarse, add(abs(a), set1(0x1p14f)));
  for (int i = 0; i < 16; i++) {
    uint32_t u, low;
    std::memcpy(&u, f + i, 4);
    std::memcpy(&low, coarse + i, 4);
    const uint32_t size = u & 0x7fffffff, sign = u >> 24 & 128;
    const uint32_t normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    p[i] = uint8_t(sign | (size < 0x3c800000 ? low - 0x46800000 : normal));
  }
}

}  // namespace paceline::PL_ISA
