// quantize: f32 rows to q8 rows.
#include "kernels/quantize.h"

namespace paceline::PL_ISA {

void quantize_one_row(const float* x, int k, uint8_t* q8_row) { quantize_row(x, k, q8_row); }

void quantize(const Op& op, const Step& step, Work& work) {
  constexpr int kRows = 4;
  const int rows = op.logit_rows ? step.L : step.T;
  for (int i; (i = work.next(work, kRows)) < rows;) {
    for (int t = i; t < rows && t < i + kRows; t++) {
      quantize_row((const float*)(op.in[0].data + t * op.in[0].stride), op.in[0].cols, op.out.data + t * op.out.stride);
    }
  }
}

}  // namespace paceline::PL_ISA
