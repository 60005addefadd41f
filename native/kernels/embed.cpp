// embed: out row = dequantised row of the packed weight, times scale. Values equal `dequantize` of weights/tensor.py.
#include "kernels/linear_source.h"

namespace paceline::PL_ISA {
namespace {

struct Lane {
  float d, m;
  int scale[2], min[2];
};

PL_INLINE float lane_of(f32x16 a, int lane) {
  float f[16];
  store(f, a);
  return f[lane];
}
PL_INLINE int lane_of(i32x16 a, int lane) {  // low 16 bits, see Scales
  int16_t low[32];
  std::memcpy(low, &a, sizeof low);
  return low[2 * lane];
}

template <Format f>
void quant_row(const uint8_t* panel, int lane, int k, float by, float* out) {
  using S = ShapeOf<f>;
  Packed<f> source(panel, k / kGroup);
  uint8_t block[64];
  for (int g = 0; g < k / kGroup; g++) {
    const auto s = source.scales_of(g);
    const float d = lane_of(s.d, lane);
    float scale[2] = {d, d}, min[2] = {0.0f, 0.0f};
    if constexpr (S::scaling == Scaling::min) min[0] = min[1] = lane_of(s.m, lane);
    if constexpr (S::has_halves) {
      for (int h = 0; h < 2; h++) scale[h] = d * float(lane_of(s.scale[h], lane));
    }
    if constexpr (S::scaling == Scaling::halves_min) {
      for (int h = 0; h < 2; h++) min[h] = lane_of(s.m, lane) * float(lane_of(s.min[h], lane));
    }
    PL_UNROLL
    for (int j = 0; j < 8; j++) {
      store64(block, source.block(g, j));
      for (int i = 0; i < 4; i++) {
        const uint8_t byte = block[4 * lane + i];
        const int q = (S::bits == 8 && S::zero == 0 ? int(int8_t(byte)) : int(byte)) - S::zero;
        const float value = scale[j / 4] * float(q);
        out[g * kGroup + 4 * j + i] = by * (S::has_min ? value + min[j / 4] : value);
      }
    }
  }
}

// FP8: as quant_row, over the values of the codes.
template <Format f>
void f8_row(const uint8_t* panel, int lane, int k, float by, float* out) {
  Packed<f> source(panel, k / kGroup);
  for (int g = 0; g < k / kGroup; g++) {
    const float d = lane_of(source.scales_of(g).d, lane);
    PL_UNROLL
    for (int j = 0; j < 8; j++) {
      const i32x16 lanes = as_lanes(source.block(g, j));
      for (int i = 0; i < 4; i++) {
        out[g * kGroup + 4 * j + i] = by * (d * lane_of(e4m3(mask(shift(lanes, -8 * i), 255)), lane));
      }
    }
  }
}

template <Format f>
void float_row(const uint8_t* panel, int lane, int k, float by, float* out) {
  for (int i = 0; i < k; i++) {
    f32x16 w;
    if constexpr (f == Format::f32)
      w = load((const float*)panel + size_t(i) * 16);
    else if constexpr (f == Format::f16)
      w = load_f16((const uint16_t*)panel + size_t(i) * 16);
    else
      w = load_bf16_pair((const uint16_t*)panel + size_t(i / 2) * 32, i % 2);
    out[i] = by * lane_of(w, lane);
  }
}

using Row = void (*)(const uint8_t* panel, int lane, int k, float by, float* out);
constexpr Row kRows[int(Format::count)] = {
    float_row<Format::f32>,     float_row<Format::f16>,      float_row<Format::bf16>,     quant_row<Format::q4_0>,
    quant_row<Format::q4_1>,    quant_row<Format::q5_0>,     quant_row<Format::q5_1>,     quant_row<Format::q8_0>,
    quant_row<Format::q2_k>,    quant_row<Format::q3_k>,     quant_row<Format::q4_k>,     quant_row<Format::q5_k>,
    quant_row<Format::q6_k>,    quant_row<Format::iq4_nl>,   quant_row<Format::i4_g64>,   quant_row<Format::i4_g128>,
    quant_row<Format::i4m_g64>, quant_row<Format::i4m_g128>, quant_row<Format::i8_g64>,   quant_row<Format::i8_g128>,
    quant_row<Format::i8m_g32>, quant_row<Format::i8m_g64>,  quant_row<Format::i8m_g128>, f8_row<Format::f8_g32>,
    f8_row<Format::f8_g64>,     f8_row<Format::f8_g128>,
};

}  // namespace

void embed(const Op& op, const Step& step, Work& work) {
  const Weight& w = op.seg[0].weight;
  for (int t; (t = work.next(work, 1)) < step.T;) {
    const int row = op.index == EmbedIndex::token      ? step.tokens[t]
                    : op.index == EmbedIndex::position ? step.positions[t]
                                                       : 0;
    kRows[int(w.format)](w.data + size_t(row / kPanel) * w.panel_bytes, row % kPanel, w.k, op.scale,
                         (float*)(op.out.data + t * op.out.stride));
  }
}

}  // namespace paceline::PL_ISA
