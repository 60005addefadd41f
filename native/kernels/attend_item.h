// An item of attention: rows of queries under one KV head, and what they have of softmax and output so far.
#pragma once
#include "rows.h"

namespace paceline::PL_ISA {

constexpr int kTile = 64;                 // logical keys between two rescalings
constexpr int kVectors = 2 * kTile / 16;  // a tree's tail spans at most 63 committed keys and 64 rows
constexpr float kMinusInf = -__builtin_inff();

struct Row {       // one query row: a token under one query head
  int begin, end;  // logical keys it sees
  uint64_t tree;   // which rows of the step it sees, in a sequence of up to 64 rows
};

struct Softmax {  // of the keys so far; sum is 0 where there were none
  float max, sum;
};

struct Scratch {
  float *q, *out, *total;     // [rows][dim_padded]; out: of this segment, total: of those before
  float* p;                   // [rows][kTile] scores, then probabilities
  float* raw;                 // [2 * kTile] a row's scores of a tree's tail in physical order
  int16_t* codes;             // [rows][dim_padded] q over q_scale for codes, q rounded for pairs of bfloat16
  float* q_scale;             // [rows]
  float *k, *v;               // unpacked tile: [head_dim][kTile], [kTile][dim_padded]
  Softmax *running, *totals;  // of out and of total
  Row* rows;
};

struct Item {
  const Op& op;
  const Step& step;
  const AttendItem& at;
  Scratch s;
  int num_rows, dim, dim_padded, group;  // query rows; group: query heads a KV head
};

// Where a head's K and V of a key's block lie.
struct HeadPlace {
  const uint8_t *k, *v;
  int offset;  // of the key in the block
};
PL_INLINE HeadPlace place_of(const Item& it, int key) {
  const KVLayout& kv = it.step.kv;
  const int32_t* table = it.step.tables + size_t(it.at.seq) * size_t(it.step.max_blocks);
  const size_t at = size_t(table[key / kv.block_size]) * kv.block_bytes + size_t(it.op.layer) * kv.layer_bytes;
  const size_t head = size_t(it.at.kv_head);
  return {kv.k + at + head * kv.k_head_bytes, kv.v + at + head * kv.v_head_bytes, key % kv.block_size};
}

// Says how far the tile that comes next is, of which num_next keys count: it is fetched while this one is read.
template <class Tile>
void aim_ahead(Tile& tile, const Tile& next, int num_next) {
  for (int i = 0; i < kVectors; i++) {
    const bool is_wanted = i * 16 < num_next;
    tile.k_ahead[i] = is_wanted ? (const char*)next.k[i] - (const char*)tile.k[i] : 0;
    tile.v_ahead[i] = is_wanted ? (const char*)next.v[i] - (const char*)tile.v[i] : 0;
  }
}

// Fetches what lies `ahead` of p, line by line as this tile is read: a burst would stall the arithmetic.
template <class E>
PL_INLINE void fetch(const E* p, ptrdiff_t ahead) {
  __builtin_prefetch((const char*)p + ahead, 0, 2);
}
PL_INLINE void fetch(const float*, ptrdiff_t) {}  // scratch is near

// The keys of a tail of a draft tree that a row sees, in logical order: the committed ones, then its own ancestors.
PL_INLINE int tree_keys(const Item& it, int row, int first, int* physical) {
  const int committed = it.step.seqs[it.at.seq].ctx_len - first;
  int count = 0;
  for (int key = 0; key < committed; key++) physical[count++] = key;
  for (uint64_t rest = it.s.rows[row].tree; rest; rest &= rest - 1)
    physical[count++] = committed + __builtin_ctzll(rest);
  return count;
}

struct Exp {
  PL_INLINE f32x16 operator()(f32x16 x) const { return exp(x); }
};

// Adds a tile's probabilities to a row's sum, and shrinks what it has so far where the tile raised its maximum.
PL_INLINE void add_tile(const Item& it, int row, float new_max, float tile_sum) {
  Softmax& state = it.s.running[row];
  if (new_max == state.max) {
    state.sum += tile_sum;
    return;
  }
  float *out = it.s.out + size_t(row) * size_t(it.dim_padded), first[16];
  const f32x16 shrink = exp(set1(state.max - new_max));
  store(first, shrink);
  state.sum = __builtin_fmaf(state.sum, first[0], tile_sum);
  state.max = new_max;
  for (int d = 0; d < it.dim_padded; d += 16) store(out + d, mul(load(out + d), shrink));
}

// Turns a row's scores of logical keys [first, first + kTile) into probabilities and rescales what it has so far. The
// row sees keys [begin, end) of the tile; the others get exactly 0.
template <class E = Exp>
__attribute__((noinline)) void softmax_tile(const Item& it, int row, int begin, int end) {
  float* p = it.s.p + row * kTile;
  const f32x16 factor = set1(it.op.scale), cap = set1(it.op.softcap);
  f32x16 x[4];
  if (begin == 0 && end == kTile && it.op.softcap == 0) {
    for (int i = 0; i < 4; i++) x[i] = mul(load(p + 16 * i), factor);
  } else {
    for (int i = begin / 16 * 16; i < end; i += 16) {
      f32x16 s = mul(load(p + i), factor);
      store(p + i, it.op.softcap > 0 ? mul(tanh(div(s, cap)), cap) : s);
    }
    for (int i = 0; i < begin; i++) p[i] = kMinusInf;
    for (int i = end; i < kTile; i++) p[i] = kMinusInf;
    for (int i = 0; i < 4; i++) x[i] = load(p + 16 * i);
  }
  const float tile_max = reduce_max(max(max(x[0], x[1]), max(x[2], x[3]))), so_far = it.s.running[row].max;
  const float new_max = tile_max > so_far ? tile_max : so_far;
  for (int i = 0; i < 4; i++) {
    x[i] = E()(sub(x[i], set1(new_max)));
    store(p + 16 * i, x[i]);
  }
  add_tile(it, row, new_max, reduce_add(add(add(x[0], x[1]), add(x[2], x[3]))));
}

// total = total (+) one segment: `state` and its `out`. Called in the order of the segments.
inline void merge_segment(const Item& it, int row, const Softmax& state, const float* out) {
  if (state.sum == 0) return;
  Softmax& sofar = it.s.totals[row];
  float* total = it.s.total + size_t(row) * size_t(it.dim_padded);
  if (sofar.sum == 0) {
    sofar = state;
    std::memcpy(total, out, size_t(it.dim_padded) * 4);
    return;
  }
  float top = sofar.max > state.max ? sofar.max : state.max, factor[16], weight[16];
  f32x16 a = exp(set1(sofar.max - top)), b = exp(set1(state.max - top));
  store(factor, a);
  store(weight, b);
  sofar = {top, __builtin_fmaf(sofar.sum, factor[0], state.sum * weight[0])};
  for (int d = 0; d < it.dim_padded; d += 16) store(total + d, fma(load(total + d), a, mul(load(out + d), b)));
}

// Ends a row's segment and begins the next one.
inline void close_segment(const Item& it, int row) {
  float* out = it.s.out + size_t(row) * size_t(it.dim_padded);
  merge_segment(it, row, it.s.running[row], out);
  it.s.running[row] = {kMinusInf, 0.0f};
  for (int d = 0; d < it.dim_padded; d += 16) store(out + d, set1(0.0f));
}

}  // namespace paceline::PL_ISA
