// Attention over a cache with nibbles: a tile of them becomes the int8 codes that it stands for, in scratch, once for
// all rows of an item, and attend_codes.h does the rest. So a row's bits are those over such codes (law 1).
#pragma once
#include "attend_codes.h"
#include "nibbles.h"

namespace paceline::PL_ISA {

// Where the keys of a tile lie, sixteen a vector: K at k[i] + pair of columns * stride + key, or where CodeTile has it
// if only values are nibbles; V at v[i] + key * half the columns; steps and bases at ..._steps[i] + group * stride +
// key, the bases behind all steps.
struct NibbleTile {
  const uint8_t *k[kVectors], *v[kVectors], *k_steps[kVectors], *v_steps[kVectors];
  const uint16_t *k_scale[kVectors], *v_scale[kVectors];
  int stride;
  ptrdiff_t k_ahead[kVectors], v_ahead[kVectors];  // bytes from there to the tile that comes next, or 0
};

inline void point_tile(const Item& it, int first, int keys, NibbleTile& tile) {
  const KVLayout& kv = it.step.kv;
  const bool has_nibble_keys = kv_has_nibbles(kv.dtype, KVPart::keys);
  const size_t size = size_t(kv.block_size), k_items = kv_items(kv.dtype, KVPart::keys, it.dim);
  const size_t v_items = kv_items(kv.dtype, KVPart::values, it.dim);
  for (int i = 0; i * 16 < keys; i++) {
    const HeadPlace at = place_of(it, first + 16 * i);
    const uint8_t *k_scale = at.k + size * k_items, *v_scale = at.v + size * v_items;
    tile.k[i] = at.k + at.offset * (has_nibble_keys ? 1 : 2);
    tile.v[i] = at.v + size_t(at.offset) * v_items;
    tile.k_scale[i] = reinterpret_cast<const uint16_t*>(k_scale) + at.offset;
    tile.v_scale[i] = reinterpret_cast<const uint16_t*>(v_scale) + at.offset;
    tile.k_steps[i] = k_scale + 2 * size + at.offset;
    tile.v_steps[i] = v_scale + 2 * size + at.offset;
  }
  tile.stride = int(size);
}

// Sixteen keys: [pairs of columns][key][2].
inline void unpack_keys(const uint8_t* from, const uint8_t* steps, size_t stride, int dim, ptrdiff_t ahead,
                        int8_t* to) {
  const size_t bases = kv_groups(dim) * stride;
  for (int begin = 0; begin < dim; begin += kNibbleGroup, steps += stride) {
    const Steps s = load_steps(steps, steps + bases);
    for (int d = begin; d < min_int(begin + kNibbleGroup, dim); d += 2, from += stride, to += 32) {
      fetch(from, ahead);
      pair_codes<0, 4>(from, s, from, s, to);
    }
  }
}

// Sixteen keys: [pairs of keys][column][2]. Of a short group more is written than it has: what follows comes later.
inline void unpack_values(const uint8_t* from, const uint8_t* steps, size_t stride, int dim, ptrdiff_t ahead,
                          int8_t* to) {
  const size_t bases = kv_groups(dim) * stride, half = size_t(dim) / 2;
  for (int key = 0; key < 16; key += 2, from += dim, steps += 2) {
    const uint8_t *a = from, *step = steps;
    fetch(a, ahead);
    for (int begin = 0; begin < dim; begin += kNibbleGroup, step += stride) {
      const int n = min_int(kNibbleGroup, dim - begin) / 2;
      const Steps first = same_steps(step[0], step[bases]), second = same_steps(step[1], step[bases + 1]);
      pair_codes<0, 0>(a, first, a + half, second, to);
      pair_codes<4, 4>(a, first, a + half, second, to + 2 * n);
      a += n;
      to += 4 * n;
    }
  }
}

// The int8 tile that `from` stands for, in the scratch of unpacked floats.
inline const CodeTile& as_codes(const Item& it, const NibbleTile& from, int keys, CodeTile& to) {
  const size_t stride = size_t(from.stride), vector_bytes = 16 * size_t(it.dim);
  const bool has_nibble_keys = kv_has_nibbles(it.step.kv.dtype, KVPart::keys);
  to.k_stride = has_nibble_keys ? 32 : 2 * from.stride;
  to.v_stride = 2 * it.dim;
  for (int i = 0; i * 16 < keys; i++) {
    int8_t* k = reinterpret_cast<int8_t*>(it.s.k) + size_t(i) * vector_bytes;
    int8_t* v = reinterpret_cast<int8_t*>(it.s.v) + size_t(i) * vector_bytes;
    if (has_nibble_keys) unpack_keys(from.k[i], from.k_steps[i], stride, it.dim, from.k_ahead[i], k);
    unpack_values(from.v[i], from.v_steps[i], stride, it.dim, from.v_ahead[i], v);
    to.k[i] = has_nibble_keys ? k : reinterpret_cast<const int8_t*>(from.k[i]);
    to.v[i] = v;
    to.k_scale[i] = from.k_scale[i];
    to.v_scale[i] = from.v_scale[i];
    to.k_ahead[i] = has_nibble_keys ? 0 : from.k_ahead[i];
    to.v_ahead[i] = 0;
  }
  return to;
}
// What needs no unpacking.
template <class Tile>
const Tile& as_codes(const Item&, const Tile& tile, int, CodeTile&) {
  return tile;
}

inline void prepare_queries(const Item& it, const NibbleTile&) { quantize_queries(it); }

}  // namespace paceline::PL_ISA
