#include "rows.h"

namespace paceline::PL_ISA {
namespace {

constexpr int kChunk = 1024;  // a multiple of the q8 group

PL_INLINE f32x16 silu(f32x16 x) { return div(x, add(set1(1.0f), exp(sub(set1(0.0f), x)))); }
PL_INLINE f32x16 gelu_tanh(f32x16 x) {
  f32x16 inner = mul(x, fma(mul(x, x), set1(0.7978845608f * 0.044715f), set1(0.7978845608f)));
  return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh(inner)));
}

// x * (1 + erf(x / sqrt 2)) / 2 within 3e-7; erf as in Abramowitz and Stegun, 7.1.26.
PL_INLINE f32x16 gelu(f32x16 x) {
  f32x16 size = max(sub(set1(0.0f), x), x), z = mul(size, set1(0.7071067812f));
  f32x16 t = div(set1(1.0f), fma(z, set1(0.3275911f), set1(1.0f)));
  f32x16 p = fma(t, set1(1.061405429f), set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  f32x16 erfc = mul(mul(p, t), exp(sub(set1(0.0f), mul(z, z))));
  return sub(max(set1(0.0f), x), mul(mul(set1(0.5f), size), erfc));
}

// `up` may be null: act(gate) alone.
template <class F>
PL_INLINE void gate_columns(const float* gate, const float* up, int n, float* y, F act) {
  for (int i = 0; i < n; i += 16) {
    const f32x16 a = act(load_n(gate + i, n - i));
    store_n(y + i, up ? mul(a, load_n(up + i, n - i)) : a, n - i);
  }
}

}  // namespace

void gated_act(const Op& op, const Step& step, Work& work) {
  int cols = op.out.cols, chunks = (cols + kChunk - 1) / kChunk, items = num_rows(op, step) * chunks;
  int grain = row_grain(items, work);
  alignas(64) float y[kChunk];
  for (int begin; (begin = work.next(work, grain)) < items;) {
    for (int i = begin; i < min_int(begin + grain, items); i++) {
      int row = i / chunks, col = i % chunks * kChunk, n = min_int(kChunk, cols - col);
      const float *gate = f32_row(op.in[0], row) + col, *up = op.in[1].data ? f32_row(op.in[1], row) + col : nullptr;
      if (op.act == 0)
        gate_columns(gate, up, n, y, [](f32x16 x) { return silu(x); });
      else if (op.act == 1)
        gate_columns(gate, up, n, y, [](f32x16 x) { return gelu_tanh(x); });
      else
        gate_columns(gate, up, n, y, [](f32x16 x) { return gelu(x); });
      store_part(op.out, row, col, n, y);
    }
  }
}

}  // namespace paceline::PL_ISA
