// f32x16: sixteen floats, the one vector type of the element-wise kernels. Every operation rounds the same on each
// ISA (fma is always fused, sums always reduce by the same tree), so a kernel written over f32x16 gives equal bits
// on all of them. Only code compiled per ISA may include this file; all of it is in the ISA's own namespace.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(PL_ISA_avx2) || defined(PL_ISA_avx512) || defined(PL_ISA_avx512bf16)
#ifdef PACELINE_SIMDE  // tests run the AVX-512 kernels on CPUs without it through SIMDe's emulation
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>
#else
#include <immintrin.h>
#endif
#elif defined(PL_ISA_neon)
#include <arm_neon.h>
#endif

#define PL_INLINE inline __attribute__((always_inline))

namespace paceline::PL_ISA {

#if defined(PL_ISA_avx512) || defined(PL_ISA_avx512bf16)
struct f32x16 {
  __m512 v;
};
PL_INLINE f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
PL_INLINE void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
PL_INLINE f32x16 set1(float x) { return {_mm512_set1_ps(x)}; }
PL_INLINE f32x16 add(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
PL_INLINE f32x16 sub(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
PL_INLINE f32x16 mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
PL_INLINE f32x16 div(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
PL_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
PL_INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
PL_INLINE f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
PL_INLINE f32x16 abs(f32x16 a) { return {_mm512_abs_ps(a.v)}; }
// Nearest even integer, as float.
PL_INLINE f32x16 round_even(f32x16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a * 2^n for n a float holding an integer in [-126, 127].
PL_INLINE f32x16 ldexp_int(f32x16 a, f32x16 n) {
  __m512i e = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23);
  return {_mm512_mul_ps(a.v, _mm512_castsi512_ps(e))};
}
// Lanes of `a` where x >= y, else +0.
PL_INLINE f32x16 keep_ge(f32x16 a, f32x16 x, f32x16 y) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_GE_OQ), a.v)};
}
PL_INLINE f32x16 load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
PL_INLINE void store_f16(uint16_t* p, f32x16 a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
PL_INLINE f32x16 load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
// Sixteen int8 quants of a: nearest even, saturated to [-127, 127].
PL_INLINE void store_i8(int8_t* p, f32x16 a) {
  _mm_storeu_si128((__m128i*)p,
                   _mm512_cvtsepi32_epi8(_mm512_max_epi32(_mm512_cvtps_epi32(a.v), _mm512_set1_epi32(-127))));
}

#elif defined(PL_ISA_avx2)
struct f32x16 {
  __m256 lo, hi;
};
PL_INLINE f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
PL_INLINE void store(float* p, f32x16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
PL_INLINE f32x16 set1(float x) {
  __m256 v = _mm256_set1_ps(x);
  return {v, v};
}
PL_INLINE f32x16 add(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
PL_INLINE f32x16 sub(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
PL_INLINE f32x16 mul(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
PL_INLINE f32x16 div(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
PL_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
PL_INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
PL_INLINE f32x16 min(f32x16 a, f32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
PL_INLINE f32x16 abs(f32x16 a) {
  __m256 m = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(m, a.lo), _mm256_andnot_ps(m, a.hi)};
}
PL_INLINE f32x16 round_even(f32x16 a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
PL_INLINE __m256 pow2_int(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
PL_INLINE f32x16 ldexp_int(f32x16 a, f32x16 n) {
  return {_mm256_mul_ps(a.lo, pow2_int(n.lo)), _mm256_mul_ps(a.hi, pow2_int(n.hi))};
}
PL_INLINE f32x16 keep_ge(f32x16 a, f32x16 x, f32x16 y) {
  return {_mm256_and_ps(a.lo, _mm256_cmp_ps(x.lo, y.lo, _CMP_GE_OQ)),
          _mm256_and_ps(a.hi, _mm256_cmp_ps(x.hi, y.hi, _CMP_GE_OQ))};
}
PL_INLINE f32x16 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
PL_INLINE void store_f16(uint16_t* p, f32x16 a) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
PL_INLINE __m256 bf16_half(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
PL_INLINE f32x16 load_bf16(const uint16_t* p) { return {bf16_half(p), bf16_half(p + 8)}; }
PL_INLINE void store_i8(int8_t* p, f32x16 a) {
  __m256i m = _mm256_set1_epi32(-127);
  __m256i lo = _mm256_max_epi32(_mm256_cvtps_epi32(a.lo), m), hi = _mm256_max_epi32(_mm256_cvtps_epi32(a.hi), m);
  __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(lo, hi), 0xD8);  // 16 x i16 in order
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}

#elif defined(PL_ISA_neon)
struct f32x16 {
  float32x4_t v[4];
};
#define PL_EACH4(expr)                         \
  f32x16 r;                                    \
  for (int i = 0; i < 4; i++) r.v[i] = (expr); \
  return r
PL_INLINE f32x16 load(const float* p) { PL_EACH4(vld1q_f32(p + 4 * i)); }
PL_INLINE void store(float* p, f32x16 a) {
  for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.v[i]);
}
PL_INLINE f32x16 set1(float x) { PL_EACH4(vdupq_n_f32(x)); }
PL_INLINE f32x16 add(f32x16 a, f32x16 b) { PL_EACH4(vaddq_f32(a.v[i], b.v[i])); }
PL_INLINE f32x16 sub(f32x16 a, f32x16 b) { PL_EACH4(vsubq_f32(a.v[i], b.v[i])); }
PL_INLINE f32x16 mul(f32x16 a, f32x16 b) { PL_EACH4(vmulq_f32(a.v[i], b.v[i])); }
PL_INLINE f32x16 div(f32x16 a, f32x16 b) { PL_EACH4(vdivq_f32(a.v[i], b.v[i])); }
PL_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { PL_EACH4(vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
// As x86: the second operand where either is NaN.
PL_INLINE f32x16 max(f32x16 a, f32x16 b) { PL_EACH4(vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
PL_INLINE f32x16 min(f32x16 a, f32x16 b) { PL_EACH4(vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
PL_INLINE f32x16 abs(f32x16 a) { PL_EACH4(vabsq_f32(a.v[i])); }
PL_INLINE f32x16 round_even(f32x16 a) { PL_EACH4(vrndnq_f32(a.v[i])); }
PL_INLINE f32x16 ldexp_int(f32x16 a, f32x16 n) {
  PL_EACH4(
      vmulq_f32(a.v[i], vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23))));
}
PL_INLINE f32x16 keep_ge(f32x16 a, f32x16 x, f32x16 y) {
  PL_EACH4(vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a.v[i]), vcgeq_f32(x.v[i], y.v[i]))));
}
PL_INLINE f32x16 load_f16(const uint16_t* p) { PL_EACH4(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)))); }
PL_INLINE void store_f16(uint16_t* p, f32x16 a) {
  for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}
PL_INLINE f32x16 load_bf16(const uint16_t* p) { PL_EACH4(vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16))); }
PL_INLINE void store_i8(int8_t* p, f32x16 a) {
  int16x4_t w[4];
  for (int i = 0; i < 4; i++) w[i] = vqmovn_s32(vmaxq_s32(vcvtnq_s32_f32(a.v[i]), vdupq_n_s32(-127)));
  vst1_s8(p, vqmovn_s16(vcombine_s16(w[0], w[1])));
  vst1_s8(p + 8, vqmovn_s16(vcombine_s16(w[2], w[3])));
}

#else  // scalar: the readable definition of each operation
struct f32x16 {
  float v[16];
};
#define PL_EACH(expr)                           \
  f32x16 r;                                     \
  for (int i = 0; i < 16; i++) r.v[i] = (expr); \
  return r
PL_INLINE f32x16 load(const float* p) { PL_EACH(p[i]); }
PL_INLINE void store(float* p, f32x16 a) { std::memcpy(p, a.v, sizeof a.v); }
PL_INLINE f32x16 set1(float x) { PL_EACH(x); }
PL_INLINE f32x16 add(f32x16 a, f32x16 b) { PL_EACH(a.v[i] + b.v[i]); }
PL_INLINE f32x16 sub(f32x16 a, f32x16 b) { PL_EACH(a.v[i] - b.v[i]); }
PL_INLINE f32x16 mul(f32x16 a, f32x16 b) { PL_EACH(a.v[i] * b.v[i]); }
PL_INLINE f32x16 div(f32x16 a, f32x16 b) { PL_EACH(a.v[i] / b.v[i]); }
PL_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { PL_EACH(__builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
PL_INLINE f32x16 max(f32x16 a, f32x16 b) { PL_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
PL_INLINE f32x16 min(f32x16 a, f32x16 b) { PL_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
PL_INLINE f32x16 abs(f32x16 a) { PL_EACH(__builtin_fabsf(a.v[i])); }
PL_INLINE f32x16 round_even(f32x16 a) { PL_EACH(__builtin_nearbyintf(a.v[i])); }
PL_INLINE float pow2_int(float n) {
  uint32_t e = uint32_t(int(n) + 127) << 23;
  float f;
  std::memcpy(&f, &e, 4);
  return f;
}
PL_INLINE f32x16 ldexp_int(f32x16 a, f32x16 n) { PL_EACH(a.v[i] * pow2_int(n.v[i])); }
PL_INLINE f32x16 keep_ge(f32x16 a, f32x16 x, f32x16 y) { PL_EACH(x.v[i] >= y.v[i] ? a.v[i] : 0.0f); }
PL_INLINE float bits_f32(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
PL_INLINE float f16_f32(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 1023;
  if (e == 31) return bits_f32(sign | 0x7f800000 | m << 13 | (m ? 0x400000 : 0));
  if (e == 0) return bits_f32(sign) + (sign ? -1.0f : 1.0f) * float(m) * 0x1p-24f;
  return bits_f32(sign | (e + 112) << 23 | m << 13);
}
PL_INLINE uint16_t f32_f16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  uint32_t sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
  if (a > 0x7f800000) return uint16_t(sign | 0x7e00 | ((a >> 13) & 1023));
  if (a >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds past 65504
  if (a < 0x38800000) {                                 // subnormal: let the float adder round at 2^-24
    float r = bits_f32(a) + 0.5f;
    uint32_t v;
    std::memcpy(&v, &r, 4);
    return uint16_t(sign | (v - 0x3f000000));
  }
  uint32_t rounded = a + 0xfff + ((a >> 13) & 1);
  return uint16_t(sign | ((rounded - 0x38000000) >> 13));
}
PL_INLINE f32x16 load_f16(const uint16_t* p) { PL_EACH(f16_f32(p[i])); }
PL_INLINE void store_f16(uint16_t* p, f32x16 a) {
  for (int i = 0; i < 16; i++) p[i] = f32_f16(a.v[i]);
}
PL_INLINE f32x16 load_bf16(const uint16_t* p) { PL_EACH(bits_f32(uint32_t(p[i]) << 16)); }
PL_INLINE void store_i8(int8_t* p, f32x16 a) {
  for (int i = 0; i < 16; i++) {
    float r = __builtin_nearbyintf(a.v[i]);
    p[i] = int8_t(r > -127 ? (r < 127 ? r : 127) : -127);  // NaN, which no int8 stands for, is -127
  }
}
#endif

// Store as bfloat16, nearest even; NaN stays NaN.
PL_INLINE void store_bf16(uint16_t* p, f32x16 a) {
#if defined(PL_ISA_avx512) || defined(PL_ISA_avx512bf16)
  const __m512i u = _mm512_castps_si512(a.v), high = _mm512_srli_epi32(u, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i near = _mm512_add_epi32(_mm512_add_epi32(u, odd), _mm512_set1_epi32(0x7fff));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i bits = _mm512_mask_or_epi32(_mm512_srli_epi32(near, 16), is_nan, high, _mm512_set1_epi32(64));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(bits));
#else
  float f[16];
  store(f, a);
  for (int i = 0; i < 16; i++) {
    uint32_t u;
    std::memcpy(&u, f + i, 4);
    p[i] = (u & 0x7fffffff) > 0x7f800000 ? uint16_t(u >> 16 | 64) : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
#endif
}
// ((l0+l8)+(l4+l12)) + ((l2+l10)+(l6+l14)) + ...: halves are added until one is left, on every ISA.
#if defined(PL_ISA_avx2) || defined(PL_ISA_avx512) || defined(PL_ISA_avx512bf16)
PL_INLINE __m256 low_half(f32x16 a) {
#ifdef PL_ISA_avx2
  return a.lo;
#else
  return _mm512_castps512_ps256(a.v);
#endif
}
PL_INLINE __m256 high_half(f32x16 a) {
#ifdef PL_ISA_avx2
  return a.hi;
#else
  return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
#endif
}
PL_INLINE float reduce_add(f32x16 a) {
  __m256 v = _mm256_add_ps(low_half(a), high_half(a));
  __m128 w = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  w = _mm_add_ps(w, _mm_movehl_ps(w, w));
  return _mm_cvtss_f32(_mm_add_ss(w, _mm_movehdup_ps(w)));
}
PL_INLINE float reduce_max(f32x16 a) {
  __m256 v = _mm256_max_ps(low_half(a), high_half(a));
  __m128 w = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  w = _mm_max_ps(w, _mm_movehl_ps(w, w));
  return _mm_cvtss_f32(_mm_max_ss(w, _mm_movehdup_ps(w)));
}
#else
PL_INLINE float reduce_add(f32x16 a) {
  float f[16];
  store(f, a);
  for (int w = 8; w; w /= 2)
    for (int i = 0; i < w; i++) f[i] += f[i + w];
  return f[0];
}
PL_INLINE float reduce_max(f32x16 a) {
  float f[16];
  store(f, a);
  for (int w = 8; w; w /= 2)
    for (int i = 0; i < w; i++) f[i] = f[i] > f[i + w] ? f[i] : f[i + w];
  return f[0];
}
#endif
// e^x within 2 ulp; 0 below -87.3, 2^127-scaled saturation above 88. exp(0) is exactly 1.
PL_INLINE f32x16 exp(f32x16 x) {
  f32x16 c = min(max(x, set1(-87.33654f)), set1(88.0f));
  f32x16 n = round_even(mul(c, set1(1.44269504f)));
  f32x16 r = fma(n, set1(-0.693145752f), c);
  r = fma(n, set1(-1.42860677e-6f), r);
  f32x16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(mul(r, r), p, r), set1(1.0f));
  return keep_ge(ldexp_int(p, n), x, set1(-87.33654f));
}
// tanh(x) = 1 - 2 / (e^2x + 1).
PL_INLINE f32x16 tanh(f32x16 x) { return sub(set1(1.0f), div(set1(2.0f), add(exp(mul(x, set1(2.0f))), set1(1.0f)))); }

}  // namespace paceline::PL_ISA
