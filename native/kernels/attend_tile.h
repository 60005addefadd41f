// Rows of queries times a tile of keys, and of probabilities times its values: the arithmetic of attend.
#pragma once
#include "attend_item.h"
#include "e4m3.h"

namespace paceline::PL_ISA {

PL_INLINE f32x16 load_kv(const float* p) { return load(p); }  // of scratch; the others are of the cache
struct F32 {
  float value;
};
struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};
struct FP8 {
  uint8_t bits;
};
PL_INLINE f32x16 load_kv(const F32* p) { return load(&p->value); }
PL_INLINE f32x16 load_kv(const F16* p) { return load_f16(&p->bits); }
PL_INLINE f32x16 load_kv(const BF16* p) { return load_bf16(&p->bits); }
PL_INLINE f32x16 load_kv(const FP8* p) { return load_e4m3(&p->bits); }

// Where the keys of a tile lie, sixteen a vector: K at k[i] + d * k_stride + lane, V at v[i] + lane * v_stride + d.
template <class E>
struct Tile {
  const E *k[kVectors], *v[kVectors];
  bool is_scaled = false;
  const uint16_t *k_scale[kVectors], *v_scale[kVectors];  // of each key, where it is
  int k_stride, v_stride;
  ptrdiff_t k_ahead[kVectors], v_ahead[kVectors];  // bytes from there to the tile that comes next, or 0
};

// The scales of sixteen keys of FP8, which is loaded as 2^-8 of what it is.
PL_INLINE f32x16 load_scale(const uint16_t* p) { return mul(load_f16(p), set1(256.0f)); }

// R rows times C vectors keep their sums in registers. On AVX-512 the C vectors stay, too, while each row's value is
// broadcast once; on AVX2 the sums leave no room, and what is broadcast is loaded again rather than kept.
#if defined(PL_ISA_avx512) || defined(PL_ISA_avx512bf16)
constexpr bool kKeepsVectors = true;
constexpr int vectors_of(int) { return 4; }
#else
constexpr bool kKeepsVectors = false;
constexpr int vectors_of(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#endif

// acc[r][c] += factor(r) * vector(c)
template <int R, int C, class F, class V>
PL_INLINE void add_products(f32x16 (&acc)[R][C], F factor, V vector) {
  if constexpr (kKeepsVectors) {
    f32x16 x[C];
    for (int c = 0; c < C; c++) x[c] = vector(c);
    for (int r = 0; r < R; r++) {
      const f32x16 y = set1(factor(r));
      for (int c = 0; c < C; c++) acc[r][c] = fma(y, x[c], acc[r][c]);
    }
  } else {
    for (int c = 0; c < C; c++) {
      const f32x16 x = vector(c);
      for (int r = 0; r < R; r++) acc[r][c] = fma(set1(factor(r)), x, acc[r][c]);
      if (c + 1 < C) asm volatile("" ::: "memory");
    }
  }
}

// scores[r][16 * (first + c) + lane] = q[r] . k over R rows and C vectors of keys.
template <int R, int C, class E>
PL_INLINE void dot_block(const float* q, int q_stride, const Tile<E>& tile, int first, int dim, float* scores,
                         int s_stride) {
  f32x16 acc[R][C];
  const E* k[C];
  ptrdiff_t ahead[C];
  for (int c = 0; c < C; c++) k[c] = tile.k[first + c], ahead[c] = tile.k_ahead[first + c];
  const size_t stride = size_t(tile.k_stride);
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = set1(0.0f);
  for (int d = 0; d < dim; d++) {
    auto key = [&](int c) __attribute__((always_inline)) {
      const E* at = k[c] + size_t(d) * stride;
      fetch(at, ahead[c]);
      return load_kv(at);
    };
    add_products(
        acc, [&](int r) { return q[r * q_stride + d]; }, key);
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(scores + r * s_stride + 16 * (first + c), acc[r][c]);
}

template <int R, class E>
PL_INLINE void dot_rows(const float* q, int q_stride, const Tile<E>& tile, int vectors, int dim, float* scores,
                        int s_stride) {
  constexpr int C = vectors_of(R);
  int i = 0;
  for (; i + C <= vectors; i += C) dot_block<R, C>(q, q_stride, tile, i, dim, scores, s_stride);
  for (; i < vectors; i++) dot_block<R, 1>(q, q_stride, tile, i, dim, scores, s_stride);
}

// out[r][16 * C columns] += sum over keys [begin, end) of p[r][key] * v[key], key by key.
template <int R, int C, class E>
PL_INLINE void mix_block(const float* p, const Tile<E>& tile, int begin, int end, int col, float* out, int o_stride) {
  f32x16 acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = load(out + r * o_stride + col + 16 * c);
  const size_t stride = size_t(tile.v_stride);
  for (int i = begin / 16; i * 16 < end; i++) {
    const int from = max_int(begin, 16 * i), to = min_int(end, 16 * i + 16);
    const E* v = tile.v[i] + size_t(from - 16 * i) * stride + col;
    const ptrdiff_t ahead = tile.v_ahead[i];
    for (int key = from; key < to; key++, v += stride) {
      auto value = [&](int c) __attribute__((always_inline)) {
        fetch(v + 16 * c, ahead);
        return load_kv(v + 16 * c);
      };
      add_products(
          acc, [&](int r) { return p[r * kTile + key]; }, value);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(out + r * o_stride + col + 16 * c, acc[r][c]);
}

template <int R, class E>
PL_INLINE void mix_rows(const float* p, const Tile<E>& tile, int begin, int end, int cols, float* out, int o_stride) {
  constexpr int C = vectors_of(R);
  if (begin >= end) return;
  int col = 0;
  for (; col + 16 * C <= cols; col += 16 * C) mix_block<R, C>(p, tile, begin, end, col, out, o_stride);
  for (; col < cols; col += 16) mix_block<R, 1>(p, tile, begin, end, col, out, o_stride);
}

}  // namespace paceline::PL_ISA
