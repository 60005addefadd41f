// What the row-wise kernels share: tails of a row, addresses of rows, parts of q8 rows.
#pragma once
#include "kernels.h"
#include "quantize.h"
#include "simd.h"

namespace paceline::PL_ISA {

PL_INLINE int min_int(int a, int b) { return a < b ? a : b; }
PL_INLINE int max_int(int a, int b) { return a > b ? a : b; }

// n lanes of p; the others are +0.
PL_INLINE f32x16 load_n(const float* p, int n) {
  if (n >= 16) return load(p);
  float f[16] = {};
  std::memcpy(f, p, size_t(n) * 4);
  return load(f);
}
PL_INLINE void store_n(float* p, f32x16 a, int n) {
  if (n >= 16) return store(p, a);
  float f[16];
  store(f, a);
  std::memcpy(p, f, size_t(n) * 4);
}

PL_INLINE float* f32_row(const Mat& m, int row) { return reinterpret_cast<float*>(m.data + size_t(row) * m.stride); }
PL_INLINE int num_rows(const Op& op, const Step& step) { return op.logit_rows ? step.L : step.T; }
// Rows a thread takes at once: few takes for many rows, and still a fair share for each thread.
PL_INLINE int row_grain(int rows, const Work& work) { return rows / (8 * work.num_threads) + 1; }

// Write n columns (a multiple of 32, or up to the row's end) at `col`, a multiple of 32, of a row.
PL_INLINE void store_part(const Mat& out, int row, int col, int n, const float* x) {
  uint8_t* dst = out.data + size_t(row) * out.stride;
  if (!out.is_q8) {
    std::memcpy(dst + size_t(col) * 4, x, size_t(n) * 4);
    return;
  }
  const Q8Row to = q8_row(dst, out.cols);
  const int first = col / 32;
  quantize_columns(x, n, {to.q + col, to.scale + first, to.sum + first, to.half_sum + 2 * first});
}

}  // namespace paceline::PL_ISA
