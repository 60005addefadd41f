// Norm and rotate q and k, and put k and v into the KV cache.
#include "e4m3.h"
#include "hadamard.h"
#include "nibbles.h"
#include "rms_norm.h"

namespace paceline::PL_ISA {
namespace {

constexpr int kMaxHeadDim = 256;
constexpr uint16_t kInfinityF16 = 0x7c00, kNanF16 = 0x7e00;

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
PL_INLINE void narrow(const float* x, int n, KVFormat dtype, uint16_t* y) {
  for (int i = 0; i < n; i += 16) {
    if (dtype == KVFormat::f16)
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

// x = (x - shift) * factor; no shift where that is null.
PL_INLINE void even_out(float* x, const float* shift, const float* factor, int n) {
  for (int i = 0; i < n; i += 16) {
    f32x16 v = load_n(x + i, n - i);
    if (shift) v = sub(v, load_n(shift + i, n - i));
    store_n(x + i, mul(v, load_n(factor + i, n - i)), n - i);
  }
}

// A head's values over their scale become codes. The scale is max|x| / top as f16: NaN where x is not finite, and an
// infinity past f16's range.
struct HeadScale {
  uint16_t bits;
  bool is_zero;  // codes are 0: so is x, or the scale says that it cannot be told
  f32x16 inverse;
};
PL_INLINE HeadScale scale_head(const float* x, int n, float top) {
  f32x16 largest = set1(0.0f), poison = set1(0.0f);
  for (int i = 0; i < n; i += 16) {
    const f32x16 v = load_n(x + i, n - i);
    largest = max(largest, abs(v));
    poison = fma(v, set1(0.0f), poison);
  }
  const bool is_finite = reduce_add(poison) == 0.0f;
  uint16_t bits[16];
  store_f16(bits, set1(is_finite ? max_lane(largest) / top : __builtin_nanf("")));
  float scale[16];  // codes are of the scale as it is stored
  store(scale, load_f16(bits));
  const bool is_zero = !(scale[0] > 0.0f && scale[0] < 65536.0f);
  return {bits[0], is_zero, set1(is_zero ? 0.0f : 1.0f / scale[0])};
}

// codes[n]; returns the bits of their scale.
PL_INLINE uint16_t quantize_head(const float* x, int n, KVFormat dtype, uint8_t* codes) {
  const float top = dtype == KVFormat::fp8 ? 448.0f : 127.0f;
  const HeadScale scale = scale_head(x, n, top);
  for (int i = 0; i < n; i += 16) {
    const f32x16 v = scale.is_zero ? set1(0.0f) : mul(load_n(x + i, n - i), scale.inverse);
    if (dtype == KVFormat::fp8)
      store_e4m3(codes + i, max(min(v, set1(top)), set1(-top)));
    else
      store_i8(reinterpret_cast<int8_t*>(codes + i), v);
  }
  return scale.bits;
}

struct NibbleHead {
  int8_t nibbles[kMaxHeadDim];
  uint8_t steps[kMaxHeadDim / kNibbleGroup], bases[kMaxHeadDim / kNibbleGroup];
  uint16_t scale;
};
PL_INLINE void quantize_head(const float* x, int n, NibbleHead& head) {
  const f32x16 top = set1(float(kMaxCode)), bottom = set1(-float(kMaxCode));
  const HeadScale scale = scale_head(x, n, float(kMaxCode));
  for (int begin = 0, g = 0; begin < n; begin += kNibbleGroup, g++) {
    const int count = min_int(kNibbleGroup, n - begin);
    float codes[kNibbleGroup] = {};
    for (int i = 0; i < count && !scale.is_zero; i += 16)
      store(codes + i, max(min(mul(load_n(x + begin + i, count - i), scale.inverse), top), bottom));
    choose_nibbles(codes, count, head.nibbles + begin, &head.steps[g], &head.bases[g]);
  }
  head.scale = scale.bits;
}

// Where one head's K and V of a slot go: the layout is KVLayout's.
struct Slot {
  uint8_t *k, *v;  // of the head in the slot's block
  size_t offset, dim, size;
};

// Steps and bases of a slot, behind all scales of its block.
PL_INLINE void put_steps(const Slot& at, const NibbleHead& head, uint8_t* part) {
  uint8_t* steps = part + at.size * (at.dim / 2 + 2) + at.offset;
  const size_t groups = kv_groups(int(at.dim));
  for (size_t g = 0; g < groups; g++) {
    steps[g * at.size] = head.steps[g];
    steps[(groups + g) * at.size] = head.bases[g];
  }
}

// Each puts the codes of a head into its slot and returns their scale.
PL_INLINE uint16_t put_nibble_keys(const Slot& at, const float* k) {
  NibbleHead head;
  quantize_head(k, int(at.dim), head);
  for (size_t i = 0; i < at.dim / 2; i++)
    at.k[i * at.size + at.offset] = uint8_t(head.nibbles[2 * i] | head.nibbles[2 * i + 1] << 4);
  put_steps(at, head, at.k);
  return head.scale;
}
PL_INLINE uint16_t put_nibble_values(const Slot& at, const float* v) {
  NibbleHead head;
  quantize_head(v, int(at.dim), head);
  uint8_t* to = at.v + at.offset * at.dim / 2;
  for (size_t begin = 0; begin < at.dim; begin += kNibbleGroup) {
    const size_t half = size_t(min_int(kNibbleGroup, int(at.dim - begin))) / 2;
    const int8_t* from = head.nibbles + begin;
    for (size_t i = 0; i < half; i++) *to++ = uint8_t(from[i] | from[half + i] << 4);
  }
  put_steps(at, head, at.v);
  return head.scale;
}
PL_INLINE uint16_t put_keys(const Slot& at, const float* k, KVFormat dtype) {
  alignas(64) uint8_t codes[kMaxHeadDim];
  const uint16_t scale = quantize_head(k, int(at.dim), dtype, codes);
  if (dtype == KVFormat::fp8) {
    for (size_t d = 0; d < at.dim; d++) at.k[d * at.size + at.offset] = codes[d];
  } else {
    for (size_t d = 0; d < at.dim; d += 2) std::memcpy(at.k + d * at.size + 2 * at.offset, codes + d, 2);
  }
  return scale;
}
PL_INLINE uint16_t put_values(const Slot& at, const float* v, KVFormat dtype) {
  alignas(64) uint8_t codes[kMaxHeadDim];
  const uint16_t scale = quantize_head(v, int(at.dim), dtype, codes);
  if (dtype == KVFormat::fp8) {
    std::memcpy(at.v + at.offset * at.dim, codes, at.dim);
  } else {
    uint8_t* pairs = at.v + at.offset / 2 * at.dim * 2 + at.offset % 2;
    for (size_t d = 0; d < at.dim; d++) pairs[2 * d] = codes[d];
  }
  return scale;
}

PL_INLINE void store_codes(const Slot& at, const float* k, const float* v, KVFormat dtype) {
  const bool has_nibble_keys = kv_has_nibbles(dtype, KVPart::keys);
  const bool has_nibble_values = kv_has_nibbles(dtype, KVPart::values);
  const uint16_t k_scale = has_nibble_keys ? put_nibble_keys(at, k) : put_keys(at, k, dtype);
  uint16_t v_scale = has_nibble_values ? put_nibble_values(at, v) : put_values(at, v, dtype);
  // A score of NaN becomes a probability of 0, so it takes V to tell who sees this key.
  if (k_scale >= kInfinityF16) v_scale = kNanF16;
  std::memcpy(at.k + at.size * kv_items(dtype, KVPart::keys, int(at.dim)) + 2 * at.offset, &k_scale, 2);
  std::memcpy(at.v + at.size * kv_items(dtype, KVPart::values, int(at.dim)) + 2 * at.offset, &v_scale, 2);
}

PL_INLINE void store_f32(const Slot& at, const float* k, const float* v) {
  float* column = reinterpret_cast<float*>(at.k) + at.offset;
  for (size_t d = 0; d < at.dim; d++) column[d * at.size] = k[d];
  std::memcpy(at.v + at.offset * at.dim * 4, v, at.dim * 4);
}

PL_INLINE void store_narrow(const Slot& at, const float* k, const float* v, KVFormat dtype) {
  uint16_t narrow_k[kMaxHeadDim], narrow_v[kMaxHeadDim], *column = reinterpret_cast<uint16_t*>(at.k) + at.offset;
  narrow(k, int(at.dim), dtype, narrow_k);
  narrow(v, int(at.dim), dtype, narrow_v);
  for (size_t d = 0; d < at.dim; d++) column[d * at.size] = narrow_k[d];
  std::memcpy(at.v + at.offset * at.dim * 2, narrow_v, at.dim * 2);
}

// Two rows of neighbouring slots may be stored at once: codes share cache lines, but no byte.
PL_INLINE void store_kv(const Op& op, const KVLayout& kv, int slot, int head, const float* k, const float* v) {
  const size_t begin = size_t(slot / kv.block_size) * kv.block_bytes + size_t(op.layer) * kv.layer_bytes;
  uint8_t *k_head = kv.k + begin + size_t(head) * kv.k_head_bytes,
          *v_head = kv.v + begin + size_t(head) * kv.v_head_bytes;
  const Slot at{k_head, v_head, size_t(slot % kv.block_size), size_t(kv.head_dim), size_t(kv.block_size)};
  switch (kv.dtype) {
    case KVFormat::f32: return store_f32(at, k, v);
    case KVFormat::f16:
    case KVFormat::bf16: return store_narrow(at, k, v, kv.dtype);
    default: store_codes(at, k, v, kv.dtype);
  }
}

PL_INLINE void rope_store_row(const Op& op, const Step& step, int row) {
  int dim = op.head_dim, group = op.heads / op.kv_heads;
  const bool mixes_keys = kv_has_nibbles(step.kv.dtype, KVPart::keys);
  const bool mixes_values = kv_has_nibbles(step.kv.dtype, KVPart::values);
  size_t record = size_t(step.positions[row]) * size_t(op.rope_dims);
  Rope rope{op, op.rope_table ? op.rope_table + record : nullptr};
  alignas(64) float k[kMaxHeadDim] = {}, v[kMaxHeadDim] = {}, q[kMaxHeadDim];
  for (int h = 0; h < op.heads; h++) {
    rope.head(f32_row(op.in[0], row) + h * dim, op.norm_weight[0], q);
    if (op.query_factor) even_out(q, nullptr, op.query_factor + h / group * dim, dim);
    if (mixes_keys) mix_columns(q, dim);
    std::memcpy(f32_row(op.out, row) + h * dim, q, size_t(dim) * 4);
  }
  for (int h = 0; h < op.kv_heads; h++) {
    rope.head(f32_row(op.in[1], row) + h * dim, op.norm_weight[1], k);
    if (op.key_factor) even_out(k, op.key_shift + h * dim, op.key_factor + h * dim, dim);
    if (mixes_keys) mix_columns(k, dim);
    std::memcpy(v, f32_row(op.in[2], row) + h * dim, size_t(dim) * 4);
    if (mixes_values) mix_columns(v, dim);
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
