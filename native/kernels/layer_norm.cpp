// layer_norm: (x - mean) / sqrt(variance + eps) * weight + bias, over whole rows.
#include "rows.h"

namespace paceline::PL_ISA {
namespace {

// y holds the centred columns in between, so that what load_n adds behind a row's end counts as 0.
PL_INLINE void norm_row(const float* x, const float* weight, const float* bias, float eps, int n, float* y) {
  f32x16 sum = set1(0.0f), squares = set1(0.0f);
  for (int i = 0; i < n; i += 16) sum = add(sum, load_n(x + i, n - i));
  const f32x16 mean = set1(reduce_add(sum) / float(n));
  for (int i = 0; i < n; i += 16) {
    store_n(y + i, sub(load_n(x + i, n - i), mean), n - i);
    const f32x16 centred = load_n(y + i, n - i);
    squares = fma(centred, centred, squares);
  }
  const f32x16 factor = set1(1.0f / __builtin_sqrtf(reduce_add(squares) / float(n) + eps));
  for (int i = 0; i < n; i += 16) {
    const f32x16 scaled = mul(load_n(y + i, n - i), factor);
    store_n(y + i, fma(scaled, load_n(weight + i, n - i), load_n(bias + i, n - i)), n - i);
  }
}

}  // namespace

void layer_norm(const Op& op, const Step& step, Work& work) {
  const int rows = num_rows(op, step), cols = op.out.cols, grain = row_grain(rows, work);
  float* y = reinterpret_cast<float*>(step.scratch[work.thread]);
  for (int begin; (begin = work.next(work, grain)) < rows;) {
    for (int row = begin; row < min_int(begin + grain, rows); row++) {
      norm_row(f32_row(op.in[0], row), op.norm_weight[0], op.norm_weight[1], op.eps, cols, y);
      store_part(op.out, row, 0, cols, y);
    }
  }
}

}  // namespace paceline::PL_ISA
