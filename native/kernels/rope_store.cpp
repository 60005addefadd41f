// Norm and rotate q and k, and put k and v into the KV cache.
#include "rms_norm.h"

namespace paceline::PL_ISA {
namespace {

constexpr int kMaxHeadDim = 256;

// Rotates the halves of x's first 2 * half columns; `table` is cos[half], sin[half].
PL_INLINE void rotate(float* x, const float* table, int half) {
  for (int i = 0; i < half; i += 16) {
    int n = half - i;
    f32x16 c = load_n(table + i, n), s = load_n(table + half + i, n);
    f32x16 a = load_n(x + i, n), b = load_n(x + half + i, n);
    store_n(x + i, sub(mul(a, c), mul(b, s)), n);
    store_n(x + half + i, add(mul(b, c), mul(a, s)), n);
  }
}

// x as the cache's 16-bit type; n is a multiple of 8 and x and y have room for 16 at the end.
PL_INLINE void narrow(const float* x, int n, Format dtype, uint16_t* y) {
  for (int i = 0; i < n; i += 16) {
    if (dtype == Format::f16)
      store_f16(y + i, load(x + i));
    else
      store_bf16(y + i, load(x + i));
  }
}

struct Rope {
  const Op& op;
  const float* table;  // of the row's position, or null

  // y = x normed and rotated; y has kMaxHeadDim columns.
  PL_INLINE void head(const float* x, const float* norm, float* y) const {
    if (norm)
      norm_columns(x, norm, op.eps, op.head_dim, y);
    else
      std::memcpy(y, x, size_t(op.head_dim) * 4);
    if (table) rotate(y, table, op.rope_dims / 2);
  }
};

// One head's k and v to the slot. K is transposed in its block: a column of stride block_size.
PL_INLINE void store_kv(const Op& op, const KVLayout& kv, int slot, int head, const float* k, const float* v) {
  size_t block = size_t(slot / kv.block_size), offset = size_t(slot % kv.block_size), dim = size_t(kv.head_dim);
  size_t size = size_t(kv.block_size), width = kv.dtype == Format::f32 ? 4 : 2;
  size_t at = block * kv.block_bytes + size_t(op.layer) * kv.layer_bytes, base = size_t(head) * size * dim;
  uint8_t* k_at = kv.k + at + (base + offset) * width;
  uint8_t* v_at = kv.v + at + (base + offset * dim) * width;
  if (kv.dtype == Format::f32) {
    float* column = reinterpret_cast<float*>(k_at);
    for (size_t d = 0; d < dim; d++) column[d * size] = k[d];
    std::memcpy(v_at, v, dim * 4);
    return;
  }
  uint16_t narrow_k[kMaxHeadDim], narrow_v[kMaxHeadDim], *column = reinterpret_cast<uint16_t*>(k_at);
  narrow(k, int(dim), kv.dtype, narrow_k);
  narrow(v, int(dim), kv.dtype, narrow_v);
  for (size_t d = 0; d < dim; d++) column[d * size] = narrow_k[d];
  std::memcpy(v_at, narrow_v, dim * 2);
}

PL_INLINE void rope_store_row(const Op& op, const Step& step, int row) {
  int dim = op.head_dim;
  size_t record = size_t(step.positions[row]) * size_t(op.rope_dims);
  Rope rope{op, op.rope_table ? op.rope_table + record : nullptr};
  alignas(64) float k[kMaxHeadDim] = {}, v[kMaxHeadDim] = {}, q[kMaxHeadDim];
  for (int h = 0; h < op.heads; h++) {
    rope.head(f32_row(op.in[0], row) + h * dim, op.norm_weight[0], q);
    std::memcpy(f32_row(op.out, row) + h * dim, q, size_t(dim) * 4);
  }
  for (int h = 0; h < op.kv_heads; h++) {
    rope.head(f32_row(op.in[1], row) + h * dim, op.norm_weight[1], k);
    std::memcpy(v, f32_row(op.in[2], row) + h * dim, size_t(dim) * 4);
    store_kv(op, step.kv, step.slots[row], h, k, v);
  }
}

}  // namespace

void rope_store(const Op& op, const Step& step, Work& work) {
  int grain = row_grain(step.T, work);
  for (int begin; (begin = work.next(work, grain)) < step.T;) {
    for (int row = begin; row < min_int(begin + grain, step.T); row++) rope_store_row(op, step, row);
  }
}

}  // namespace paceline::PL_ISA
