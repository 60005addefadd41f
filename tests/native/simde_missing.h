// What SIMDe 0.7 lacks of the AVX-512 that the kernels use, by way of AVX2. Test builds include it before all else.
#pragma once
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#undef _mm512_cvtph_ps
#undef _mm512_cvtps_ph
#undef _mm512_cvtepu8_epi32
#undef _mm512_cvtepi8_epi32
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepi32_epi16
#undef _mm512_cvtepi64_epi16
#undef _mm512_cvtps_epi32
#undef _mm512_cvtepi32_ps
#undef _mm512_reduce_max_ps

namespace simde_missing {
inline simde__m512i join(__m256i lo, __m256i hi) {
  return simde_mm512_inserti64x4(simde_mm512_castsi256_si512(lo), hi, 1);
}
inline simde__m512 join(__m256 lo, __m256 hi) {
  return simde_mm512_castsi512_ps(join(_mm256_castps_si256(lo), _mm256_castps_si256(hi)));
}
inline __m256 low(simde__m512 a) { return simde_mm512_castps512_ps256(a); }
inline __m256 high(simde__m512 a) {
  return _mm256_castsi256_ps(simde_mm512_extracti64x4_epi64(simde_mm512_castps_si512(a), 1));
}
inline simde__m512 cvtph_ps(__m256i a) {
  return join(_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)));
}
inline __m256i cvtps_ph(simde__m512 a) {
  return _mm256_set_m128i(_mm256_cvtps_ph(high(a), 0), _mm256_cvtps_ph(low(a), 0));
}
inline simde__m512i cvtepu8_epi32(__m128i a) {
  return join(_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8)));
}
inline simde__m512i cvtepi8_epi32(__m128i a) {
  return join(_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8)));
}
inline simde__m512i cvtepu16_epi32(__m256i a) {
  return join(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1)));
}
inline __m256i cvtepi32_epi16(simde__m512i a) {
  const __m256i low16 = _mm256_set1_epi32(0xffff);
  const __m256i lo = _mm256_and_si256(simde_mm512_castsi512_si256(a), low16);
  const __m256i hi = _mm256_and_si256(simde_mm512_extracti64x4_epi64(a, 1), low16);
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xD8);
}
inline __m128i cvtepi64_epi16(simde__m512i a) {
  int64_t from[8];
  int16_t to[8];
  simde_mm512_storeu_si512(from, a);
  for (int i = 0; i < 8; i++) to[i] = int16_t(from[i]);
  return _mm_loadu_si128((const __m128i*)to);
}
inline simde__m512i cvtps_epi32(simde__m512 a) { return join(_mm256_cvtps_epi32(low(a)), _mm256_cvtps_epi32(high(a))); }
inline simde__m512 cvtepi32_ps(simde__m512i a) {
  return join(_mm256_cvtepi32_ps(simde_mm512_castsi512_si256(a)),
              _mm256_cvtepi32_ps(simde_mm512_extracti64x4_epi64(a, 1)));
}
inline float reduce_max_ps(simde__m512 a) {
  float f[16], m;
  simde_mm512_storeu_ps(f, a);
  m = f[0];
  for (float x : f) m = x > m ? x : m;
  return m;
}
}  // namespace simde_missing
#define _mm512_cvtph_ps simde_missing::cvtph_ps
#define _mm512_cvtps_ph(a, mode) simde_missing::cvtps_ph(a)
#define _mm512_cvtepu8_epi32 simde_missing::cvtepu8_epi32
#define _mm512_cvtepi8_epi32 simde_missing::cvtepi8_epi32
#define _mm512_cvtepu16_epi32 simde_missing::cvtepu16_epi32
#define _mm512_cvtepi32_epi16 simde_missing::cvtepi32_epi16
#define _mm512_cvtepi64_epi16 simde_missing::cvtepi64_epi16
#define _mm512_cvtps_epi32 simde_missing::cvtps_epi32
#define _mm512_cvtepi32_ps simde_missing::cvtepi32_ps
#define _mm512_reduce_max_ps simde_missing::reduce_max_ps
