// Attention over an int8 cache: scores and outputs as exact integer sums of codes, scaled once.
//
// A query row becomes codes of 15 bits with one scale, and so do the weights p_j * scale(v_j) of a tile of 64 logical
// keys: their rounding is 2^-8 of that of K and V. A sum of such products fits 32 bits and has no order, so a row's
// bits depend on its own tile alone (law 1), and keys that it may not see get weight 0, whatever stale codes they hold.
#pragma once
#include "attend_item.h"
#include "pairs.h"

namespace paceline::PL_ISA {

// Where the keys of a tile lie, sixteen a vector: K at k[i] + pair of columns * k_stride + 2 * key, V at v[i] + pair of
// keys * v_stride + 2 * column.
struct CodeTile {
  const int8_t *k[kVectors], *v[kVectors];
  const uint16_t *k_scale[kVectors], *v_scale[kVectors];
  int k_stride, v_stride;
  ptrdiff_t k_ahead[kVectors], v_ahead[kVectors];  // bytes from there to the tile that comes next, or 0
};

inline void point_tile(const Item& it, int first, int keys, CodeTile& tile) {
  const size_t dim = size_t(it.dim), scales = size_t(it.step.kv.block_size) * dim;
  for (int i = 0; i * 16 < keys; i++) {
    const HeadPlace at = place_of(it, first + 16 * i);
    tile.k[i] = reinterpret_cast<const int8_t*>(at.k) + 2 * at.offset;
    tile.v[i] = reinterpret_cast<const int8_t*>(at.v) + size_t(at.offset) * dim;
    tile.k_scale[i] = reinterpret_cast<const uint16_t*>(at.k + scales) + at.offset;
    tile.v_scale[i] = reinterpret_cast<const uint16_t*>(at.v + scales) + at.offset;
  }
  tile.k_stride = 2 * it.step.kv.block_size;
  tile.v_stride = 2 * it.dim;
}

constexpr float kSmallestTop = 1e-33f;  // below it all is zero: 32767 / top would overflow

// codes[n] and the scale that is returned: x = scale * code, codes of 15 bits. NaN where x is not finite.
inline float quantize_i16(const float* x, int n, int16_t* codes) {
  f32x16 largest = set1(0.0f), poison = set1(0.0f);
  for (int i = 0; i < n; i += 16) {
    const f32x16 v = load_n(x + i, n - i);
    largest = max(largest, abs(v));
    poison = fma(v, set1(0.0f), poison);
  }
  const float top = max_lane(largest);
  const bool is_finite = reduce_add(poison) == 0.0f, is_zero = !is_finite || !(top >= kSmallestTop);
  const f32x16 inverse = set1(is_zero ? 0.0f : float(kMaxI16) / top);
  for (int i = 0; i < n; i += 16) store_i16(codes + i, is_zero ? set1(0.0f) : mul(load_n(x + i, n - i), inverse));
  return !is_finite ? __builtin_nanf("") : is_zero ? 0.0f : top / float(kMaxI16);
}

inline void quantize_queries(const Item& it) {
  for (int i = 0; i < it.num_rows; i++) {
    const size_t at = size_t(i) * size_t(it.dim_padded);
    it.s.q_scale[i] = quantize_i16(it.s.q + at, it.dim, it.s.codes + at);
  }
}

inline void prepare_queries(const Item& it, const CodeTile&) { quantize_queries(it); }

// scores[r][16 * (first + c) + lane] = q[r] . k over R rows and C vectors of keys.
template <int R, int C>
PL_INLINE void dot_block(const Item& it, const CodeTile& tile, int row, int first, float* scores) {
  const int16_t* q = it.s.codes + size_t(row) * size_t(it.dim_padded);
  i32x16 acc[R][C];
  const int8_t* k[C];
  for (int c = 0; c < C; c++) k[c] = tile.k[first + c];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = set1_i32(0);
  for (int d = 0; d < it.dim; d += 2) {
    for (int c = 0; c < C; c++) {
      fetch(k[c], tile.k_ahead[first + c]);
      const i16x32 x = widen_pairs(k[c]);
      k[c] += tile.k_stride;
      for (int r = 0; r < R; r++) acc[r][c] = dot2(acc[r][c], x, q + r * it.dim_padded + d);
    }
  }
  for (int c = 0; c < C; c++) {
    const f32x16 scale = load_f16(tile.k_scale[first + c]);
    for (int r = 0; r < R; r++)
      store(scores + r * kTile + 16 * (first + c), mul(to_float(acc[r][c]), mul(scale, set1(it.s.q_scale[row + r]))));
  }
}

// C is the widest that keeps R * C sums in registers.
template <int R>
PL_INLINE void dot_rows(const Item& it, const CodeTile& tile, int row, int vectors, float* scores) {
  constexpr int C = R == 1 ? 4 : R <= 3 ? 2 : 1;
  int i = 0;
  for (; i + C <= vectors; i += C) dot_block<R, C>(it, tile, row, i, scores);
  for (; i < vectors; i++) dot_block<R, 1>(it, tile, row, i, scores);
}

// out[r][16 * C columns] += factor[r] * sum over keys of weight[r][key] * v[key]; a factor of 0 leaves the row alone.
template <int R, int C>
PL_INLINE void mix_block(const int16_t* weight, int w_stride, const float* factor, const CodeTile& tile, int keys,
                         int col, float* out, int o_stride) {
  i32x16 acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = set1_i32(0);
  for (int i = 0; i * 16 < keys; i++) {
    const int8_t* v = tile.v[i] + 2 * col;
    const ptrdiff_t ahead = tile.v_ahead[i];
    for (int key = 16 * i; key < 16 * i + 16; key += 2, v += tile.v_stride) {
      for (int c = 0; c < C; c++) {
        fetch(v + 32 * c, ahead);
        const i16x32 x = widen_pairs(v + 32 * c);
        for (int r = 0; r < R; r++) acc[r][c] = dot2(acc[r][c], x, weight + r * w_stride + key);
      }
    }
  }
  for (int r = 0; r < R; r++) {
    if (factor[r] == 0.0f) continue;
    for (int c = 0; c < C; c++) {
      float* at = out + r * o_stride + col + 16 * c;
      store(at, fma(to_float(acc[r][c]), set1(factor[r]), load(at)));
    }
  }
}

template <int R>
PL_INLINE void mix_rows(const Item& it, const int16_t* weight, int w_stride, const float* factor, const CodeTile& tile,
                        int keys, int row) {
  constexpr int C = R == 1 ? 4 : R <= 3 ? 2 : 1;
  float* out = it.s.out + size_t(row) * size_t(it.dim_padded);
  int col = 0;
  for (; col + 16 * C <= it.dim; col += 16 * C)
    mix_block<R, C>(weight, w_stride, factor, tile, keys, col, out, it.dim_padded);
  for (; col < it.dim; col += 16) mix_block<R, 1>(weight, w_stride, factor, tile, keys, col, out, it.dim_padded);
}

// Weights of a row's tile out of its probabilities: 15-bit numbers, times the factor that is returned.
inline float weigh(const float* p, const CodeTile& tile, int begin, int end, int16_t* weight) {
  float scaled[kTile] = {};
  for (int i = begin / 16; i * 16 < end; i++) store(scaled + 16 * i, mul(load(p + 16 * i), load_f16(tile.v_scale[i])));
  for (int i = begin / 16 * 16; i < begin; i++) scaled[i] = 0.0f;  // its scale may be anything
  for (int i = end; i % 16; i++) scaled[i] = 0.0f;
  return quantize_i16(scaled, kTile, weight);
}

// Scores, softmax and output of R neighbouring rows over the tile of keys [first, first + kTile).
template <int R>
void attend_block(const Item& it, const CodeTile& tile, int row, int first) {
  const Row* rows = it.s.rows + row;
  int begin[R], end[R], any_end = 0;
  for (int r = 0; r < R; r++) {
    begin[r] = max_int(rows[r].begin - first, 0);
    end[r] = min_int(rows[r].end - first, kTile);
    if (end[r] > begin[r]) any_end = max_int(any_end, end[r]);
  }
  if (any_end == 0) return;
  float* p = it.s.p + row * kTile;
  dot_rows<R>(it, tile, row, (any_end + 15) / 16, p);
  int16_t weight[R][kTile] = {};
  float factor[R] = {};
  for (int r = 0; r < R; r++) {
    if (end[r] <= begin[r]) continue;
    softmax_tile(it, row + r, begin[r], end[r]);
    factor[r] = weigh(p + r * kTile, tile, begin[r], end[r], weight[r]);
  }
  mix_rows<R>(it, weight[0], kTile, factor, tile, any_end, row);
}

// The tail of a draft tree: keys from `first` on. A row's logical tiles are gathered out of the physical keys, and
// their weights put back in the places of those.
inline void attend_tree_row(const Item& it, const CodeTile& tile, int row, int first, int keys) {
  const Row& state = it.s.rows[row];
  const int vectors = (keys + 15) / 16;
  float *p = it.s.p + row * kTile, *raw = it.s.raw, scale[2 * kTile];
  dot_rows<1>(it, tile, row, vectors, raw);
  for (int i = 0; i < vectors; i++) store(scale + 16 * i, load_f16(tile.v_scale[i]));
  int physical[2 * kTile];
  const int count = tree_keys(it, row, first, physical);
  for (int tile_begin = 0; tile_begin < count; tile_begin += kTile) {
    const int begin = max_int(state.begin - first - tile_begin, 0), end = min_int(count - tile_begin, kTile);
    if (begin >= end) continue;
    if ((first + tile_begin) % kAttendSegment == 0) close_segment(it, row);
    for (int i = 0; i < kTile; i++) p[i] = i < end ? raw[physical[tile_begin + i]] : 0.0f;
    softmax_tile(it, row, begin, end);
    float scaled[kTile] = {};
    for (int i = begin; i < end; i++) scaled[i] = p[i] * scale[physical[tile_begin + i]];
    int16_t logical[kTile], weight[2 * kTile] = {};
    const float factor = quantize_i16(scaled, kTile, logical);
    for (int i = begin; i < end; i++) weight[physical[tile_begin + i]] = logical[i];
    mix_rows<1>(it, weight, 2 * kTile, &factor, tile, keys, row);
  }
}

}  // namespace paceline::PL_ISA
