// What a tile reads of a weight: blocks of quants and the scales of a group, either unpacked in registers from the
// packed panel (Packed) or from a panel unpacked to scratch before (Unpacked), or the quants one way and the scales the
// other (Scaled). All give the tile the same numbers.
#pragma once
#include "kernels/linear_int.h"

namespace paceline::PL_ISA {

// The arithmetic of a format once its quants are bytes. Formats of one shape share the Unpacked tiles. Bits 8 means
// signed.
template <int bits_, Scaling scaling_, int zero_>
struct Shape {
  static constexpr int bits = bits_, zero = bits_ == 8 ? kSignedZero : zero_;
  static constexpr Scaling scaling = scaling_;
  static constexpr bool has_halves = scaling_ == Scaling::halves || scaling_ == Scaling::halves_min;
  static constexpr bool has_min = scaling_ == Scaling::min || scaling_ == Scaling::halves_min;
};
template <Format f>
using ShapeOf = Shape<f == Format::iq4_nl ? 8 : Layout<f>::bits, Layout<f>::scaling, Layout<f>::zero>;

// Scales of one group for the sixteen rows of a panel. `scale` and `min` are integers, as half_factor makes them: the
// value is the low 16 bits of a lane.
template <Scaling>
struct Scales;
template <>
struct Scales<Scaling::plain> {
  f32x16 d;
};
template <>
struct Scales<Scaling::min> {
  f32x16 d, m;
};
template <>
struct Scales<Scaling::halves> {
  f32x16 d;
  i32x16 scale[2];
};
template <>
struct Scales<Scaling::halves_min> {
  f32x16 d, m;
  i32x16 scale[2], min[2];
};

// kvalues_iq4nl of ggml: the sixteen levels of iq4_nl.
alignas(16) constexpr int8_t kIq4nl[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

PL_INLINE f32x16 negate(f32x16 a) { return sub(set1(0.0f), a); }

// Byte block j of a packed group.
template <Format f>
PL_INLINE u8x64 quants(const uint8_t* group, int j) {
  using L = Layout<f>;
  using P = Planes<L::bits>;
  if constexpr (is_float(f)) return load64(group + 64 * j);
  if constexpr (L::bits == 8) return signed_quants(load64(group + 64 * j));
  if constexpr (L::bits == 2 || L::bits == 3) {
    const u8x64 low = mask(shift(load64(group + j / 4 * 64), -2 * (j % 4)), 3);
    if constexpr (L::bits == 2)
      return low;
    else
      return join(low, mask(shift(load64(group + P::high), 2 - j), 4));
  }
  if constexpr (L::bits == 4) {
    const u8x64 byte = load64(group + j % 4 * 64), low = mask(j < 4 ? byte : shift(byte, -4), 15);
    if constexpr (f == Format::iq4_nl)
      return signed_quants(lookup(kIq4nl, low));
    else
      return low;
  }
  auto plane = [&](int v, int by, int m) {
    return mask(by ? shift(load64(group + 64 * v), by) : load64(group + 64 * v), m);
  };
  if constexpr (L::bits == 5) {
    if (j < 5) return plane(j, 0, 31);
    if (j < 7) return join(plane(2 * j - 10, -5, 7), plane(2 * j - 9, -2, 24));
    return join(plane(4, -5, 7), join(plane(1, -4, 8), plane(3, -3, 16)));
  }
  if constexpr (L::bits == 6) {
    const int v = j / 4 * 3;
    if (j % 4 < 3) return plane(v + j % 4, 0, 63);
    return join(plane(v, -6, 3), join(plane(v + 1, -4, 12), plane(v + 2, -2, 48)));
  }
}

PL_INLINE f32x16 half_at(const uint8_t* p) { return load_f16((const uint16_t*)p); }

// What the groups of a scale record share.
struct Shared {
  f32x16 d, m;  // m: -dmin where the record has a dmin, m where it has that
};
template <Format f>
PL_INLINE Shared shared(const uint8_t* record) {
  using L = Layout<f>;
  const f32x16 d = half_at(record);
  if constexpr (L::scaling == Scaling::min || L::scaling == Scaling::halves_min) {
    const f32x16 m = half_at(record + 32);
    return {d, L::scale_bytes == 64 ? m : negate(m)};
  } else {
    return {d, d};
  }
}

// Scales of group i of the record `r`.
template <Format f>
PL_INLINE Scales<Layout<f>::scaling> scales(const Shared& of, const uint8_t* r, int i) {
  using L = Layout<f>;
  if constexpr (L::scaling == Scaling::plain) {
    return {of.d};
  } else if constexpr (L::scaling == Scaling::min && L::scale_bytes == 64) {
    return {of.d, of.m};
  } else if constexpr (f == Format::q4_k || f == Format::q5_k) {
    const i32x16 byte = widen_u8(r + 64 + 16 * i), nibbles = widen_u8(r + 192 + i / 2 * 16);
    const i32x16 high = mask(i % 2 ? shift(nibbles, -4) : nibbles, 15);
    const i32x16 min = join(shift(byte, -6), shift(high, 2));
    return {mul(of.d, to_float(mask(byte, 63))), mul(of.m, to_float(min))};
  } else if constexpr (f == Format::q6_k) {
    return {of.d, {half_factor(widen_i8(r + 32 + 32 * i)), half_factor(widen_i8(r + 48 + 32 * i))}};
  } else if constexpr (f == Format::q3_k) {
    const i32x16 low = widen_u8(r + 32 + 16 * i), high = shift(widen_u8(r + 160 + i / 2 * 16), i % 2 ? -4 : 0);
    const i32x16 first = join(mask(low, 15), shift(mask(high, 3), 4)),
                 second = join(shift(low, -4), shift(mask(high, 12), 2));
    return {of.d, {half_factor(add(first, set1_i32(-32))), half_factor(add(second, set1_i32(-32)))}};
  } else {
    const i32x16 first = widen_u8(r + 64 + 32 * i), second = widen_u8(r + 80 + 32 * i);
    return {of.d,
            of.m,
            {half_factor(mask(first, 15)), half_factor(mask(second, 15))},
            {half_factor(shift(first, -4)), half_factor(shift(second, -4))}};
  }
}

// What is read so much later is fetched now. On Zen 4 a core that fetches into its L1 waits for each line as if it had
// asked for it: one row of q4_k reads 14 GB/s so, and 27 into the L2. Past the end of a thread's panels lie another's
// or the next op's, so further ahead is slower where rows are short.
constexpr size_t kAheadBytes = 16384;
constexpr int kAheadLocality = 2;  // of __builtin_prefetch: the L2

template <Format f>
struct Packed {
  using shape = ShapeOf<f>;
  const uint8_t *groups, *records;
  Shared of;  // the record of the group that scales_of saw last
  PL_INLINE Packed(const uint8_t* panel, int num_groups)
      : groups(panel), records(panel + size_t(num_groups) * Layout<f>::group_bytes), of(shared<f>(records)) {}
  PL_INLINE u8x64 block(int g, int j) const { return quants<f>(groups + size_t(g) * Layout<f>::group_bytes, j); }
  // Groups are asked for one after the other, from the first of a record on.
  PL_INLINE Scales<shape::scaling> scales_of(int g) {
    using L = Layout<f>;
    const uint8_t* record = records + size_t(g / L::record_groups) * L::scale_bytes;
    if (g % L::record_groups == 0) of = shared<f>(record);
    return scales<f>(of, record, g % L::record_groups);
  }
  // A core's own prefetcher stops at the end of a page. Past the panel's end lies the next panel.
  PL_INLINE void fetch_ahead(int g) const {
    using L = Layout<f>;
    PL_UNROLL
    for (int i = 0; i < L::group_bytes; i += 64)
      __builtin_prefetch(groups + size_t(g) * L::group_bytes + i + kAheadBytes, 0, kAheadLocality);
    __builtin_prefetch(records + size_t(g) * L::scale_bytes / L::record_groups + kAheadBytes, 0, kAheadLocality);
  }
};

template <class S>
struct UnpackedGroup {
  uint8_t q[512];
  Scales<S::scaling> scales;
};

template <class S>
struct Unpacked {
  using shape = S;
  const UnpackedGroup<S>* groups;
  PL_INLINE Unpacked(const uint8_t* panel, int) : groups((const UnpackedGroup<S>*)panel) {}
  PL_INLINE u8x64 block(int g, int j) const { return load64(groups[g].q + 64 * j); }
  PL_INLINE const Scales<S::scaling>& scales_of(int g) const { return groups[g].scales; }
  PL_INLINE void fetch_ahead(int) const {}
};

template <Format f>
void unpack_panel(const uint8_t* panel, int num_groups, uint8_t* scratch) {
  Packed<f> source(panel, num_groups);
  auto* out = (UnpackedGroup<ShapeOf<f>>*)scratch;
  for (int g = 0; g < num_groups; g++) {
    source.fetch_ahead(g);
    PL_UNROLL
    for (int j = 0; j < 8; j++) store64(out[g].q + 64 * j, source.block(g, j));
    out[g].scales = source.scales_of(g);
  }
}

// Where registers suffice to unpack quants, only scales are worth it: a packed panel leaves more of the L1.
template <Format f>
struct Scaled {
  using shape = ShapeOf<f>;
  const uint8_t* groups;
  const Scales<shape::scaling>* scales;
  PL_INLINE u8x64 block(int g, int j) const { return quants<f>(groups + size_t(g) * Layout<f>::group_bytes, j); }
  PL_INLINE const Scales<shape::scaling>& scales_of(int g) const { return scales[g]; }
};

template <Format f>
void unpack_scales(const uint8_t* panel, int num_groups, uint8_t* scratch) {
  Packed<f> source(panel, num_groups);
  auto* out = (Scales<ShapeOf<f>::scaling>*)scratch;
  for (int g = 0; g < num_groups; g++) {
    source.fetch_ahead(g);
    out[g] = source.scales_of(g);
  }
}

// Values of FP8 E4M3 codes: sign, 4 bits of exponent, 3 of mantissa. Codes of NaN are not met: no weight may be NaN.
PL_INLINE f32x16 e4m3(i32x16 code) {
  const f32x16 exponent = to_float(mask(shift(code, -3), 15)), is_normal = min(exponent, set1(1.0f));
  const f32x16 significand = fma(is_normal, set1(8.0f), to_float(mask(code, 7)));
  const f32x16 sign = fma(to_float(mask(shift(code, -7), 1)), set1(-2.0f), set1(1.0f));
  return ldexp_int(mul(significand, sign), sub(max(exponent, set1(1.0f)), set1(10.0f)));
}

// A packed panel as [k][16] floats: the values of `dequantize`.
template <Format f>
void unpack_floats(const uint8_t* panel, int num_groups, float* out) {
  using S = ShapeOf<f>;
  Packed<f> source(panel, num_groups);
  for (int g = 0; g < num_groups; g++) {
    source.fetch_ahead(g);
    const auto s = source.scales_of(g);
    PL_UNROLL
    for (int j = 0; j < 8; j++) {
      f32x16 d = s.d, m = s.d;
      if constexpr (S::has_halves) d = mul(d, to_float(sign_extended(s.scale[j / 4], 16)));
      if constexpr (S::has_min) m = s.m;
      if constexpr (S::scaling == Scaling::halves_min) m = mul(m, to_float(sign_extended(s.min[j / 4], 16)));
      const i32x16 lanes = as_lanes(source.block(g, j));
      for (int i = 0; i < 4; i++, out += kPanel) {
        i32x16 q = shift(lanes, -8 * i);
        if constexpr (is_float(f)) {
          store(out, mul(d, e4m3(mask(q, 255))));
          continue;
        }
        q = S::bits == 8 && S::zero == 0 ? sign_extended(q, 8) : add(mask(q, 255), set1_i32(-S::zero));
        const f32x16 w = mul(d, to_float(q));
        store(out, S::has_min ? add(w, m) : w);
      }
    }
  }
}

}  // namespace paceline::PL_ISA
