// Repack blocks of a source format into panels (layout in kernels/linear_layout.h). Runs once at load, on plain C++.
#include <cstring>

#include "kernels/linear_layout.h"

namespace paceline {
namespace {

constexpr size_t round64(size_t n) { return (n + 63) / 64 * 64; }

// ---- one group of a source row: 32 quants, and the panel's scale fields of that row -------------------------------
struct Lane {       // one row of a panel
  uint8_t* quants;  // of the panel
  uint8_t* scales;  // of the panel
  int row;          // 0 to 15
};

void put16(uint8_t* field, int row, const uint8_t* src) { std::memcpy(field + 2 * row, src, 2); }

// Spread q[32] over the planes of one group.
template <int bits>
void put_quants(uint8_t* group, int row, const uint8_t* q) {
  uint8_t* out = group + 4 * row;
  if constexpr (bits == 8) {
    for (int j = 0; j < 8; j++) std::memcpy(out + 64 * j, q + 4 * j, 4);
    return;
  }
  if constexpr (bits == 4) {
    for (int v = 0; v < 4; v++) {
      for (int i = 0; i < 4; i++) out[64 * v + i] = uint8_t(q[4 * v + i] | q[4 * v + i + 16] << 4);
    }
  }
  if constexpr (bits == 5) {
    for (int i = 0; i < 4; i++) {
      const int b5 = q[20 + i], b6 = q[24 + i], b7 = q[28 + i];
      const int above[5] = {b5 & 7, b5 >> 3 | (b7 >> 3 & 1) << 2, b6 & 7, b6 >> 3 | b7 >> 4 << 2, b7 & 7};
      for (int v = 0; v < 5; v++) out[64 * v + i] = uint8_t(q[4 * v + i] | above[v] << 5);
    }
  }
  if constexpr (bits == 6) {
    for (int v = 0; v < 6; v++) {
      const int block = v / 3 * 4 + v % 3, last = v / 3 * 4 + 3;
      for (int i = 0; i < 4; i++)
        out[64 * v + i] = uint8_t(q[4 * block + i] | (q[4 * last + i] >> 2 * (v % 3) & 3) << 6);
    }
  }
  if constexpr (bits == 2 || bits == 3) {
    for (int v = 0; v < 2; v++) {
      for (int i = 0; i < 4; i++) {
        int byte = 0;
        for (int j = 0; j < 4; j++) byte |= (q[16 * v + 4 * j + i] & 3) << 2 * j;
        out[64 * v + i] = uint8_t(byte);
      }
    }
  }
  if constexpr (bits == 3) {
    for (int i = 0; i < 4; i++) {
      int byte = 0;
      for (int j = 0; j < 8; j++) byte |= (q[4 * j + i] >> 2 & 1) << j;
      out[Planes<3>::high + i] = uint8_t(byte);
    }
  }
}

// ---- blocks of a scale or two for one group of quants, or for the two or four of our own formats
// ---------------------
template <Format format>
struct FlatBlock {
  using L = Layout<format>;
  static constexpr bool has_min = L::scaling == Scaling::min, has_high = L::bits == 5;
  static constexpr int head = 2 + 2 * has_min, quant_bytes = L::bits == 8 ? 32 : 16;
  static constexpr int weights = 32 * L::record_groups, bytes = head + 4 * has_high + L::record_groups * quant_bytes;

  static void pack(const uint8_t* src, const Lane& lane, int block) {
    uint8_t* scales = lane.scales + size_t(block) * L::scale_bytes;
    put16(scales, lane.row, src);
    if (has_min) put16(scales + 32, lane.row, src + 2);
    uint32_t high = 0;
    if (has_high) std::memcpy(&high, src + head, 4);
    for (int g = 0; g < L::record_groups; g++) {
      const uint8_t* quants = src + head + 4 * has_high + g * quant_bytes;
      uint8_t q[32];
      if (L::bits == 8) {
        std::memcpy(q, quants, 32);
      } else {
        for (int i = 0; i < 16; i++) {
          q[i] = uint8_t((quants[i] & 15) | (high >> i & 1) << 4);
          q[i + 16] = uint8_t(quants[i] >> 4 | (high >> (i + 16) & 1) << 4);
        }
      }
      put_quants<L::bits>(lane.quants + (size_t(block) * L::record_groups + g) * L::group_bytes, lane.row, q);
    }
  }
};

// ---- blocks of 256 --------------------------------------------------------------------------------------------------
struct KScales {  // six-bit scale and minimum of group g in the 12 bytes of q4_k and q5_k
  static int scale(const uint8_t* s, int g) { return g < 4 ? s[g] & 63 : (s[g + 4] & 15) | s[g - 4] >> 6 << 4; }
  static int min(const uint8_t* s, int g) { return g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | s[g] >> 6 << 4; }
};

template <Format format>
struct Block256;

template <>
struct Block256<Format::q2_k> {
  static constexpr int bytes = 84;
  static void quants(const uint8_t* src, int g, uint8_t* q) {
    for (int l = 0; l < 32; l++) q[l] = src[16 + g / 4 * 32 + l] >> 2 * (g % 4) & 3;
  }
  static void scales(const uint8_t* src, uint8_t* out, int row) {
    put16(out, row, src + 80);
    put16(out + 32, row, src + 82);
    for (int h = 0; h < 16; h++) out[64 + 16 * h + row] = src[h];
  }
};

template <>
struct Block256<Format::q3_k> {
  static constexpr int bytes = 110;
  static void quants(const uint8_t* src, int g, uint8_t* q) {
    for (int l = 0; l < 32; l++) {
      q[l] = uint8_t((src[32 + g / 4 * 32 + l] >> 2 * (g % 4) & 3) | (src[l] >> g & 1) << 2);
    }
  }
  static void scales(const uint8_t* src, uint8_t* out, int row) {
    put16(out, row, src + 108);
    const uint8_t* s = src + 96;
    for (int h = 0; h < 16; h++) {
      const int low = s[h % 8] >> 4 * (h / 8) & 15, high = s[8 + h % 4] >> 2 * (h / 4) & 3;
      out[32 + 16 * (h / 2) + row] |= uint8_t(low << 4 * (h % 2));
      out[160 + 16 * (h / 4) + row] |= uint8_t(high << 2 * (h % 4));
    }
  }
};

template <>
struct Block256<Format::q4_k> {
  static constexpr int bytes = 144;
  static void quants(const uint8_t* src, int g, uint8_t* q) {
    for (int l = 0; l < 32; l++) q[l] = src[16 + g / 2 * 32 + l] >> 4 * (g % 2) & 15;
  }
  static void scales(const uint8_t* src, uint8_t* out, int row) {
    put16(out, row, src);
    put16(out + 32, row, src + 2);
    for (int g = 0; g < 8; g++) {
      const int min = KScales::min(src + 4, g);
      out[64 + 16 * g + row] = uint8_t(KScales::scale(src + 4, g) | (min & 3) << 6);
      out[192 + 16 * (g / 2) + row] |= uint8_t(min >> 2 << 4 * (g % 2));
    }
  }
};

template <>
struct Block256<Format::q5_k> {
  static constexpr int bytes = 176;
  static void quants(const uint8_t* src, int g, uint8_t* q) {
    for (int l = 0; l < 32; l++) {
      q[l] = uint8_t((src[48 + g / 2 * 32 + l] >> 4 * (g % 2) & 15) | (src[16 + l] >> g & 1) << 4);
    }
  }
  static void scales(const uint8_t* src, uint8_t* out, int row) { Block256<Format::q4_k>::scales(src, out, row); }
};

template <>
struct Block256<Format::q6_k> {
  static constexpr int bytes = 210;
  static void quants(const uint8_t* src, int g, uint8_t* q) {
    const uint8_t* low = src + g / 4 * 64 + g % 2 * 32;
    const uint8_t* high = src + 128 + g / 4 * 32;
    for (int l = 0; l < 32; l++) {
      q[l] = uint8_t((low[l] >> (g % 4 / 2 * 4) & 15) | (high[l] >> 2 * (g % 4) & 3) << 4);
    }
  }
  static void scales(const uint8_t* src, uint8_t* out, int row) {
    put16(out, row, src + 208);
    for (int h = 0; h < 16; h++) out[32 + 16 * h + row] = src[192 + h];
  }
};

template <Format format>
struct SuperBlock {
  static constexpr int weights = 256, bytes = Block256<format>::bytes;
  static void pack(const uint8_t* src, const Lane& lane, int block) {
    using L = Layout<format>;
    Block256<format>::scales(src, lane.scales + size_t(block) * L::scale_bytes, lane.row);
    uint8_t q[32];
    for (int g = 0; g < 8; g++) {
      Block256<format>::quants(src, g, q);
      put_quants<L::bits>(lane.quants + (size_t(block) * 8 + g) * L::group_bytes, lane.row, q);
    }
  }
};

// ---- panels ---------------------------------------------------------------------------------------------------------
template <Format format>
size_t quant_panel_bytes(int k) {
  using L = Layout<format>;
  const size_t groups = size_t(k) / kGroup;
  return round64(groups * L::group_bytes + groups / L::record_groups * L::scale_bytes);
}

template <Format format, class Block>
void pack_row(const uint8_t* src, int k, uint8_t* panel, int row) {
  const Lane lane{panel, panel + size_t(k) / kGroup * Layout<format>::group_bytes, row};
  for (int b = 0; b < k / Block::weights; b++) Block::pack(src + size_t(b) * Block::bytes, lane, b);
}

void pack_row_f32(const uint8_t* src, int k, uint8_t* panel, int row) {
  for (int i = 0; i < k; i++) std::memcpy(panel + 64 * size_t(i) + 4 * row, src + 4 * size_t(i), 4);
}
void pack_row_f16(const uint8_t* src, int k, uint8_t* panel, int row) {
  for (int i = 0; i < k; i++) std::memcpy(panel + 32 * size_t(i) + 2 * row, src + 2 * size_t(i), 2);
}
void pack_row_bf16(const uint8_t* src, int k, uint8_t* panel, int row) {
  for (int i = 0; i < k; i++) std::memcpy(panel + 64 * size_t(i / 2) + 4 * row + 2 * (i % 2), src + 2 * size_t(i), 2);
}

struct Packer {
  size_t (*panel_bytes)(int k);
  void (*row)(const uint8_t* src, int k, uint8_t* panel, int row);
};
template <Format f>
constexpr Packer flat() {
  return {quant_panel_bytes<f>, pack_row<f, FlatBlock<f>>};
}
template <Format f>
constexpr Packer block256() {
  return {quant_panel_bytes<f>, pack_row<f, SuperBlock<f>>};
}

constexpr Packer kPackers[int(Format::count)] = {
    {[](int k) { return size_t(k) * 64; }, pack_row_f32},
    {[](int k) { return round64(size_t(k) * 32); }, pack_row_f16},
    {[](int k) { return (size_t(k) + 1) / 2 * 64; }, pack_row_bf16},
    flat<Format::q4_0>(),
    flat<Format::q4_1>(),
    flat<Format::q5_0>(),
    flat<Format::q5_1>(),
    flat<Format::q8_0>(),
    block256<Format::q2_k>(),
    block256<Format::q3_k>(),
    block256<Format::q4_k>(),
    block256<Format::q5_k>(),
    block256<Format::q6_k>(),
    flat<Format::iq4_nl>(),
    flat<Format::i4_g64>(),
    flat<Format::i4_g128>(),
    flat<Format::i4m_g64>(),
    flat<Format::i4m_g128>(),
    flat<Format::i8_g64>(),
    flat<Format::i8_g128>(),
    flat<Format::i8m_g32>(),
    flat<Format::i8m_g64>(),
    flat<Format::i8m_g128>(),
    flat<Format::f8_g32>(),
    flat<Format::f8_g64>(),
    flat<Format::f8_g128>(),
};

}  // namespace

size_t packed_panel_bytes(Format format, int k) { return kPackers[int(format)].panel_bytes(k); }

void pack_panels(Format format, const uint8_t* src, size_t row_bytes, int rows, int k, const int32_t* row_order,
                 int panel_begin, int panel_end, uint8_t* dst) {
  const Packer& packer = kPackers[int(format)];
  const size_t bytes = packer.panel_bytes(k);
  for (int p = panel_begin; p < panel_end; p++) {
    uint8_t* panel = dst + size_t(p) * bytes;
    std::memset(panel, 0, bytes);
    for (int r = 0; r < kPanel && p * kPanel + r < rows; r++) {
      const int row = p * kPanel + r;
      packer.row(src + size_t(row_order ? row_order[row] : row) * row_bytes, k, panel, r);
    }
  }
}

}  // namespace paceline
