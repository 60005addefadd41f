// Attention over a bfloat16 cache on CPUs that multiply bfloat16: two products an instruction, summed in f32.
//
// Queries and probabilities are rounded to bfloat16, too. Column 2i is paired with 2i + 1, and key 2i with 2i + 1 by
// their logical places; a key that a row may not see is a zero in its pair, whatever lies there. So a row's bits depend
// on itself alone (law 1), but they are not those of the other ISAs, which attend to such a cache in f32.
#pragma once
#include "attend_tile.h"

namespace paceline::PL_ISA {

#if defined(PL_ISA_avx512bf16)
struct Pair {
  BF16 of[2];
};
struct bf16x32 {  // sixteen pairs
  __m512bh v;
};
PL_INLINE bf16x32 load_pairs(const Pair* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
PL_INLINE void store_pairs(Pair* p, bf16x32 a) { _mm512_storeu_si512(p, (__m512i)a.v); }
// Pairs of a[i] and b[i].
PL_INLINE bf16x32 zip(const BF16* a, const BF16* b) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m256i low = _mm256_loadu_si256((const __m256i*)a), high = _mm256_loadu_si256((const __m256i*)b);
  return {(__m512bh)_mm512_permutexvar_epi16(order, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1))};
}
PL_INLINE bf16x32 set_pair(const BF16* x) {
  int two;
  std::memcpy(&two, x, 4);
  return {(__m512bh)_mm512_set1_epi32(two)};
}
constexpr uint32_t kFirsts = 0x55555555, kSeconds = 0xAAAAAAAA;
PL_INLINE bf16x32 keep(bf16x32 a, uint32_t which) { return {(__m512bh)_mm512_maskz_mov_epi16(which, (__m512i)a.v)}; }
// acc += each lane's two elements of a times those of b.
PL_INLINE f32x16 dot2(f32x16 acc, bf16x32 a, bf16x32 b) {
  // Not the intrinsic: GCC 12 moves sums that it names to other registers and back.
  asm("vdpbf16ps %2, %1, %0" : "+v"(acc.v) : "v"(a.v), "v"(b.v));
  return acc;
}
PL_INLINE void store_rounded(BF16* to, f32x16 a) {
  _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(a.v));
}
PL_INLINE void round_row(const float* x, int n, BF16* to) {
  for (int i = 0; i < n; i += 16) store_rounded(to + i, load_n(x + i, n - i));
}

// e^x within 2^-18 of itself, as probabilities are rounded to 2^-9; 0 where x is -infinity. e^0 is exactly 1.
struct QuickExp {
  PL_INLINE f32x16 operator()(f32x16 x) const {
    const __m512 t = _mm512_max_ps(_mm512_mul_ps(x.v, _mm512_set1_ps(1.44269504f)), _mm512_set1_ps(-200.0f));
    const f32x16 r{_mm512_reduce_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};  // what rounding leaves
    f32x16 p = fma(set1(9.5828383e-3f), r, set1(5.5906463e-2f));                         // 2^r from -1/2 to 1/2
    p = fma(p, r, set1(2.4024099e-1f));
    p = fma(p, r, set1(6.9312419e-1f));
    p = fma(p, r, set1(1.0f));
    return {_mm512_scalef_ps(p.v, _mm512_sub_ps(t, r.v))};
  }
};

// Where the keys of a tile lie, sixteen a vector. In the cache (BF16) as Tile says; unpacked (Pair) K at k[i] + pair of
// columns * k_stride + lane, V at v[i] + pair of keys * v_stride + column.
template <class E>
struct PairTile {
  const E *k[kVectors], *v[kVectors];
  int k_stride, v_stride;
  ptrdiff_t k_ahead[kVectors], v_ahead[kVectors];  // bytes from there to the tile that comes next, or 0

  // Columns d and d + 1 of keys 16 i and on.
  PL_INLINE bf16x32 keys(int i, int d) const {
    if constexpr (sizeof(E) == sizeof(Pair))
      return load_pairs(k[i] + size_t(d / 2) * size_t(k_stride));
    else {
      const E *a = k[i] + size_t(d) * size_t(k_stride), *b = a + k_stride;
      fetch(a, k_ahead[i]);
      fetch(b, k_ahead[i]);
      return zip(a, b);
    }
  }
  // Columns `col` and on of keys 16 i + key and 16 i + key + 1.
  PL_INLINE bf16x32 values(int i, int key, int col) const {
    if constexpr (sizeof(E) == sizeof(Pair))
      return load_pairs(v[i] + size_t(key / 2) * size_t(v_stride) + col);
    else {
      const E *a = v[i] + size_t(key) * size_t(v_stride) + col, *b = a + v_stride;
      fetch(a, v_ahead[i]);
      fetch(b, v_ahead[i]);
      return zip(a, b);
    }
  }
};
using BF16Tile = PairTile<BF16>;

inline void point_tile(const Item& it, int first, int keys, BF16Tile& tile) {
  for (int i = 0; i * 16 < keys; i++) {
    const HeadPlace at = place_of(it, first + 16 * i);
    tile.k[i] = reinterpret_cast<const BF16*>(at.k) + at.offset;
    tile.v[i] = reinterpret_cast<const BF16*>(at.v) + size_t(at.offset) * size_t(it.dim);
  }
  tile.k_stride = it.step.kv.block_size;
  tile.v_stride = it.dim;
}

// Unpacks a tile of at most kTile keys to the scratch of unpacked floats.
inline void unpack_tile(const Item& it, const BF16Tile& from, int keys, PairTile<Pair>& to) {
  to.k_stride = kTile;
  to.v_stride = it.dim_padded;
  for (int i = 0; i * 16 < keys; i++) {
    Pair* k = reinterpret_cast<Pair*>(it.s.k) + 16 * i;
    Pair* v = reinterpret_cast<Pair*>(it.s.v) + size_t(8 * i) * size_t(it.dim_padded);
    for (int d = 0; d < it.dim; d += 2) store_pairs(k + d / 2 * kTile, from.keys(i, d));
    for (int key = 0; key < min_int(16, keys - 16 * i); key += 2)
      for (int d = 0; d < it.dim; d += 16) store_pairs(v + key / 2 * it.dim_padded + d, from.values(i, key, d));
    to.k[i] = k;
    to.v[i] = v;
  }
}

PL_INLINE BF16* rounded_query(const Item& it, int row) {
  return reinterpret_cast<BF16*>(it.s.codes) + size_t(row) * size_t(it.dim_padded);
}
inline void prepare_queries(const Item& it, const BF16Tile&) {
  for (int i = 0; i < it.num_rows; i++)
    round_row(it.s.q + size_t(i) * size_t(it.dim_padded), it.dim, rounded_query(it, i));
}

// scores[r][16 * (first + c) + lane] = q[r] . k over R rows and C vectors of keys.
template <int R, int C, class E>
PL_INLINE void dot_block(const Item& it, const PairTile<E>& tile, int row, int first, float* scores) {
  const BF16* q = rounded_query(it, row);
  f32x16 acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = set1(0.0f);
  for (int d = 0; d < it.dim; d += 2) {
    bf16x32 x[C];
    for (int c = 0; c < C; c++) x[c] = tile.keys(first + c, d);
    for (int r = 0; r < R; r++) {
      const bf16x32 y = set_pair(q + r * it.dim_padded + d);
      for (int c = 0; c < C; c++) acc[r][c] = dot2(acc[r][c], x[c], y);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(scores + r * kTile + 16 * (first + c), acc[r][c]);
}
template <int R, class E>
PL_INLINE void dot_rows(const Item& it, const PairTile<E>& tile, int row, int vectors, float* scores) {
  constexpr int C = vectors_of(R);
  int i = 0;
  for (; i + C <= vectors; i += C) dot_block<R, C>(it, tile, row, i, scores);
  for (; i < vectors; i++) dot_block<R, 1>(it, tile, row, i, scores);
}

// out[r][16 * C columns] += sum over keys [begin, end), both even, of weight[r][key] * v[key], pair by pair.
template <int R, int C, class E>
PL_INLINE void mix_block(const BF16* weight, const PairTile<E>& tile, int begin, int end, int col, float* out,
                         int o_stride) {
  f32x16 acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = load(out + r * o_stride + col + 16 * c);
  for (int i = begin / 16; i * 16 < end; i++) {
    for (int key = max_int(begin, 16 * i); key < min_int(end, 16 * i + 16); key += 2) {
      bf16x32 x[C];
      for (int c = 0; c < C; c++) x[c] = tile.values(i, key - 16 * i, col + 16 * c);
      for (int r = 0; r < R; r++) {
        const bf16x32 y = set_pair(weight + r * kTile + key);
        for (int c = 0; c < C; c++) acc[r][c] = dot2(acc[r][c], x[c], y);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(out + r * o_stride + col + 16 * c, acc[r][c]);
}
template <int R, class E>
PL_INLINE void mix_rows(const Item& it, const BF16* weight, const PairTile<E>& tile, int begin, int end, int row) {
  constexpr int C = vectors_of(R);
  float* out = it.s.out + size_t(row) * size_t(it.dim_padded);
  if (begin >= end) return;
  int col = 0;
  for (; col + 16 * C <= it.dim; col += 16 * C) mix_block<R, C>(weight, tile, begin, end, col, out, it.dim_padded);
  for (; col < it.dim; col += 16) mix_block<R, 1>(weight, tile, begin, end, col, out, it.dim_padded);
}

// One row's share of a tile that its neighbours do not see, or of which it sees half a pair.
template <class E>
__attribute__((noinline)) void mix_row(const Item& it, const BF16* weight, const PairTile<E>& tile, int begin, int end,
                                       int row) {
  float* out = it.s.out + size_t(row) * size_t(it.dim_padded);
  for (int key = begin / 2 * 2; key < end; key += 2) {
    const uint32_t seen = (key >= begin ? kFirsts : 0) | (key + 1 < end ? kSeconds : 0);
    for (int d = 0; d < it.dim; d += 16) {
      const bf16x32 x = keep(tile.values(key / 16, key % 16, d), seen);
      store(out + d, dot2(load(out + d), x, set_pair(weight + key)));
    }
  }
}

// Softmax of R rows that see the whole tile, side by side: a row alone waits for its maximum, and for its sum. The same
// bits as softmax_tile's.
template <int R>
PL_INLINE void softmax_rows(const Item& it, int row, BF16 (&weight)[R][kTile]) {
  const float* p = it.s.p + row * kTile;
  const f32x16 factor = set1(it.op.scale);
  float new_max[R];
  f32x16 sum[R];
  for (int r = 0; r < R; r++) {
    f32x16 x[4];
    for (int i = 0; i < 4; i++) x[i] = mul(load(p + r * kTile + 16 * i), factor);
    const float tile_max = reduce_max(max(max(x[0], x[1]), max(x[2], x[3]))), so_far = it.s.running[row + r].max;
    new_max[r] = tile_max > so_far ? tile_max : so_far;
  }
  for (int r = 0; r < R; r++) {
    f32x16 x[4];
    for (int i = 0; i < 4; i++) {
      x[i] = QuickExp()(sub(mul(load(p + r * kTile + 16 * i), factor), set1(new_max[r])));
      store_rounded(weight[r] + 16 * i, x[i]);
    }
    sum[r] = add(add(x[0], x[1]), add(x[2], x[3]));
  }
  for (int r = 0; r < R; r++) add_tile(it, row + r, new_max[r], reduce_add(sum[r]));
}

// Scores, softmax and output of R neighbouring rows over the tile of keys [first, first + kTile).
template <int R, class E>
void attend_block(const Item& it, const PairTile<E>& tile, int row, int first) {
  const Row* rows = it.s.rows + row;
  int begin[R], end[R], all_begin = 0, all_end = kTile, any_end = 0;
  for (int r = 0; r < R; r++) {
    begin[r] = max_int(rows[r].begin - first, 0);
    end[r] = min_int(rows[r].end - first, kTile);
    all_begin = max_int(all_begin, (begin[r] + 1) / 2 * 2);
    all_end = min_int(all_end, end[r] / 2 * 2);
    if (end[r] > begin[r]) any_end = max_int(any_end, end[r]);
  }
  if (any_end == 0) return;
  float* p = it.s.p + row * kTile;
  BF16 weight[R][kTile];
  dot_rows<R>(it, tile, row, (any_end + 15) / 16, p);
  if (all_begin == 0 && all_end == kTile && it.op.softcap == 0) {
    softmax_rows<R>(it, row, weight);
  } else {
    for (int r = 0; r < R; r++) {
      if (end[r] <= begin[r]) continue;
      softmax_tile<QuickExp>(it, row + r, begin[r], end[r]);
      round_row(p + r * kTile, kTile, weight[r]);
    }
  }
  if (all_begin >= all_end) all_begin = all_end = kTile;
  for (int r = 0; r < R; r++) mix_row(it, weight[r], tile, begin[r], min_int(end[r], all_begin), row + r);
  mix_rows<R>(it, weight[0], tile, all_begin, all_end, row);
  for (int r = 0; r < R; r++) mix_row(it, weight[r], tile, max_int(begin[r], all_end), end[r], row + r);
}

// The tail of a draft tree: keys from `first` on. A row's logical pairs are made of the physical keys.
inline void attend_tree_row(const Item& it, const BF16Tile& tile, int row, int first, int keys) {
  const Row& state = it.s.rows[row];
  float *p = it.s.p + row * kTile, *raw = it.s.raw, *out = it.s.out + size_t(row) * size_t(it.dim_padded);
  dot_rows<1>(it, tile, row, (keys + 15) / 16, raw);
  int physical[2 * kTile];
  const int count = tree_keys(it, row, first, physical);
  auto value = [&](int key) { return tile.v[key / 16] + size_t(key % 16) * size_t(tile.v_stride); };
  for (int tile_begin = 0; tile_begin < count; tile_begin += kTile) {
    const int begin = max_int(state.begin - first - tile_begin, 0), end = min_int(count - tile_begin, kTile);
    if (begin >= end) continue;
    if ((first + tile_begin) % kAttendSegment == 0) close_segment(it, row);
    for (int i = 0; i < kTile; i++) p[i] = i < end ? raw[physical[tile_begin + i]] : 0.0f;
    softmax_tile<QuickExp>(it, row, begin, end);
    BF16 weight[kTile];
    round_row(p, kTile, weight);
    for (int i = begin / 2 * 2; i < end; i += 2) {
      const int* at = physical + tile_begin + i;
      const uint32_t seen = (i >= begin ? kFirsts : 0) | (i + 1 < end ? kSeconds : 0);
      const BF16 *a = value(at[0]), *b = value(i + 1 < end ? at[1] : at[0]);
      for (int d = 0; d < it.dim; d += 16)
        store(out + d, dot2(load(out + d), keep(zip(a + d, b + d), seen), set_pair(weight + i)));
    }
  }
}
#else
using BF16Tile = Tile<BF16>;
#endif

}  // namespace paceline::PL_ISA
