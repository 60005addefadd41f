// Float rows to the blocks of a weight format: `dequantize` of weights/tensor.py, the other way. Runs when a model is
// quantised; written over f32x16, so that a file has the same bits whatever machine made it.
#include "kernels/encode_fit.h"

namespace paceline::PL_ISA {
namespace {

// 32 codes of four bits: the first half in the low nibbles of 16 bytes.
void put_nibbles(const uint8_t* code, uint8_t* out) {
  for (int i = 0; i < 16; i++) out[i] = uint8_t((code[i] & 15) | code[i + 16] << 4);
}
void put_high_bits(const uint8_t* code, uint8_t* out) {
  uint32_t bits = 0;
  for (int i = 0; i < 32; i++) bits |= uint32_t(code[i] >> 4) << i;
  std::memcpy(out, &bits, 4);
}

// ---- one scale, and maybe a minimum, for `groups` of 32: found first, for a block or for a whole row ----------------
template <Format f>
struct Flat {
  using L = Layout<f>;
  static constexpr bool has_min = L::scaling == Scaling::min, few = L::bits == 8;
  static constexpr Codes codes = L::bits == 8 ? (has_min ? Codes{-128, 127} : Codes{-127, 127})
                                 : has_min    ? Codes{0, (1 << L::bits) - 1}
                                              : Codes{-L::zero, L::zero - 1};
  static Fit fit(const Group& g) {
    return has_min ? fit_affine(g, codes, true, few) : fit_symmetric(g, codes, true, few);
  }
  static void write(const Group& g, const Fit& fit, uint8_t* out) {
    as_f16(fit.d, out);
    if (has_min) as_f16(fit.m, out + 2);
    uint8_t code[32 * L::record_groups], *at = out + 2 + 2 * has_min;
    write_codes(g, fit.d, fit.m, codes, code);
    for (int i = 0; i < L::record_groups; i++) {
      if (L::bits == 8) {
        for (int j = 0; j < 32; j++) at[32 * i + j] = uint8_t(code[32 * i + j] + int(codes.low));
        continue;
      }
      if (L::bits == 5) put_high_bits(code, at), at += 4;
      put_nibbles(code + 32 * i, at + 16 * i);
    }
  }
};

// ---- FP8 E4M3: the nearest of the values, ties to even, d = the largest weight / 448 -------------------------------
uint8_t e4m3_code(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 24 & 128, size = bits & 0x7fffffff;
  float positive;
  std::memcpy(&positive, &size, 4);
  if (positive < 0x1p-6f) return uint8_t(sign | uint32_t(int(__builtin_nearbyintf(positive * 512.0f))));
  const uint32_t rounded = size + 0x7ffff + (size >> 20 & 1), code = (rounded >> 20) - (120 << 3);
  return uint8_t(sign | (code > 0x7e ? 0x7e : code));
}
template <Format f>
struct F8 {
  static Fit fit(const Group& g) {
    const Range r = range_of(g);
    return {as_f16_reaching((r.high > -r.low ? r.high : -r.low) / 448.0f, nullptr), 0, 0};
  }
  static void write(const Group& g, const Fit& fit, uint8_t* out) {
    as_f16(fit.d, out);
    const float by = inverse(fit.d);
    for (int i = 0; i < g.n; i++) out[2 + i] = e4m3_code(g.w[i] * by);
  }
};

// ---- K-quants: 256 weights, scales of their groups in a few bits, times a float16 ----------------------------------
Group part_of(const Group& g, int begin, int n) { return {g.w + begin, g.importance + begin, n}; }

int nearest_int(float x, int low, int high) {
  const int n = int(__builtin_nearbyintf(x));
  return n < low ? low : n > high ? high : n;
}

struct KGroups {  // scale and minimum of eight groups, 0 to 63 each
  int scale[8], min[8];
};

// The whole scales around the wanted ones that leave the least error.
void settle_group(const Group& g, const Fit& wanted, float d, float dmin, Codes c, int& scale, int& minimum) {
  const int near_scale = nearest_int(wanted.d * inverse(d), 0, 63),
            near_min = nearest_int(-wanted.m * inverse(dmin), 0, 63);
  float least = -1;
  for (int s = near_scale - 1; s <= near_scale + 1; s++) {
    for (int m = near_min - 1; m <= near_min + 1; m++) {
      if (s < 0 || s > 63 || m < 0 || m > 63) continue;
      const float error = error_of(g, d * float(s), -(dmin * float(m)), c);
      if (least < 0 || error < least) least = error, scale = s, minimum = m;
    }
  }
}

// Scales and minimums of q4_k and q5_k, as `_scales_and_minimums` reads them.
void put_k_scales(const KGroups& k, uint8_t* out) {
  for (int g = 0; g < 4; g++) {
    out[g] = uint8_t(k.scale[g] | k.scale[g + 4] >> 4 << 6);
    out[g + 4] = uint8_t(k.min[g] | k.min[g + 4] >> 4 << 6);
    out[g + 8] = uint8_t((k.scale[g + 4] & 15) | (k.min[g + 4] & 15) << 4);
  }
}

template <int bits>
void k_block(const Group& g, uint8_t* out) {
  constexpr Codes codes{0, (1 << bits) - 1};
  Fit fit[8];
  float scale = 0, minimum = 0;
  for (int i = 0; i < 8; i++) {
    fit[i] = fit_affine(part_of(g, 32 * i, 32), codes, false, bits > 4);
    scale = fit[i].d > scale ? fit[i].d : scale;
    minimum = -fit[i].m > minimum ? -fit[i].m : minimum;
  }
  const float d = as_f16_reaching(scale / 63.0f, out), dmin = as_f16_reaching(minimum / 63.0f, out + 2);
  KGroups k{};
  uint8_t code[256];
  for (int i = 0; i < 8; i++) {
    const Group part = part_of(g, 32 * i, 32);
    settle_group(part, fit[i], d, dmin, codes, k.scale[i], k.min[i]);
    write_codes(part, d * float(k.scale[i]), -(dmin * float(k.min[i])), codes, code + 32 * i);
  }
  put_k_scales(k, out + 4);
  uint8_t* quants = out + 16;
  if (bits == 5) {
    for (int l = 0; l < 32; l++) {
      int byte = 0;
      for (int i = 0; i < 8; i++) byte |= (code[32 * i + l] >> 4) << i;
      quants[l] = uint8_t(byte);
    }
    quants += 32;
  }
  for (int i = 0; i < 4; i++) {
    for (int l = 0; l < 32; l++) quants[32 * i + l] = uint8_t((code[64 * i + l] & 15) | code[64 * i + 32 + l] << 4);
  }
}

void q6_k_block(const Group& g, uint8_t* out) {
  constexpr Codes codes{-32, 31};
  Fit fit[16];
  float extreme = 0;
  for (int i = 0; i < 16; i++) {
    fit[i] = fit_symmetric(part_of(g, 16 * i, 16), codes, false, true);
    if (__builtin_fabsf(fit[i].d) > __builtin_fabsf(extreme)) extreme = fit[i].d;
  }
  const float d = as_f16_reaching(extreme / -128.0f, out + 208);
  uint8_t code[256];
  for (int i = 0; i < 16; i++) {
    const Group part = part_of(g, 16 * i, 16);
    const int wanted = nearest_int(fit[i].d * inverse(d), -128, 127);
    int scale = wanted;
    float least = error_of(part, d * float(wanted), 0, codes);
    for (int s = wanted - 1; s <= wanted + 1; s += 2) {
      const float error = s < -128 || s > 127 ? least : error_of(part, d * float(s), 0, codes);
      if (error < least) least = error, scale = s;
    }
    out[192 + i] = uint8_t(scale);
    write_codes(part, d * float(scale), 0, codes, code + 16 * i);
  }
  for (int half = 0; half < 2; half++) {
    const uint8_t* c = code + 128 * half;
    for (int l = 0; l < 64; l++) out[64 * half + l] = uint8_t((c[l] & 15) | c[64 + l] << 4);
    for (int l = 0; l < 32; l++) {
      out[128 + 32 * half + l] = uint8_t(c[l] >> 4 | c[32 + l] >> 4 << 2 | c[64 + l] >> 4 << 4 | c[96 + l] >> 4 << 6);
    }
  }
}

struct Encoder {
  int weights = 0, bytes = 0;
  Fit (*fit)(const Group& g) = nullptr;  // null: one scale cannot serve all of a block
  void (*write)(const Group& g, const Fit& fit, uint8_t* out) = nullptr;
  void (*block)(const Group& g, uint8_t* out) = nullptr;  // all of a K-quant
};
template <Format f>
constexpr Encoder flat() {
  using L = Layout<f>;
  const int quants = L::record_groups * (L::bits == 8 ? 32 : 4 * L::bits);
  return {32 * L::record_groups, 2 + 2 * (L::scaling == Scaling::min) + quants, Flat<f>::fit, Flat<f>::write};
}
template <Format f>
constexpr Encoder f8() {
  return {32 * Layout<f>::record_groups, 2 + 32 * Layout<f>::record_groups, F8<f>::fit, F8<f>::write};
}
constexpr Encoder k_quant(int bytes, void (*block)(const Group&, uint8_t*)) {
  return {256, bytes, nullptr, nullptr, block};
}

constexpr Encoder encoder_of(Format format) {
  switch (format) {
    case Format::q4_0: return flat<Format::q4_0>();
    case Format::q4_1: return flat<Format::q4_1>();
    case Format::q5_0: return flat<Format::q5_0>();
    case Format::q5_1: return flat<Format::q5_1>();
    case Format::q8_0: return flat<Format::q8_0>();
    case Format::q4_k: return k_quant(144, k_block<4>);
    case Format::q5_k: return k_quant(176, k_block<5>);
    case Format::q6_k: return k_quant(210, q6_k_block);
    case Format::i4_g64: return flat<Format::i4_g64>();
    case Format::i4_g128: return flat<Format::i4_g128>();
    case Format::i4m_g64: return flat<Format::i4m_g64>();
    case Format::i4m_g128: return flat<Format::i4m_g128>();
    case Format::i8_g64: return flat<Format::i8_g64>();
    case Format::i8_g128: return flat<Format::i8_g128>();
    case Format::i8m_g32: return flat<Format::i8m_g32>();
    case Format::i8m_g64: return flat<Format::i8m_g64>();
    case Format::i8m_g128: return flat<Format::i8m_g128>();
    case Format::f8_g32: return f8<Format::f8_g32>();
    case Format::f8_g64: return f8<Format::f8_g64>();
    case Format::f8_g128: return f8<Format::f8_g128>();
    default: return {};
  }
}

}  // namespace

bool encode_rows(Format format, const float* w, const float* importance, int rows, int k, bool by_row, uint8_t* out) {
  const Encoder encoder = encoder_of(format);
  if (by_row ? !encoder.fit : !encoder.weights) return false;
  for (int row = 0; row < rows; row++) {
    const Group whole{w + size_t(row) * k, importance, k};
    Fit fit = by_row ? encoder.fit(whole) : Fit{};
    for (int i = 0; i < k; i += encoder.weights, out += encoder.bytes) {
      const Group g = part_of(whole, i, encoder.weights);
      if (encoder.block) {
        encoder.block(g, out);
        continue;
      }
      if (!by_row) fit = encoder.fit(g);
      encoder.write(g, fit, out);
    }
  }
  return true;
}

}  // namespace paceline::PL_ISA
