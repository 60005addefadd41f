// Tiles: T activation rows times one panel of sixteen outputs, or a pair of panels, along all of K.
// For a group g of 32 (ia, im exact integers over the group; xs, xsum the scale and sum of the row's group):
//   ia   plain, min: sum (q - zero) * xq        halves: sum over halves h of scale_h * sum (q - zero) * xq
//   acc  = fma(ia, d * xs, acc)
//   min         acc = fma(m, xsum, acc)
//   halves_min  acc = fma(im, -dmin * xs, acc)  im = sum over halves of min_h * sum xq
// in this order, one rounding each, whatever T, source and ISA are: so a row's bits never depend on them.
#pragma once
#include "kernels/linear_source.h"

namespace paceline::PL_ISA {

struct TileArgs {
  const uint8_t* weight;  // packed panel, or what unpack_panel made of it
  int k;
  const uint8_t* x;  // first row
  size_t x_stride;
  uint8_t* out;  // first row, column of the panel's first output
  size_t out_stride;
  const float* bias;        // of the panel's first output, or null
  const uint8_t* residual;  // like out, or null
  size_t residual_stride;
  int lanes;  // outputs that exist, 1 to 16; of a pair of panels 17 to 32
  // Of a pair of panels: bytes from the first one to the second, and the scales of both, one after the other.
  size_t panel_bytes = 0;
  const uint8_t* scales = nullptr;
};
using Tile = void (*)(const TileArgs&);

// out = (acc + bias) + residual
PL_INLINE void finish(const TileArgs& a, int t, f32x16 acc) {
  float* out = (float*)(a.out + t * a.out_stride);
  const float* residual = a.residual ? (const float*)(a.residual + t * a.residual_stride) : nullptr;
  if (a.lanes >= kPanel) {
    if (a.bias) acc = add(acc, load(a.bias));
    if (residual) acc = add(acc, load(residual));
    store(out, acc);
    return;
  }
  float lane[16];
  store(lane, acc);
  for (int i = 0; i < a.lanes; i++) {
    if (a.bias) lane[i] += a.bias[i];
    if (residual) lane[i] += residual[i];
    out[i] = lane[i];
  }
}

struct Q8Rows {  // T rows of q8
  const uint8_t* data;
  size_t stride, scales, sums, half_sums;  // offsets in a row
  PL_INLINE Q8Rows(const TileArgs& a)
      : data(a.x),
        stride(a.x_stride),
        scales(q8_padded(a.k)),
        sums(scales + scales / 8),
        half_sums(sums + scales / 8) {}
  PL_INLINE const int8_t* q(int t, int g) const { return (const int8_t*)(data + t * stride + size_t(g) * 32); }
  PL_INLINE float scale(int t, int g) const { return *(const float*)(data + t * stride + scales + size_t(g) * 4); }
  PL_INLINE float sum(int t, int g) const { return *(const float*)(data + t * stride + sums + size_t(g) * 4); }
  PL_INLINE const int16_t* half_sum(int t, int g) const {
    return (const int16_t*)(data + t * stride + half_sums + size_t(g) * 4);
  }
};

constexpr int kPairRows = 6;  // rows times two panels: 24 sums, half of them of a group, and what is multiplied
#if defined(PL_ISA_avx512) || defined(PL_ISA_avx512bf16)
constexpr bool kHasPairs = true;
#else
constexpr bool kHasPairs = false;
#endif

#if defined(PL_ISA_avx2)
constexpr int kTileRows = 4;

// Blocks whose 16-bit pair sums cannot overflow: 2 * 127 * (2^bits - 1) a block.
constexpr int blocks_in_16_bits(int bits) { return bits == 6 ? 2 : bits == 5 ? 4 : bits == 8 ? 1 : 8; }

template <int T, class Source, class S>
PL_INLINE void dot_group(const Source& w, const Q8Rows& x, int g, const S& s, i32x16 (&ia)[T]) {
  using shape = typename Source::shape;
  constexpr int limit = blocks_in_16_bits(shape::bits), span = shape::has_halves && limit > 4 ? 4 : limit;
  const i32x16 ones{_mm256_set1_epi16(1), _mm256_set1_epi16(1)};
  PL_UNROLL
  for (int begin = 0; begin < 8; begin += span) {
    i32x16 pairs[T];
    PL_UNROLL
    for (int j = begin; j < begin + span; j++) {
      const u8x64 block = w.block(g, j);
      PL_UNROLL
      for (int t = 0; t < T; t++) {
        const __m256i four = broadcast4(x.q(t, g) + 4 * j);
        i32x16 p;
        if constexpr (shape::bits == 8)
          p = pairs_signed(block, abs_quants(block), four);
        else
          p = pairs_unsigned(block, four);
        pairs[t] = j == begin ? p : add16(pairs[t], p);
        settle(pairs[t]);
      }
    }
    PL_UNROLL
    for (int t = 0; t < T; t++) {
      i32x16 p;
      if constexpr (shape::has_halves)
        p = madd(pairs[t], s.scale[begin / 4]);
      else
        p = madd(pairs[t], ones);
      ia[t] = begin == 0 ? p : add(ia[t], p);
      settle(ia[t]);
    }
  }
  if constexpr (shape::zero != 0) {
    i32x16 factor{_mm256_set1_epi16(-shape::zero), _mm256_set1_epi16(-shape::zero)};
    if constexpr (shape::has_halves) factor = both_halves(s.scale, -shape::zero);
    PL_UNROLL
    for (int t = 0; t < T; t++) ia[t] = add(ia[t], madd(factor, broadcast4(x.half_sum(t, g))));
  }
}

template <class S>
PL_INLINE i32x16 dot_min(const Q8Rows& x, int t, int g, const S& s) {
  return madd(both_halves(s.min, 1), broadcast4(x.half_sum(t, g)));
}

#else
#if defined(PL_ISA_avx512) || defined(PL_ISA_avx512bf16)
constexpr int kTileRows = 8;
#elif defined(PL_ISA_neon)
constexpr int kTileRows = 4;
#else
constexpr int kTileRows = 1;
#endif

template <int T, class Source, class S>
PL_INLINE void dot_group(const Source& w, const Q8Rows& x, int g, const S& s, i32x16 (&ia)[T]) {
  using shape = typename Source::shape;
  constexpr int parts = shape::has_halves ? 2 : 1, blocks = 8 / parts;
  PL_UNROLL
  for (int part = 0; part < parts; part++) {
    i32x16 sum[T];
    PL_UNROLL
    for (int t = 0; t < T; t++) {
      const int16_t* h = x.half_sum(t, g);
      sum[t] = set1_i32(shape::zero == 0 ? 0 : -shape::zero * (parts == 2 ? h[part] : h[0] + h[1]));
    }
    PL_UNROLL
    for (int j = part * blocks; j < (part + 1) * blocks; j++) {
      const u8x64 block = w.block(g, j);
      PL_UNROLL
      for (int t = 0; t < T; t++) sum[t] = dot4(sum[t], block, x.q(t, g) + 4 * j);
    }
    PL_UNROLL
    for (int t = 0; t < T; t++) {
      if constexpr (shape::has_halves) sum[t] = mul(sum[t], s.scale[part]);
      ia[t] = part == 0 ? sum[t] : add(ia[t], sum[t]);
    }
  }
}

template <class S>
PL_INLINE i32x16 dot_min(const Q8Rows& x, int t, int g, const S& s) {
  const int16_t* h = x.half_sum(t, g);
  return add(mul(s.min[0], set1_i32(h[0])), mul(s.min[1], set1_i32(h[1])));
}
#endif

// acc += the group's integers, scaled
template <class shape, class S>
PL_INLINE void add_group(const Q8Rows& x, int t, int g, const S& s, i32x16 ia, f32x16& acc) {
  const f32x16 xs = set1(x.scale(t, g));
  acc = fma(to_float(ia), mul(s.d, xs), acc);
  if constexpr (shape::scaling == Scaling::min) acc = fma(s.m, set1(x.sum(t, g)), acc);
  if constexpr (shape::scaling == Scaling::halves_min) acc = fma(to_float(dot_min(x, t, g, s)), mul(s.m, xs), acc);
}

template <class Source, int T>
void quant_tile(const TileArgs& a) {
  using shape = typename Source::shape;
  const int groups = a.k / kGroup;
  Source w(a.weight, groups);
  const Q8Rows x(a);
  f32x16 acc[T];
  PL_UNROLL
  for (int t = 0; t < T; t++) acc[t] = set1(0.0f);
  for (int g = 0; g < groups; g++) {
    w.fetch_ahead(g);
    const auto& s = w.scales_of(g);
    i32x16 ia[T];
    dot_group<T>(w, x, g, s, ia);
    PL_UNROLL
    for (int t = 0; t < T; t++) add_group<shape>(x, t, g, s, ia[t], acc[t]);
  }
  PL_UNROLL
  for (int t = 0; t < T; t++) finish(a, t, acc[t]);
}

#if defined(PL_ISA_avx512) || defined(PL_ISA_avx512bf16)
// kPairRows rows times two panels: what is broadcast of a row meets both.
template <Format f>
void pair_tile(const TileArgs& a) {
  using Source = Scaled<f>;
  using shape = typename Source::shape;
  constexpr int T = kPairRows, parts = shape::has_halves ? 2 : 1, blocks = 8 / parts;
  const int groups = a.k / kGroup;
  const auto* scales = (const Scales<shape::scaling>*)a.scales;
  const Source w[2] = {{a.weight, scales}, {a.weight + a.panel_bytes, scales + groups}};
  const Q8Rows x(a);
  f32x16 acc[2][T];
  PL_UNROLL
  for (int t = 0; t < T; t++) acc[0][t] = acc[1][t] = set1(0.0f);
  for (int g = 0; g < groups; g++) {
    i32x16 ia[2][T];
    PL_UNROLL
    for (int part = 0; part < parts; part++) {
      i32x16 sum[2][T];
      PL_UNROLL
      for (int t = 0; t < T; t++) {
        const int16_t* h = x.half_sum(t, g);
        sum[0][t] = set1_i32(shape::zero == 0 ? 0 : -shape::zero * (parts == 2 ? h[part] : h[0] + h[1]));
        sum[1][t] = sum[0][t];
      }
      PL_UNROLL
      for (int j = part * blocks; j < (part + 1) * blocks; j++) {
        const u8x64 first = w[0].block(g, j), second = w[1].block(g, j);
        PL_UNROLL
        for (int t = 0; t < T; t++) {
          int four;
          std::memcpy(&four, x.q(t, g) + 4 * j, 4);
          const i32x16 wide = set1_i32(four);
          sum[0][t] = dot4(sum[0][t], first, wide);
          sum[1][t] = dot4(sum[1][t], second, wide);
        }
      }
      PL_UNROLL
      for (int p = 0; p < 2; p++) {
        PL_UNROLL
        for (int t = 0; t < T; t++) {
          if constexpr (shape::has_halves) sum[p][t] = mul(sum[p][t], w[p].scales_of(g).scale[part]);
          ia[p][t] = part == 0 ? sum[p][t] : add(ia[p][t], sum[p][t]);
        }
      }
    }
    PL_UNROLL
    for (int p = 0; p < 2; p++) {
      const auto& s = w[p].scales_of(g);
      PL_UNROLL
      for (int t = 0; t < T; t++) add_group<shape>(x, t, g, s, ia[p][t], acc[p][t]);
    }
  }
  TileArgs second = a;
  second.out += kPanel * sizeof(float);
  if (second.bias) second.bias += kPanel;
  if (second.residual) second.residual += kPanel * sizeof(float);
  second.lanes -= kPanel;
  PL_UNROLL
  for (int t = 0; t < T; t++) {
    finish(a, t, acc[0][t]);
    finish(second, t, acc[1][t]);
  }
}
#endif

// ---- float weights: acc = fma(w, x, acc) along k -------------------------------------------------------------------
template <Format f, int T>
void float_tile(const TileArgs& a) {
  f32x16 acc[T];
  PL_UNROLL
  for (int t = 0; t < T; t++) acc[t] = set1(0.0f);
  auto step = [&](f32x16 w, int k) __attribute__((always_inline)) {
    PL_UNROLL
    for (int t = 0; t < T; t++) acc[t] = fma(w, set1(((const float*)(a.x + t * a.x_stride))[k]), acc[t]);
  };
  for (int k = 0; k < a.k; k++) {
    if constexpr (f == Format::f32) {
      step(load((const float*)a.weight + size_t(k) * 16), k);
    } else if constexpr (f == Format::f16) {
      step(load_f16((const uint16_t*)a.weight + size_t(k) * 16), k);
    } else {
      step(load_bf16_pair((const uint16_t*)a.weight + size_t(k / 2) * 32, k % 2), k);
    }
  }
  PL_UNROLL
  for (int t = 0; t < T; t++) finish(a, t, acc[t]);
}

#if defined(PL_ISA_avx512bf16)
// The exception to equal bits on every ISA: x is bfloat16 (rows made by round_rows), two products a step.
template <int T>
void bf16_tile(const TileArgs& a) {
  f32x16 acc[T];
  PL_UNROLL
  for (int t = 0; t < T; t++) acc[t] = set1(0.0f);
  for (int k = 0; k < a.k; k += 2) {
    const __m512bh w = (__m512bh)_mm512_loadu_si512(a.weight + size_t(k) * 32);
    PL_UNROLL
    for (int t = 0; t < T; t++) {
      int pair;
      std::memcpy(&pair, a.x + t * a.x_stride + size_t(k) * 2, 4);
      acc[t].v = _mm512_dpbf16_ps(acc[t].v, w, (__m512bh)_mm512_set1_epi32(pair));
    }
  }
  PL_UNROLL
  for (int t = 0; t < T; t++) finish(a, t, acc[t]);
}
#endif

}  // namespace paceline::PL_ISA
