// clang-format off
// Packed panels: where the bytes of 16 output rows lie. Shared by pack.cpp (writes) and the kernels (read); data only,
// so that the linker has no code of one ISA to hand to another.
//
// A quantised panel is its quants, group of 32 k after group, then its scale records:
//   A group holds 8 blocks; block j is 64 bytes [16 rows][4 k] of k = 4j..4j+3 (the order VNNI, maddubs and dotprod
//   want). Bits of a quant are split in planes of 64 bytes:
//     2 bits  planes v (2):  block 4v+i in bits 2i, 2i+1
//     3 bits  the same for the low two bits, then a plane of block j's high one in bit j
//     4 bits  planes v (4):  block v in the low, block v+4 in the high nibble
//     5 bits  planes v (5):  block v in the low 5 bits; above them block 5 over planes 0, 1, block 6 over 2, 3 (3 bits,
//                            then 2), and block 7: 3 bits in plane 4, then the top bits of planes 1 and 3
//     6 bits  planes v (6):  block 0, 1, 2, 4, 5, 6 in the low 6 bits; above them, 2 bits a plane, block 3, then 7
//     8 bits  planes v (8):  block v
//   So most blocks of 5 and 6 bits are a load and a mask.
//   A scale record serves one group (2 or 4 in ours of 64 and 128, 8 in K-quants), each field as [16 rows]:
//     q4_0 q5_0 q8_0 iq4_nl  d f16
//     i4_* i8_* f8_*         d f16, for as many groups as the format's own group has
//     q4_1 q5_1              d f16, m f16
//     i4m_* i8m_*            d f16, m f16, likewise
//     q2_k                   d f16, dmin f16, byte[16 halves] scale | min << 4
//     q3_k                   d f16, byte[8] low 4 bits of the scales of both halves, byte[4] their high 2 bits, even group
//                            in the low nibble
//     q4_k q5_k              d f16, dmin f16, byte[8] scale | (min & 3) << 6, byte[4] min >> 2, even group in the low nibble
//     q6_k                   d f16, int8[16 halves] scale
// A float panel is [k][16] (f32, f16) or [(k+1)/2][16][2] (bf16).
// clang-format on
#pragma once
#include "kernels.h"

namespace paceline {

template <int bits>
struct Planes;  // byte offsets of the planes in a group
template <>
struct Planes<2> {
  static constexpr int bytes = 128;
};
template <>
struct Planes<3> {
  static constexpr int high = 128, bytes = 192;
};
template <>
struct Planes<4> {
  static constexpr int bytes = 256;
};
template <>
struct Planes<5> {
  static constexpr int bytes = 320;
};
template <>
struct Planes<6> {
  static constexpr int bytes = 384;
};
template <>
struct Planes<8> {
  static constexpr int bytes = 512;
};

// What scales a quant, and so what is added to a row's sum for a group:
//   plain   d * (q - zero)               min     d * q + m
//   halves  d * scale[half] * (q - zero)  halves_min  d * scale[half] * q - dmin * min[half]
enum class Scaling { plain, min, halves, halves_min };

template <Format format>
struct Layout;
#define PL_LAYOUT(format, bits_, scaling_, zero_, groups_, scale_bytes_)                                  \
  template <>                                                                                             \
  struct Layout<Format::format> {                                                                         \
    static constexpr int bits = bits_, zero = zero_, record_groups = groups_, scale_bytes = scale_bytes_; \
    static constexpr int group_bytes = Planes<bits_>::bytes;                                              \
    static constexpr Scaling scaling = Scaling::scaling_;                                                 \
  }
// clang-format off
//        format    bits scaling   zero groups scale bytes
PL_LAYOUT(q4_0,   4,   plain,      8,   1,     32);
PL_LAYOUT(q4_1,   4,   min,        0,   1,     64);
PL_LAYOUT(q5_0,   5,   plain,      16,  1,     32);
PL_LAYOUT(q5_1,   5,   min,        0,   1,     64);
PL_LAYOUT(q8_0,   8,   plain,      0,   1,     32);
PL_LAYOUT(q2_k,   2,   halves_min, 0,   8,     320);
PL_LAYOUT(q3_k,   3,   halves,     4,   8,     224);
PL_LAYOUT(q4_k,   4,   min,        0,   8,     256);
PL_LAYOUT(q5_k,   5,   min,        0,   8,     256);
PL_LAYOUT(q6_k,   6,   halves,     32,  8,     288);
PL_LAYOUT(iq4_nl, 4,   plain,      0,   1,     32);
PL_LAYOUT(i4_g64,   4, plain,      8,   2,     32);
PL_LAYOUT(i4_g128,  4, plain,      8,   4,     32);
PL_LAYOUT(i4m_g64,  4, min,        0,   2,     64);
PL_LAYOUT(i4m_g128, 4, min,        0,   4,     64);
PL_LAYOUT(i8_g64,   8, plain,      0,   2,     32);
PL_LAYOUT(i8_g128,  8, plain,      0,   4,     32);
PL_LAYOUT(i8m_g32,  8, min,        0,   1,     64);
PL_LAYOUT(i8m_g64,  8, min,        0,   2,     64);
PL_LAYOUT(i8m_g128, 8, min,        0,   4,     64);
PL_LAYOUT(f8_g32,   8, plain,      0,   1,     32);
PL_LAYOUT(f8_g64,   8, plain,      0,   2,     32);
PL_LAYOUT(f8_g128,  8, plain,      0,   4,     32);
// clang-format on
#undef PL_LAYOUT

}  // namespace paceline
