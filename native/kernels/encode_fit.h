// The search for a group's scale, and its minimum, that leave the least squared error once every weight is rounded to
// the nearest code. Candidates stretch the group's range over n codes, n from few to slightly too many (outliers are
// then cut); the best one is refined by least squares over its own codes, and kept where that helps. So weights that
// lie on a grid of the format already are found again exactly.
#pragma once
#include "kernels/linear_layout.h"
#include "simd.h"

namespace paceline::PL_ISA {

struct Group {  // n weights, a multiple of 16, and how much the error of each counts
  const float *w, *importance;
  int n;
};
struct Codes {
  float low, high;
};
struct Fit {  // w is about d * code + m
  float d = 0, m = 0, error = 0;
};
struct Range {
  float low, high;
};

constexpr int kMaxCandidates = 96;

PL_INLINE f32x16 clamp(f32x16 x, Codes c) { return min(max(x, set1(c.low)), set1(c.high)); }
PL_INLINE float inverse(float d) { return d != 0 ? 1.0f / d : 0.0f; }

// The sixteen values as float16 has them; those out of its range become infinite.
PL_INLINE void as_f16(float* x) {
  uint16_t half[16];
  store_f16(half, load(x));
  store(x, load_f16(half));
}
PL_INLINE float as_f16(float x, uint8_t* field) {
  float lanes[16];
  uint16_t half[16];
  store_f16(half, set1(x));
  store(lanes, load_f16(half));
  if (field) std::memcpy(field, half, 2);
  return lanes[0];
}
// As float16, but where that has few bits left (below 2^-14) no smaller than x: the largest code must reach.
PL_INLINE float as_f16_reaching(float x, uint8_t* field) {
  const float held = as_f16(x, field), least = 0x1p-24f;
  if (__builtin_fabsf(held) >= __builtin_fabsf(x) * 0.99609375f) return held;
  return as_f16(x < 0 ? x - least : x + least, field);
}
PL_INLINE bool is_usable(float d) { return d != 0 && __builtin_fabsf(d) <= 65504.0f; }

PL_INLINE Range range_of(const Group& g) {
  f32x16 high = load(g.w), low = high;
  for (int i = 16; i < g.n; i += 16) {
    high = max(high, load(g.w + i));
    low = min(low, load(g.w + i));
  }
  return {-reduce_max(sub(set1(0.0f), low)), reduce_max(high)};
}

PL_INLINE f32x16 codes_at(const Group& g, int i, float d_inverse, float m, Codes c) {
  return clamp(round_even(mul(sub(load(g.w + i), set1(m)), set1(d_inverse))), c);
}

// The weighted squared error of the group's nearest codes.
PL_INLINE float error_of(const Group& g, float d, float m, Codes c) {
  const float by = inverse(d);
  f32x16 sum = set1(0.0f);
  for (int i = 0; i < g.n; i += 16) {
    const f32x16 value = add(mul(set1(d), codes_at(g, i, by, m, c)), set1(m)), off = sub(load(g.w + i), value);
    sum = fma(mul(off, off), load(g.importance + i), sum);
  }
  return reduce_add(sum);
}

struct Moments {  // importance-weighted sums over a group
  float s, q, qq, w, qw;
};
PL_INLINE Moments moments_of(const Group& g, float d, float m, Codes c) {
  const float by = inverse(d);
  f32x16 s = set1(0.0f), q = s, qq = s, w = s, qw = s;
  for (int i = 0; i < g.n; i += 16) {
    const f32x16 code = codes_at(g, i, by, m, c), h = load(g.importance + i), hq = mul(h, code), x = load(g.w + i);
    s = add(s, h);
    q = add(q, hq);
    qq = fma(hq, code, qq);
    w = fma(h, x, w);
    qw = fma(hq, x, qw);
  }
  return {reduce_add(s), reduce_add(q), reduce_add(qq), reduce_add(w), reduce_add(qw)};
}

PL_INLINE void keep_better(Fit& best, float error, float d, float m) {
  if (error < best.error) best = {d, m, error};
}

// Codes to stretch a range over: whole numbers, then a few with which its ends are cut off. `few` leaves out the small
// ones, which only weights on a grid need; with 8 bits a span is never far from all of them.
PL_INLINE int spans(int codes, bool few, float* out) {
  int n = 0;
  for (; codes >= 127 && n < 3; n++) out[n] = float(codes - n);
  if (n > 0) return n;
  for (int span = codes; span >= (few ? codes - codes / 3 : 1); span--) out[n++] = float(span);
  for (int cut = 1; cut <= 6; cut++) out[n++] = float(codes) * (1.0f + 0.05f * float(cut));
  return n;
}

// d * code with code from c.low to c.high. d is a float16 where `is_half`.
PL_INLINE Fit fit_symmetric(const Group& g, Codes c, bool is_half, bool few) {
  const Range r = range_of(g);
  const float extreme = r.high > -r.low ? r.high : r.low;
  Fit best{0, 0, error_of(g, 0, 0, c)};
  if (extreme == 0) return best;
  float d[kMaxCandidates], n[kMaxCandidates / 2];
  int count = 0;
  const int num_spans = spans(int(-c.low), few, n);
  for (int i = 0; i < num_spans; i++) d[count++] = __builtin_fabsf(extreme) / n[i];
  for (int i = 0; c.low + c.high != 0 && i < num_spans; i++) d[count++] = -__builtin_fabsf(extreme) / n[i];
  d[count++] = is_half ? as_f16_reaching(__builtin_fabsf(extreme) / c.high, nullptr) : 0;
  const int padded = (count + 15) / 16 * 16;
  for (int i = count; i < padded; i++) d[i] = 0;
  for (int i = 0; is_half && i < padded; i += 16) as_f16(d + i);
  for (int i = 0; i < count; i++) {
    if (is_usable(d[i])) keep_better(best, error_of(g, d[i], 0, c), d[i], 0);
  }
  for (int round = 0; round < 2 && is_usable(best.d); round++) {
    const Moments s = moments_of(g, best.d, 0, c);
    if (s.qq <= 0) break;
    const float refined = is_half ? as_f16(s.qw / s.qq, nullptr) : s.qw / s.qq;
    if (is_usable(refined)) keep_better(best, error_of(g, refined, 0, c), refined, 0);
  }
  return best;
}

// The minimum for scale d with which `low` is a code, of those the one that float16 holds best.
PL_INLINE float half_minimum(float low, float d, Codes c, float span) {
  float best = 0, least = -1;
  const int room = int(c.high - c.low - span);
  for (int begin = 0; begin <= room; begin += 16) {
    float wanted[16], held[16];
    for (int i = 0; i < 16; i++) held[i] = wanted[i] = low - d * (c.low + float(begin + i));
    as_f16(held);
    for (int i = 0; i < 16 && begin + i <= room; i++) {
      const float off = __builtin_fabsf(held[i] - wanted[i]);
      if (least < 0 || off < least) least = off, best = held[i];
    }
  }
  return best;
}

// Least squares over the codes of `best`; its minimum may be fixed.
PL_INLINE Fit refined(const Group& g, const Fit& best, Codes c, bool is_half) {
  const Moments s = moments_of(g, best.d, best.m, c);
  const float det = s.s * s.qq - s.q * s.q;
  if (det <= 0) return best;
  float d = (s.s * s.qw - s.q * s.w) / det, m = (s.w - d * s.q) / s.s;
  if (!is_half && m > 0) m = 0, d = s.qq > 0 ? s.qw / s.qq : 0;
  if (is_half) d = as_f16(d, nullptr), m = as_f16(m, nullptr);
  if (!is_usable(d) || !(__builtin_fabsf(m) <= 65504.0f)) return best;
  return {d, m, error_of(g, d, m, c)};
}

// d * code + m in float16 where `is_half`, else with d >= 0 and m <= 0 (what K-quants hold).
PL_INLINE Fit fit_affine(const Group& g, Codes c, bool is_half, bool few) {
  Range r = range_of(g);
  if (!is_half && r.low > 0) r.low = 0;
  if (!is_half && r.high < 0) r.high = 0;
  const float flat = is_half ? as_f16(r.low, nullptr) : r.low;
  Fit best{0, flat, error_of(g, 0, flat, c)};
  if (r.low == r.high) return best;
  float n[kMaxCandidates / 2];
  const int count = spans(int(c.high - c.low), few, n);
  for (int i = 0; i < count; i++) {
    const float exact = (r.high - r.low) / n[i];
    const float d = !is_half ? exact : i == 0 ? as_f16_reaching(exact, nullptr) : as_f16(exact, nullptr);
    if (!is_usable(d)) continue;
    const float over = n[i] - (c.high - c.low), cut = over > 0 ? 0.5f * over : 0;  // codes that miss, half at each end
    const float low = r.low + cut * d, span = over > 0 ? c.high - c.low : n[i];
    float m = is_half ? half_minimum(low, d, c, span) : low - c.low * d;
    if (!is_half && m > 0) m = 0;
    keep_better(best, error_of(g, d, m, c), d, m);
  }
  for (int round = 0; round < 2 && is_usable(best.d); round++) {
    const Fit better = refined(g, best, c, is_half);
    keep_better(best, better.error, better.d, better.m);
  }
  return best;
}

// Nearest codes, minus c.low, as bytes.
PL_INLINE void write_codes(const Group& g, float d, float m, Codes c, uint8_t* out) {
  const float by = inverse(d);
  for (int i = 0; i < g.n; i += 16) {
    float code[16];
    store(code, codes_at(g, i, by, m, c));
    for (int j = 0; j < 16; j++) out[i + j] = uint8_t(int(code[j] - c.low));
  }
}

}  // namespace paceline::PL_ISA
