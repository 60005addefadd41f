#include "rows.h"

namespace paceline::PL_ISA {
namespace {

constexpr int kChunk = 1024;  // a multiple of the q8 group

PL_INLINE f32x16 silu(f32x16 x) { return div(x, add(set1(1.0f), exp(sub(set1(0.0f), x)))); }
PL_INLINE f32x16 gelu_tanh(f32x16 x) {
  f32x16 inner = mul(x, fma(mul(x, x), set1(0.7978845608f * 0.044715f), set1(0.7978845608f)));
  return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh(inner)));
}

template <class F>
PL_INLINE void gate_columns(const float* gate, const float* up, int n, float* y, F act) {
  for (int i = 0; i < n; i += 16) store_n(y + i, mul(act(load_n(gate + i, n - i)), load_n(up + i, n - i)), n - i);
}

}  // namespace

void gated_act(const Op& op, const Step& step, Work& work) {
  int cols = op.out.cols, chunks = (cols + kChunk - 1) / kChunk, items = num_rows(op, step) * chunks;
  int grain = row_grain(items, work);
  alignas(64) float y[kChunk];
  for (int begin; (begin = work.next(work, grain)) < items;) {
    for (int i = begin; i < min_int(begin + grain, items); i++) {
      int row = i / chunks, col = i % chunks * kChunk, n = min_int(kChunk, cols - col);
      const float *gate = f32_row(op.in[0], row) + col, *up = f32_row(op.in[1], row) + col;
      if (op.act == 0)
        gate_columns(gate, up, n, y, [](f32x16 x) { return silu(x); });
      else
        gate_columns(gate, up, n, y, [](f32x16 x) { return gelu_tanh(x); });
      store_part(op.out, row, col, n, y);
    }
  }
}

}  // namespace paceline::PL_ISA
