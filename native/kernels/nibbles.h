// Numbers of 4 bits and the int8 codes that they stand for: code = base + step * nibble. KVLayout says where they lie.
#pragma once
#include "rows.h"

namespace paceline::PL_ISA {

constexpr int kMaxNibble = 15, kMaxCode = 127;

#if defined(PL_ISA_avx2) || defined(PL_ISA_avx512) || defined(PL_ISA_avx512bf16)
struct Steps {  // step and base of sixteen lanes, side by side
  __m256i v;
};
PL_INLINE Steps load_steps(const uint8_t* step, const uint8_t* base) {
  const __m128i s = _mm_loadu_si128((const __m128i*)step), b = _mm_loadu_si128((const __m128i*)base);
  return {_mm256_set_m128i(_mm_unpackhi_epi8(s, b), _mm_unpacklo_epi8(s, b))};
}
PL_INLINE Steps same_steps(uint8_t step, uint8_t base) { return {_mm256_set1_epi16(short(step | base << 8))}; }
template <int shift>
PL_INLINE __m256i widen_nibbles(const uint8_t* p, Steps s) {
  const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
  const __m256i nibbles = _mm256_and_si256(_mm256_srli_epi16(bytes, shift), _mm256_set1_epi16(15));
  return _mm256_maddubs_epi16(_mm256_or_si256(nibbles, _mm256_set1_epi16(0x100)), s.v);
}
// to[2 * lane] and to[2 * lane + 1]: codes of sixteen nibbles of a and of b, of bits 4 to 7 where a shift is 4.
template <int shift_a, int shift_b>
PL_INLINE void pair_codes(const uint8_t* a, Steps steps_a, const uint8_t* b, Steps steps_b, int8_t* to) {
  const __m256i low = _mm256_and_si256(widen_nibbles<shift_a>(a, steps_a), _mm256_set1_epi16(255));
  const __m256i high = _mm256_slli_epi16(widen_nibbles<shift_b>(b, steps_b), 8);
  _mm256_storeu_si256((__m256i*)to, _mm256_or_si256(low, high));
}

#else
struct Steps {
  uint8_t step[16], base[16];
};
PL_INLINE Steps load_steps(const uint8_t* step, const uint8_t* base) {
  Steps s;
  std::memcpy(s.step, step, 16);
  std::memcpy(s.base, base, 16);
  return s;
}
PL_INLINE Steps same_steps(uint8_t step, uint8_t base) {
  Steps s;
  std::memset(s.step, step, 16);
  std::memset(s.base, base, 16);
  return s;
}
// Modulo 256, as what lies in a slot without a token may be anything.
template <int shift_a, int shift_b>
PL_INLINE void pair_codes(const uint8_t* a, Steps steps_a, const uint8_t* b, Steps steps_b, int8_t* to) {
  for (int i = 0; i < 16; i++) {
    to[2 * i] = int8_t(uint8_t(steps_a.base[i] + steps_a.step[i] * (a[i] >> shift_a & 15)));
    to[2 * i + 1] = int8_t(uint8_t(steps_b.base[i] + steps_b.step[i] * (b[i] >> shift_b & 15)));
  }
}
#endif

// Nibbles of n <= 32 codes, given as floats in [-127, 127] with room for 32, and their step and base.
inline void choose_nibbles(float* codes, int n, int8_t* nibbles, uint8_t* step, uint8_t* base) {
  for (int i = n; i < kNibbleGroup; i++) codes[i] = codes[0];
  const f32x16 a = load(codes), b = load(codes + 16), zero = set1(0.0f);
  const float high = max_lane(max(a, b)), low = -max_lane(max(sub(zero, a), sub(zero, b)));
  const float width = (high - low) * 0.0625f;  // half a step is cut off at both ends
  int s = max_int(int(width), 1);
  if (float(s) < width) s++;
  const float least = __builtin_nearbyintf(0.5f * (low + high) - 7.5f * float(s));
  const int first = max_int(min_int(int(least), kMaxCode - kMaxNibble * s), -kMaxCode);
  const f32x16 inverse = set1(1.0f / float(s)), shift = set1(float(first)), top = set1(float(kMaxNibble));
  store_i8(nibbles, max(min(mul(sub(a, shift), inverse), top), zero));
  store_i8(nibbles + 16, max(min(mul(sub(b, shift), inverse), top), zero));
  *step = uint8_t(s);
  *base = uint8_t(first);
}

}  // namespace paceline::PL_ISA
