// Integer vectors of the linear kernels: u8x64, one 64-byte block of quants, and i32x16, one value a lane of a panel.
// Exact on every ISA; what an ISA's multiply wants is said by kSignedZero (quants) and half_factor (scales).
#pragma once
#include "kernels/linear_layout.h"
#include "simd.h"

// Short loops over registers; the scalar kernels are read and compiled, not tuned.
#ifdef PL_ISA_scalar
#define PL_UNROLL
#else
#define PL_UNROLL _Pragma("GCC unroll 8")
#endif

namespace paceline::PL_ISA {

#if defined(PL_ISA_avx512) || defined(PL_ISA_avx512bf16)
struct u8x64 {
  __m512i v;
};
struct i32x16 {
  __m512i v;
};
constexpr int kSignedZero = 128;  // dpbusd wants unsigned quants: signed ones are stored with 128 added
PL_INLINE u8x64 load64(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
PL_INLINE void store64(uint8_t* p, u8x64 a) { _mm512_storeu_si512(p, a.v); }
PL_INLINE u8x64 mask(u8x64 a, int m) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(char(m)))}; }
PL_INLINE u8x64 join(u8x64 a, u8x64 b) { return {_mm512_or_si512(a.v, b.v)}; }
// Bits move n up (n > 0) or down inside 16-bit lanes; mask after.
PL_INLINE u8x64 shift(u8x64 a, int n) {
  return {n >= 0 ? _mm512_slli_epi16(a.v, unsigned(n)) : _mm512_srli_epi16(a.v, unsigned(-n))};
}
PL_INLINE u8x64 signed_quants(u8x64 a) { return {_mm512_xor_si512(a.v, _mm512_set1_epi8(-128))}; }
PL_INLINE u8x64 lookup(const int8_t* table, u8x64 index) {
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), index.v)};
}
PL_INLINE i32x16 widen_u8(const uint8_t* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
PL_INLINE i32x16 widen_i8(const uint8_t* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
PL_INLINE i32x16 set1_i32(int x) { return {_mm512_set1_epi32(x)}; }
PL_INLINE i32x16 add(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
PL_INLINE i32x16 mul(i32x16 a, i32x16 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
PL_INLINE i32x16 mask(i32x16 a, int m) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(m))}; }
PL_INLINE i32x16 join(i32x16 a, i32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
PL_INLINE i32x16 shift(i32x16 a, int n) {
  return {n >= 0 ? _mm512_slli_epi32(a.v, unsigned(n)) : _mm512_srli_epi32(a.v, unsigned(-n))};
}
PL_INLINE f32x16 to_float(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
PL_INLINE i32x16 as_lanes(u8x64 a) { return {a.v}; }
// acc += each lane's four quants of w times the four at x.
PL_INLINE i32x16 dot4(i32x16 acc, u8x64 w, const int8_t* x) {
  int four;
  std::memcpy(&four, x, 4);
  return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(four))};
}
// The same times four in every lane of x.
PL_INLINE i32x16 dot4(i32x16 acc, u8x64 w, i32x16 x) {
#ifdef PACELINE_SIMDE
  return {_mm512_dpbusd_epi32(acc.v, w.v, x.v)};
#else
  // Not the intrinsic: GCC 12 moves sums that it names to other registers and back, or to the stack where many live.
  asm("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(w.v), "v"(x.v));
  return acc;
#endif
}

#elif defined(PL_ISA_avx2)
struct u8x64 {
  __m256i lo, hi;
};
struct i32x16 {
  __m256i lo, hi;
};
constexpr int kSignedZero = 0;
PL_INLINE __m256i load32(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
PL_INLINE u8x64 load64(const uint8_t* p) { return {load32(p), load32(p + 32)}; }
PL_INLINE void store64(uint8_t* p, u8x64 a) {
  _mm256_storeu_si256((__m256i*)p, a.lo);
  _mm256_storeu_si256((__m256i*)(p + 32), a.hi);
}
PL_INLINE u8x64 mask(u8x64 a, int m) {
  const __m256i v = _mm256_set1_epi8(char(m));
  return {_mm256_and_si256(a.lo, v), _mm256_and_si256(a.hi, v)};
}
PL_INLINE u8x64 join(u8x64 a, u8x64 b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
PL_INLINE u8x64 shift(u8x64 a, int n) {
  if (n >= 0) return {_mm256_slli_epi16(a.lo, n), _mm256_slli_epi16(a.hi, n)};
  return {_mm256_srli_epi16(a.lo, -n), _mm256_srli_epi16(a.hi, -n)};
}
PL_INLINE u8x64 signed_quants(u8x64 a) { return a; }
PL_INLINE u8x64 lookup(const int8_t* table, u8x64 index) {
  const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return {_mm256_shuffle_epi8(t, index.lo), _mm256_shuffle_epi8(t, index.hi)};
}
PL_INLINE __m128i load8(const uint8_t* p) { return _mm_loadl_epi64((const __m128i*)p); }
PL_INLINE i32x16 widen_u8(const uint8_t* p) {
  return {_mm256_cvtepu8_epi32(load8(p)), _mm256_cvtepu8_epi32(load8(p + 8))};
}
PL_INLINE i32x16 widen_i8(const uint8_t* p) {
  return {_mm256_cvtepi8_epi32(load8(p)), _mm256_cvtepi8_epi32(load8(p + 8))};
}
PL_INLINE i32x16 set1_i32(int x) {
  const __m256i v = _mm256_set1_epi32(x);
  return {v, v};
}
PL_INLINE i32x16 add(i32x16 a, i32x16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
PL_INLINE i32x16 mask(i32x16 a, int m) {
  const __m256i v = _mm256_set1_epi32(m);
  return {_mm256_and_si256(a.lo, v), _mm256_and_si256(a.hi, v)};
}
PL_INLINE i32x16 join(i32x16 a, i32x16 b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
PL_INLINE i32x16 shift(i32x16 a, int n) {
  if (n >= 0) return {_mm256_slli_epi32(a.lo, n), _mm256_slli_epi32(a.hi, n)};
  return {_mm256_srli_epi32(a.lo, -n), _mm256_srli_epi32(a.hi, -n)};
}
PL_INLINE f32x16 to_float(i32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
PL_INLINE i32x16 as_lanes(u8x64 a) { return {a.lo, a.hi}; }
PL_INLINE __m256i broadcast4(const void* p) {
  int four;
  std::memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}
PL_INLINE i32x16 madd(i32x16 a, i32x16 b) { return {_mm256_madd_epi16(a.lo, b.lo), _mm256_madd_epi16(a.hi, b.hi)}; }
PL_INLINE i32x16 madd(i32x16 a, __m256i b) { return {_mm256_madd_epi16(a.lo, b), _mm256_madd_epi16(a.hi, b)}; }
PL_INLINE i32x16 add16(i32x16 a, i32x16 b) { return {_mm256_add_epi16(a.lo, b.lo), _mm256_add_epi16(a.hi, b.hi)}; }
// The compiler may not touch the sum until here: GCC 12 reassociates chains of adds, and then spills all their terms.
PL_INLINE void settle(i32x16& a) { asm volatile("" : "+x"(a.lo), "+x"(a.hi)); }
// Pairs of products as 16-bit lanes: unsigned quants of at most 7 bits, or signed ones.
PL_INLINE i32x16 pairs_unsigned(u8x64 w, __m256i x) {
  return {_mm256_maddubs_epi16(w.lo, x), _mm256_maddubs_epi16(w.hi, x)};
}
PL_INLINE i32x16 pairs_signed(u8x64 w, u8x64 w_abs, __m256i x) {
  return {_mm256_maddubs_epi16(w_abs.lo, _mm256_sign_epi8(x, w.lo)),
          _mm256_maddubs_epi16(w_abs.hi, _mm256_sign_epi8(x, w.hi))};
}
PL_INLINE u8x64 abs_quants(u8x64 w) { return {_mm256_abs_epi8(w.lo), _mm256_abs_epi8(w.hi)}; }
// The factor of a half for madd: the same 16 bits twice in a lane.
PL_INLINE i32x16 half_factor(i32x16 a) {
  const __m256i index =
      _mm256_set_epi64x(0x0d0c0d0c09080908, 0x0504050401000100, 0x0d0c0d0c09080908, 0x0504050401000100);
  return {_mm256_shuffle_epi8(a.lo, index), _mm256_shuffle_epi8(a.hi, index)};
}
// The factors of both halves in the two 16-bit lanes, times `by`.
PL_INLINE i32x16 both_halves(const i32x16* factor, int by) {
  const __m256i v = _mm256_set1_epi16(int16_t(by));
  const __m256i lo = _mm256_blend_epi16(factor[0].lo, factor[1].lo, 0xaa),
                hi = _mm256_blend_epi16(factor[0].hi, factor[1].hi, 0xaa);
  return {_mm256_mullo_epi16(lo, v), _mm256_mullo_epi16(hi, v)};
}

#elif defined(PL_ISA_neon)
struct u8x64 {
  uint8x16_t v[4];
};
struct i32x16 {
  int32x4_t v[4];
};
constexpr int kSignedZero = 0;
#define PL_QUARTERS(type, expr)                \
  type r;                                      \
  for (int i = 0; i < 4; i++) r.v[i] = (expr); \
  return r
PL_INLINE u8x64 load64(const uint8_t* p) { PL_QUARTERS(u8x64, vld1q_u8(p + 16 * i)); }
PL_INLINE void store64(uint8_t* p, u8x64 a) {
  for (int i = 0; i < 4; i++) vst1q_u8(p + 16 * i, a.v[i]);
}
PL_INLINE u8x64 mask(u8x64 a, int m) { PL_QUARTERS(u8x64, vandq_u8(a.v[i], vdupq_n_u8(uint8_t(m)))); }
PL_INLINE u8x64 join(u8x64 a, u8x64 b) { PL_QUARTERS(u8x64, vorrq_u8(a.v[i], b.v[i])); }
PL_INLINE u8x64 shift(u8x64 a, int n) { PL_QUARTERS(u8x64, vshlq_u8(a.v[i], vdupq_n_s8(int8_t(n)))); }
PL_INLINE u8x64 signed_quants(u8x64 a) { return a; }
PL_INLINE u8x64 lookup(const int8_t* table, u8x64 index) {
  PL_QUARTERS(u8x64, vreinterpretq_u8_s8(vqtbl1q_s8(vld1q_s8(table), index.v[i])));
}
PL_INLINE int32x4_t widen4(const uint8_t* p, bool is_signed) {
  uint32_t four;
  std::memcpy(&four, p, 4);
  const uint8x8_t b = vcreate_u8(four);
  return is_signed ? vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(b))))
                   : vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(b))));
}
PL_INLINE i32x16 widen_u8(const uint8_t* p) { PL_QUARTERS(i32x16, widen4(p + 4 * i, false)); }
PL_INLINE i32x16 widen_i8(const uint8_t* p) { PL_QUARTERS(i32x16, widen4(p + 4 * i, true)); }
PL_INLINE i32x16 set1_i32(int x) { PL_QUARTERS(i32x16, vdupq_n_s32(x)); }
PL_INLINE i32x16 add(i32x16 a, i32x16 b) { PL_QUARTERS(i32x16, vaddq_s32(a.v[i], b.v[i])); }
PL_INLINE i32x16 mul(i32x16 a, i32x16 b) { PL_QUARTERS(i32x16, vmulq_s32(a.v[i], b.v[i])); }
PL_INLINE i32x16 mask(i32x16 a, int m) { PL_QUARTERS(i32x16, vandq_s32(a.v[i], vdupq_n_s32(m))); }
PL_INLINE i32x16 join(i32x16 a, i32x16 b) { PL_QUARTERS(i32x16, vorrq_s32(a.v[i], b.v[i])); }
PL_INLINE i32x16 shift(i32x16 a, int n) {
  PL_QUARTERS(i32x16, vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a.v[i]), vdupq_n_s32(n))));
}
PL_INLINE f32x16 to_float(i32x16 a) { PL_QUARTERS(f32x16, vcvtq_f32_s32(a.v[i])); }
PL_INLINE i32x16 as_lanes(u8x64 a) { PL_QUARTERS(i32x16, vreinterpretq_s32_u8(a.v[i])); }
PL_INLINE i32x16 dot4(i32x16 acc, u8x64 w, const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  const int8x16_t b = vreinterpretq_s8_s32(vdupq_n_s32(four));
  PL_QUARTERS(i32x16, vdotq_s32(acc.v[i], vreinterpretq_s8_u8(w.v[i]), b));
}
#undef PL_QUARTERS

#else
struct u8x64 {
  uint8_t v[64];
};
struct i32x16 {
  int32_t v[16];
};
constexpr int kSignedZero = 0;
#define PL_ALL(type, n, expr)                  \
  type r;                                      \
  for (int i = 0; i < n; i++) r.v[i] = (expr); \
  return r
PL_INLINE u8x64 load64(const uint8_t* p) { PL_ALL(u8x64, 64, p[i]); }
PL_INLINE void store64(uint8_t* p, u8x64 a) { std::memcpy(p, a.v, 64); }
PL_INLINE u8x64 mask(u8x64 a, int m) { PL_ALL(u8x64, 64, uint8_t(a.v[i] & m)); }
PL_INLINE u8x64 join(u8x64 a, u8x64 b) { PL_ALL(u8x64, 64, uint8_t(a.v[i] | b.v[i])); }
PL_INLINE u8x64 shift(u8x64 a, int n) { PL_ALL(u8x64, 64, uint8_t(n >= 0 ? a.v[i] << n : a.v[i] >> -n)); }
PL_INLINE u8x64 signed_quants(u8x64 a) { return a; }
PL_INLINE u8x64 lookup(const int8_t* table, u8x64 index) { PL_ALL(u8x64, 64, uint8_t(table[index.v[i]])); }
PL_INLINE i32x16 widen_u8(const uint8_t* p) { PL_ALL(i32x16, 16, p[i]); }
PL_INLINE i32x16 widen_i8(const uint8_t* p) { PL_ALL(i32x16, 16, int8_t(p[i])); }
PL_INLINE i32x16 set1_i32(int x) { PL_ALL(i32x16, 16, x); }
PL_INLINE i32x16 add(i32x16 a, i32x16 b) { PL_ALL(i32x16, 16, a.v[i] + b.v[i]); }
PL_INLINE i32x16 mul(i32x16 a, i32x16 b) { PL_ALL(i32x16, 16, a.v[i] * b.v[i]); }
PL_INLINE i32x16 mask(i32x16 a, int m) { PL_ALL(i32x16, 16, a.v[i] & m); }
PL_INLINE i32x16 join(i32x16 a, i32x16 b) { PL_ALL(i32x16, 16, a.v[i] | b.v[i]); }
PL_INLINE i32x16 shift(i32x16 a, int n) {
  PL_ALL(i32x16, 16, n >= 0 ? int32_t(uint32_t(a.v[i]) << n) : int32_t(uint32_t(a.v[i]) >> -n));
}
PL_INLINE f32x16 to_float(i32x16 a) { PL_ALL(f32x16, 16, float(a.v[i])); }
PL_INLINE i32x16 as_lanes(u8x64 a) {
  i32x16 r;
  std::memcpy(&r, &a, sizeof r);
  return r;
}
PL_INLINE i32x16 dot4(i32x16 acc, u8x64 w, const int8_t* x) {
  for (int i = 0; i < 64; i++) acc.v[i / 4] += int8_t(w.v[i]) * x[i % 4];
  return acc;
}
#undef PL_ALL
#endif

// Element `odd` (0 or 1) of each lane's pair of bfloat16.
PL_INLINE f32x16 load_bf16_pair(const uint16_t* p, int odd) {
#if defined(PL_ISA_avx512) || defined(PL_ISA_avx512bf16)
  const i32x16 v{_mm512_loadu_si512(p)}, f = odd ? mask(v, int(0xffff0000)) : shift(v, 16);
  return {_mm512_castsi512_ps(f.v)};
#elif defined(PL_ISA_avx2)
  const i32x16 v{load32(p), load32(p + 16)}, f = odd ? mask(v, int(0xffff0000)) : shift(v, 16);
  return {_mm256_castsi256_ps(f.lo), _mm256_castsi256_ps(f.hi)};
#elif defined(PL_ISA_neon)
  f32x16 r;
  for (int i = 0; i < 4; i++) {
    const uint32x4_t v = vreinterpretq_u32_u16(vld1q_u16(p + 8 * i));
    r.v[i] = vreinterpretq_f32_u32(odd ? vandq_u32(v, vdupq_n_u32(0xffff0000)) : vshlq_n_u32(v, 16));
  }
  return r;
#else
  f32x16 r;
  for (int i = 0; i < 16; i++) r.v[i] = bits_f32(uint32_t(p[2 * i + odd]) << 16);
  return r;
#endif
}
#if !defined(PL_ISA_avx2)
PL_INLINE i32x16 half_factor(i32x16 a) { return a; }
#endif
// The low `bits` bits of each lane as a signed number.
PL_INLINE i32x16 sign_extended(i32x16 a, int bits) {
  const int half = 1 << (bits - 1);
  return add(mask(add(a, set1_i32(half)), 2 * half - 1), set1_i32(-half));
}

}  // namespace paceline::PL_ISA
