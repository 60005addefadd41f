#include "rms_norm.h"

namespace paceline::PL_ISA {

void rms_norm(const Op& op, const Step& step, Work& work) {
  const Mat &in = op.in[0], &residual = op.in[1];
  int rows = num_rows(op, step), width = in.cols / op.heads, grain = row_grain(rows, work);
  float* y = reinterpret_cast<float*>(step.scratch[work.thread]);
  for (int begin; (begin = work.next(work, grain)) < rows;) {
    for (int row = begin; row < min_int(begin + grain, rows); row++) {
      const float* x = f32_row(in, row);
      for (int h = 0; h < op.heads; h++) norm_columns(x + h * width, op.norm_weight[0], op.eps, width, y + h * width);
      if (residual.data) {
        const float* r = f32_row(residual, row);
        for (int i = 0; i < in.cols; i += 16) {
          store_n(y + i, add(load_n(y + i, in.cols - i), load_n(r + i, in.cols - i)), in.cols - i);
        }
      }
      store_part(op.out, row, 0, in.cols, y);
    }
  }
}

}  // namespace paceline::PL_ISA
