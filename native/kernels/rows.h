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

// Write n columns (a multiple of 32, or up to the row's end) at `col` of a row. A q8 row keeps its scales behind all
// of its quants, so the part is quantised on its own and its fields are put in their places.
PL_INLINE void store_part(const Mat& out, int row, int col, int n, const float* x) {
  uint8_t* dst = out.data + size_t(row) * out.stride;
  if (!out.is_q8) {
    std::memcpy(dst + size_t(col) * 4, x, size_t(n) * 4);
    return;
  }
  if (n == out.cols) return quantize_row(x, n, dst);
  constexpr int kPart = 256;
  alignas(64) uint8_t part[q8_row_bytes(kPart)];
  for (int begin = 0; begin < n; begin += kPart) {
    int len = min_int(kPart, n - begin), at = col + begin;
    quantize_row(x + begin, len, part);
    size_t padded = q8_padded(len), groups = padded / 32, first = size_t(at) / 32;
    Q8Row from = q8_row(part, len), to = q8_row(dst, out.cols);
    std::memcpy(to.q + at, from.q, padded);
    std::memcpy(to.scale + first, from.scale, groups * sizeof *to.scale);
    std::memcpy(to.sum + first, from.sum, groups * sizeof *to.sum);
    std::memcpy(to.half_sum + 2 * first, from.half_sum, 2 * groups * sizeof *to.half_sum);
  }
}

}  // namespace paceline::PL_ISA
