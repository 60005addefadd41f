// add, scale, softcap, select, gather: f32 -> f32, shared out in chunks of columns so that one wide row (logits) is
// many items.
#include "rows.h"

namespace paceline::PL_ISA {
namespace {

constexpr int kChunk = 2048;

// Calls f(row, first column, end column) for every chunk of the op's output.
template <class F>
PL_INLINE void for_each_chunk(const Op& op, const Step& step, Work& work, F f) {
  int chunks = (op.out.cols + kChunk - 1) / kChunk, items = num_rows(op, step) * chunks;
  int grain = row_grain(items, work);
  for (int begin; (begin = work.next(work, grain)) < items;) {
    for (int i = begin; i < min_int(begin + grain, items); i++) {
      int col = i % chunks * kChunk;
      f(i / chunks, col, min_int(col + kChunk, op.out.cols));
    }
  }
}

template <class F>
PL_INLINE void map_columns(const Op& op, const Step& step, Work& work, F f) {
  for_each_chunk(op, step, work, [&](int row, int begin, int end) {
    const float* x = f32_row(op.in[0], row);
    float* y = f32_row(op.out, row);
    for (int i = begin; i < end; i += 16) store_n(y + i, f(load_n(x + i, end - i)), end - i);
  });
}

}  // namespace

void add(const Op& op, const Step& step, Work& work) {
  for_each_chunk(op, step, work, [&](int row, int begin, int end) {
    const float *a = f32_row(op.in[0], row), *b = f32_row(op.in[1], row);
    float* y = f32_row(op.out, row);
    for (int i = begin; i < end; i += 16) store_n(y + i, add(load_n(a + i, end - i), load_n(b + i, end - i)), end - i);
  });
}

void scale(const Op& op, const Step& step, Work& work) {
  map_columns(op, step, work, [&](f32x16 x) { return mul(x, set1(op.scale)); });
}

void softcap(const Op& op, const Step& step, Work& work) {
  map_columns(op, step, work, [&](f32x16 x) {
    f32x16 finite_or_nan = min(set1(1e30f), max(set1(-1e30f), x));  // min and max return their second operand if NaN
    return fma(finite_or_nan, set1(0.0f), mul(tanh(div(x, set1(op.softcap))), set1(op.softcap)));
  });
}

void select(const Op& op, const Step& step, Work& work) {
  for_each_chunk(op, step, work, [&](int row, int begin, int end) {
    std::memcpy(f32_row(op.out, row) + begin, f32_row(op.in[0], step.logit_rows[row]) + begin, size_t(end - begin) * 4);
  });
}

void gather(const Op& op, const Step& step, Work& work) {
  for_each_chunk(op, step, work, [&](int row, int begin, int end) {
    const float* x = f32_row(op.in[0], row);
    float* y = f32_row(op.out, row);
    for (int i = begin; i < end; i++) y[i] = x[op.column_order[i]];
  });
}

}  // namespace paceline::PL_ISA
