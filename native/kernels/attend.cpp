// Paged attention, one item at a time: some rows of one sequence under one KV head, with all its query heads.
// Over floats here and in attend_tile.h, over pairs of bfloat16 in attend_pairs.h, over int8 codes in attend_codes.h;
// nibbles become those in attend_nibbles.h.
//
// A score is one chain of fused multiply-adds along the head, an output column adds p_j * v_j key by key in logical
// order, and the softmax goes over tiles of 64 logical keys and segments of 512 counted from the sequence's first. So a
// row's bits do not depend on the lane of a key, on the rows beside it, on the thread that took a segment, or on
// whether it is a tree node (law 1).
#include "attend_nibbles.h"
#include "attend_pairs.h"
#include "hadamard.h"

namespace paceline::PL_ISA {
namespace {

constexpr int kDirectRows = 8;  // up to so many query rows, K and V are not worth unpacking to scratch

// Points the tile at keys [first, first + keys) of the sequence, where they lie in the cache.
template <class E>
void point_tile(const Item& it, int first, int keys, Tile<E>& tile) {
  for (int i = 0; i * 16 < keys; i++) {
    const HeadPlace at = place_of(it, first + 16 * i);
    tile.k[i] = reinterpret_cast<const E*>(at.k) + at.offset;
    tile.v[i] = reinterpret_cast<const E*>(at.v) + size_t(at.offset) * size_t(it.dim);
    if (sizeof(E) > 1) continue;
    const size_t scales = size_t(it.step.kv.block_size) * size_t(it.dim);
    tile.k_scale[i] = reinterpret_cast<const uint16_t*>(at.k + scales) + at.offset;
    tile.v_scale[i] = reinterpret_cast<const uint16_t*>(at.v + scales) + at.offset;
  }
  tile.is_scaled = sizeof(E) == 1;
  tile.k_stride = it.step.kv.block_size;
  tile.v_stride = it.dim;
}

// Unpacks a tile of at most kTile keys to float scratch.
template <class E>
void unpack_tile(const Item& it, const Tile<E>& from, int keys, Tile<float>& to) {
  to.k_stride = kTile;
  to.v_stride = it.dim_padded;
  to.is_scaled = from.is_scaled;
  for (int i = 0; i * 16 < keys; i++) {
    float *k = it.s.k + 16 * i, *v = it.s.v + size_t(16 * i) * size_t(it.dim_padded);
    for (int d = 0; d < it.dim; d++) {
      const E* at = from.k[i] + size_t(d) * size_t(from.k_stride);
      fetch(at, from.k_ahead[i]);
      store(k + d * kTile, load_kv(at));
    }
    for (int key = 0; key < min_int(16, keys - 16 * i); key++) {
      for (int d = 0; d < it.dim; d += 16) {
        const E* at = from.v[i] + key * it.dim + d;
        fetch(at, from.v_ahead[i]);
        store(v + key * it.dim_padded + d, load_kv(at));
      }
    }
    to.k[i] = k;
    to.v[i] = v;
    if (!from.is_scaled) continue;
    to.k_scale[i] = from.k_scale[i];
    to.v_scale[i] = from.v_scale[i];
  }
}

// Scales of keys: into a row's scores, and into its probabilities of the keys [begin, end), which it sees.
template <class E>
void scale_scores(const Tile<E>& tile, int vectors, float* scores) {
  for (int i = 0; tile.is_scaled && i < vectors; i++)
    store(scores + 16 * i, mul(load(scores + 16 * i), load_scale(tile.k_scale[i])));
}
template <class E>
void scale_weights(const Tile<E>& tile, int begin, int end, float* p) {
  for (int i = begin / 16; tile.is_scaled && i * 16 < end; i++)
    store(p + 16 * i, mul(load(p + 16 * i), load_scale(tile.v_scale[i])));
}

// One row's share of a tile that its neighbours do not see.
template <class E>
__attribute__((noinline)) void mix_row(const Item& it, const Tile<E>& tile, int row, int begin, int end) {
  float* out = it.s.out + size_t(row) * size_t(it.dim_padded);
  mix_rows<1>(it.s.p + row * kTile, tile, begin, end, it.dim, out, it.dim_padded);
}

// Scores, softmax and output of R neighbouring rows over the tile of keys [first, first + kTile).
template <int R, class E>
void attend_block(const Item& it, const Tile<E>& tile, int row, int first) {
  const Row* rows = it.s.rows + row;
  int begin[R], end[R], all_begin = 0, all_end = kTile, any_end = 0;
  for (int r = 0; r < R; r++) {
    begin[r] = max_int(rows[r].begin - first, 0);
    end[r] = min_int(rows[r].end - first, kTile);
    all_begin = max_int(all_begin, begin[r]);
    all_end = min_int(all_end, end[r]);
    if (end[r] > begin[r]) any_end = max_int(any_end, end[r]);
  }
  if (any_end == 0) return;
  const float* q = it.s.q + size_t(row) * size_t(it.dim_padded);
  float *p = it.s.p + row * kTile, *out = it.s.out + size_t(row) * size_t(it.dim_padded);
  dot_rows<R>(q, it.dim_padded, tile, (any_end + 15) / 16, it.dim, p, kTile);
  for (int r = 0; r < R; r++) {
    if (end[r] <= begin[r]) continue;
    scale_scores(tile, (any_end + 15) / 16, p + r * kTile);
    softmax_tile(it, row + r, begin[r], end[r]);
    scale_weights(tile, begin[r], end[r], p + r * kTile);
  }
  if (all_begin >= all_end) all_begin = all_end = kTile;
  for (int r = 0; r < R; r++) mix_row(it, tile, row + r, begin[r], min_int(end[r], all_begin));
  mix_rows<R>(p, tile, all_begin, all_end, it.dim, out, it.dim_padded);
  for (int r = 0; r < R; r++) mix_row(it, tile, row + r, max_int(begin[r], all_end), end[r]);
}

template <class Tile>
void attend_rows(const Item& it, const Tile& tile, int first) {
  int row = 0;
  // The last 7 and 8 rows go as 4 + 3 and 4 + 4: one or two rows alone would load all keys again for little work.
  for (; it.num_rows - row >= 9 || it.num_rows - row == 6; row += 6) attend_block<6>(it, tile, row, first);
  for (; row + 4 <= it.num_rows; row += 4) attend_block<4>(it, tile, row, first);
  for (; row + 3 <= it.num_rows; row += 3) attend_block<3>(it, tile, row, first);
  for (; row + 2 <= it.num_rows; row += 2) attend_block<2>(it, tile, row, first);
  for (; row < it.num_rows; row++) attend_block<1>(it, tile, row, first);
}

template <class E>
void prepare_queries(const Item&, const Tile<E>&) {}

// The item's rows over a tile of `keys` keys from `first` on.
template <class Unpacked, class Tile>
void attend_unpacked(const Item& it, const Tile& tile, int keys, int first) {
  if (it.num_rows <= kDirectRows) return attend_rows(it, tile, first);
  Unpacked unpacked;
  unpack_tile(it, tile, keys, unpacked);
  attend_rows(it, unpacked, first);
}
template <class E>
void attend_keys(const Item& it, const Tile<E>& tile, int keys, int first) {
  attend_unpacked<Tile<float>>(it, tile, keys, first);
}
#if defined(PL_ISA_avx512bf16)
void attend_keys(const Item& it, const BF16Tile& tile, int keys, int first) {
  attend_unpacked<PairTile<Pair>>(it, tile, keys, first);
}
#endif
void attend_keys(const Item& it, const CodeTile& tile, int, int first) { attend_rows(it, tile, first); }
void attend_keys(const Item& it, const NibbleTile& tile, int keys, int first) {
  CodeTile codes;
  attend_rows(it, as_codes(it, tile, keys, codes), first);
}

// The tail of a draft tree: keys from `first` on. A row's logical tiles are gathered out of the physical keys.
template <class E>
void attend_tree_row(const Item& it, const Tile<E>& tile, int row, int first, int keys) {
  const Row& state = it.s.rows[row];
  const float* q = it.s.q + size_t(row) * size_t(it.dim_padded);
  float* out = it.s.out + size_t(row) * size_t(it.dim_padded);
  float *p = it.s.p + row * kTile, *raw = it.s.raw;
  dot_rows<1>(q, it.dim_padded, tile, (keys + 15) / 16, it.dim, raw, 2 * kTile);
  scale_scores(tile, (keys + 15) / 16, raw);
  float scale[2 * kTile];
  for (int i = 0; tile.is_scaled && i * 16 < keys; i++) store(scale + 16 * i, load_scale(tile.v_scale[i]));
  int physical[2 * kTile];
  const int count = tree_keys(it, row, first, physical);
  for (int tile_begin = 0; tile_begin < count; tile_begin += kTile) {
    int begin = max_int(state.begin - first - tile_begin, 0), end = min_int(count - tile_begin, kTile);
    if (begin >= end) continue;
    if ((first + tile_begin) % kAttendSegment == 0) close_segment(it, row);
    for (int i = 0; i < kTile; i++) p[i] = i < end ? raw[physical[tile_begin + i]] : 0.0f;
    softmax_tile(it, row, begin, end);
    for (int i = begin; i < end; i++) {
      int key = physical[tile_begin + i];
      const E* v = tile.v[key / 16] + size_t(key % 16) * size_t(tile.v_stride);
      f32x16 weight = set1(tile.is_scaled ? p[i] * scale[key] : p[i]);
      for (int d = 0; d < it.dim; d += 16) store(out + d, fma(weight, load_kv(v + d), load(out + d)));
    }
  }
}

// Packs the item's queries and says which keys each row sees.
bool begin_rows(const Item& it, int& first_key, int& end_key) {
  const Seq& seq = it.step.seqs[it.at.seq];
  bool is_tree = false;
  first_key = seq.ctx_len + seq.num_rows;
  end_key = 0;
  for (int i = 0; i < it.num_rows; i++) {
    int row = it.at.row_begin + i / it.group, own = row - seq.first_row;
    uint64_t mask = it.step.tree && it.op.is_causal ? it.step.tree[row] : 0;
    is_tree = is_tree || mask;
    if (mask == 0 && own < 64) mask = (uint64_t(2) << own) - 1;  // causal
    int num_own = !it.op.is_causal ? seq.num_rows : mask ? __builtin_popcountll(mask) : own + 1;
    int end = seq.ctx_len + num_own;
    int begin = it.op.window > 0 ? max_int(0, end - it.op.window) : 0;
    it.s.rows[i] = {begin, end, mask};
    it.s.running[i] = it.s.totals[i] = {kMinusInf, 0.0f};
    first_key = min_int(first_key, begin);
    end_key = max_int(end_key, end);
    int head = it.at.kv_head * it.group + i % it.group;
    float *q = it.s.q + size_t(i) * size_t(it.dim_padded), *out = it.s.out + size_t(i) * size_t(it.dim_padded);
    std::memcpy(q, f32_row(it.op.in[0], row) + head * it.dim, size_t(it.dim) * 4);
    for (int d = 0; d < it.dim_padded; d += 16) store(out + d, set1(0.0f));
  }
  return is_tree;
}

void finish_rows(const Item& it) {
  for (int i = 0; i < it.num_rows; i++) {
    float* total = it.s.total + size_t(i) * size_t(it.dim_padded);
    f32x16 inverse = set1(1.0f / it.s.totals[i].sum);
    for (int d = 0; d < it.dim_padded; d += 16) store(total + d, mul(load(total + d), inverse));
    int head = it.at.kv_head * it.group + i % it.group;
    if (kv_has_nibbles(it.step.kv.dtype, KVPart::values)) mix_columns(total, it.dim);  // as they were before
    store_part(it.op.out, it.at.row_begin + i / it.group, head * it.dim, it.dim, total);
  }
}

// Keeps this segment for the thread that does the split's last one, which may be this one: then merges them all.
void finish_split(const Item& it) {
  AttendSplit& split = it.step.splits[it.at.split];
  const size_t stride = attend_partial_floats(it.dim);
  auto partial = [&](int segment, int row) {
    return it.step.partials + (size_t(split.first_row) + size_t(segment) * size_t(it.num_rows) + size_t(row)) * stride;
  };
  for (int i = 0; i < it.num_rows; i++) {
    float* to = partial(it.at.segment, i);
    std::memcpy(to, &it.s.running[i], sizeof(Softmax));
    std::memcpy(to + 16, it.s.out + size_t(i) * size_t(it.dim_padded), size_t(it.dim_padded) * 4);
  }
  if (__atomic_sub_fetch(&split.left, 1, __ATOMIC_ACQ_REL) > 0) return;
  __atomic_store_n(&split.left, split.segments, __ATOMIC_RELAXED);  // for the next layer
  for (int segment = 0; segment < split.segments; segment++) {
    for (int i = 0; i < it.num_rows; i++) {
      const float* from = partial(segment, i);
      Softmax state;
      std::memcpy(&state, from, sizeof state);
      merge_segment(it, i, state, from + 16);
    }
  }
  finish_rows(it);
}

template <class Tile>
void attend_item(const Item& it) {
  int first_key, end_key;
  bool is_tree = begin_rows(it, first_key, end_key);
  const Seq& seq = it.step.seqs[it.at.seq];
  int shared_end = is_tree ? seq.ctx_len / kTile * kTile : end_key;  // where rows see the same keys in the same places
  int first = first_key / kTile * kTile, end = shared_end;
  if (it.at.segment >= 0) {
    first = max_int(first, it.at.segment * kAttendSegment);
    end = min_int(end, (it.at.segment + 1) * kAttendSegment);
  }
  Tile tile, next;
  prepare_queries(it, tile);
  int keys = min_int(kTile, end - first);  // none where a segment is outside of all windows
  point_tile(it, first, keys, next);
  for (; first < end; first += kTile) {
    if (first % kAttendSegment == 0)
      for (int i = 0; i < it.num_rows; i++) close_segment(it, i);
    tile = next;
    const int num_next = max_int(0, min_int(kTile, end - first - kTile));
    point_tile(it, first + kTile, num_next, next);
    aim_ahead(tile, next, num_next);
    attend_keys(it, tile, keys, first);
    keys = num_next;
  }
  if (it.at.segment >= 0) return finish_split(it);
  if (is_tree) {
    keys = seq.ctx_len + seq.num_rows - shared_end;
    point_tile(it, shared_end, keys, tile);
    aim_ahead(tile, tile, 0);
    CodeTile codes;
    const auto& tail = as_codes(it, tile, keys, codes);
    for (int i = 0; i < it.num_rows; i++) attend_tree_row(it, tail, i, shared_end, keys);
  }
  for (int i = 0; i < it.num_rows; i++) close_segment(it, i);
  finish_rows(it);
}

// Lays the scratch of one thread out from `base` (null: only its size is wanted); returns its bytes.
size_t lay_out(uint8_t* base, size_t rows, size_t dim, Scratch& s) {
  size_t padded = (dim + 15) / 16 * 16, used = 0;
  auto take = [&](size_t floats) {
    float* p = base ? reinterpret_cast<float*>(base + used) : nullptr;
    used += (floats * 4 + 63) / 64 * 64;
    return p;
  };
  s.q = take(rows * padded);
  s.out = take(rows * padded);
  s.total = take(rows * padded);
  s.p = take(rows * kTile);
  s.raw = take(2 * kTile);
  s.codes = reinterpret_cast<int16_t*>(take(rows * padded / 2));
  s.q_scale = take(rows);
  s.k = take(dim * kTile);
  s.v = take(padded * kTile);
  s.running = reinterpret_cast<Softmax*>(take(rows * sizeof(Softmax) / 4));
  s.totals = reinterpret_cast<Softmax*>(take(rows * sizeof(Softmax) / 4));
  s.rows = reinterpret_cast<Row*>(take(rows * sizeof(Row) / 4));
  return used;
}

}  // namespace

size_t attend_scratch(const Op& op) {
  Scratch s;
  int group = op.heads / op.kv_heads;
  size_t rows = size_t(attend_row_tile(group)) * size_t(group);
  return lay_out(nullptr, rows, size_t(op.head_dim), s);
}

void attend(const Op& op, const Step& step, Work& work) {
  int group = op.heads / op.kv_heads, dim = op.head_dim;
  Scratch s;
  lay_out(step.scratch[work.thread], size_t(attend_row_tile(group)) * size_t(group), size_t(dim), s);
  for (int i; (i = work.next(work, 1)) < step.num_items;) {
    const AttendItem& at = step.items[i];
    Item it{op, step, at, s, (at.row_end - at.row_begin) * group, dim, (dim + 15) / 16 * 16, group};
    switch (step.kv.dtype) {
      case KVFormat::int8: attend_item<CodeTile>(it); break;
      case KVFormat::k8v4:
      case KVFormat::int4: attend_item<NibbleTile>(it); break;
      case KVFormat::fp8: attend_item<Tile<FP8>>(it); break;
      case KVFormat::f16: attend_item<Tile<F16>>(it); break;
      case KVFormat::bf16: attend_item<BF16Tile>(it); break;
      default: attend_item<Tile<F32>>(it);
    }
  }
}

}  // namespace paceline::PL_ISA
