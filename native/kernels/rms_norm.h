// One RMS norm of n columns, shared by rms_norm and rope_store.
#pragma once
#include "rows.h"

namespace paceline::PL_ISA {

// y = x / sqrt(mean(x^2) + eps) * weight; y may be x.
PL_INLINE void norm_columns(const float* x, const float* weight, float eps, int n, float* y) {
  f32x16 sum = set1(0.0f);
  for (int i = 0; i < n; i += 16) {
    f32x16 v = load_n(x + i, n - i);
    sum = fma(v, v, sum);
  }
  f32x16 factor = set1(1.0f / __builtin_sqrtf(reduce_add(sum) / float(n) + eps));
  for (int i = 0; i < n; i += 16) {
    store_n(y + i, mul(mul(load_n(x + i, n - i), factor), load_n(weight + i, n - i)), n - i);
  }
}

}  // namespace paceline::PL_ISA
