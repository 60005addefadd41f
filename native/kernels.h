// The contract between the program (program.cpp) and the kernels (kernels/*.cpp, compiled once per ISA).
// Seen by code of every ISA, so it holds plain data and `static` functions: nothing that a linker could share.
#pragma once
#include <cstddef>
#include <cstdint>

namespace paceline {

// ---- values -------------------------------------------------------------------------------------------------------
// A q8 row of K columns (K padded to Kp, a multiple of 32), one contiguous record of q8_row_bytes(K) bytes:
//   int8  q[Kp]            quants in [-127, 127]; pad is 0
//   float scale[Kp/32]     x = scale * q, scale = max|x| / 127 over the group of 32
//   float sum[Kp/32]       scale * (sum of the group's q), for weight formats with a minimum
//   int16 half_sum[Kp/16]  sum of the q of each half of a group, for exact zero points
// Written by quantize_row (kernels/quantize.h) alone; a row with a NaN or an infinity has NaN scales.
constexpr int kGroup = 32;
static constexpr size_t q8_padded(int k) { return (size_t(k) + 31) / 32 * 32; }
static constexpr size_t q8_row_bytes(int k) { return (q8_padded(k) + q8_padded(k) / 32 * 12 + 63) / 64 * 64; }

struct Mat {  // rows of f32 or q8; a view of columns shares the parent's stride
  uint8_t* data = nullptr;
  size_t stride = 0;  // bytes from row to row
  int cols = 0;
  bool is_q8 = false;
};

// ---- weights ------------------------------------------------------------------------------------------------------
// Source formats keep their GGUF meaning; weights/tensor.py `dequantize` is the definition of each.
// clang-format off
enum class Format : int {
  f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl,
  i4_g64, i4_g128, i4m_g64, i4m_g128, i8_g64, i8_g128, i8m_g32, i8m_g64, i8m_g128,  // ours: m is a minimum
  f8_g32, f8_g64, f8_g128,
  count
};
// clang-format on
// Weights of these meet f32 activations, the others q8.
static constexpr bool is_float(Format f) { return f <= Format::bf16 || f >= Format::f8_g32; }
constexpr int kPanel = 16;  // output rows interleaved in one panel

struct Weight {  // [rows, k] repacked in panels of 16 rows (the last one zero-padded)
  const uint8_t* data = nullptr;
  size_t panel_bytes = 0;
  int rows = 0, k = 0;
  Format format = Format::f32;
};

// ---- one step -----------------------------------------------------------------------------------------------------
struct Seq {
  int32_t first_row, num_rows, ctx_len;
};
// What K and V are kept as. All but the floats have a scale, f16, for each token and head: x = scale * code, and codes
// are integers in [-127, 127], or numbers of 8 bits (E4M3) up to 448. In int4 a group of 32 columns has a step and a
// base, a byte each: code = base + step * nibble, of columns that a Hadamard matrix has mixed (hadamard.h). k8v4 has
// the keys of int8 and the values of int4.
enum class KVFormat : int { f32, f16, bf16, int8, fp8, k8v4, int4, count };
enum class KVPart : int { keys, values };
static constexpr bool kv_is_scaled(KVFormat f) { return f >= KVFormat::int8; }
static constexpr bool kv_has_nibbles(KVFormat f, KVPart part) {
  return f == KVFormat::int4 || (f == KVFormat::k8v4 && part == KVPart::values);
}
static constexpr size_t kv_item_bytes(KVFormat f) { return f == KVFormat::f32 ? 4 : kv_is_scaled(f) ? 1 : 2; }
static constexpr size_t kv_scale_bytes(KVFormat f) { return kv_is_scaled(f) ? 2 : 0; }
constexpr int kNibbleGroup = 32;  // columns with one step and base
static constexpr size_t kv_groups(int head_dim) {
  return (size_t(head_dim) + size_t(kNibbleGroup) - 1) / size_t(kNibbleGroup);
}
// Items of a token's head: two columns share a byte of nibbles.
static constexpr size_t kv_items(KVFormat f, KVPart part, int head_dim) {
  return size_t(head_dim) / (kv_has_nibbles(f, part) ? 2 : 1);
}
// Of the K, or of the V, of one head and layer in a block.
static constexpr size_t kv_head_bytes(KVFormat f, KVPart part, int block_size, int head_dim) {
  const size_t group_bytes = kv_has_nibbles(f, part) ? 2 * kv_groups(head_dim) : 0;
  return size_t(block_size) * (kv_items(f, part, head_dim) * kv_item_bytes(f) + kv_scale_bytes(f) + group_bytes);
}
// [block][layer][K, V][kv_head], and in a head K: [head_dim][block_size], V: [block_size][head_dim]; in int8 K:
// [head_dim / 2][block_size][2], V: [block_size / 2][head_dim][2]; in nibbles, the lower one first, K: [head_dim / 2]
// [block_size] of columns 2i and 2i + 1, V: [block_size][head_dim / 2] of the first and second half of a group. Then
// scale[block_size], if any, and step[groups][block_size], base[groups][block_size] of nibbles. All layers of a block
// lie together, so a short context touches few pages, and a block is copied or written to disk in one piece.
struct KVLayout {
  uint8_t* k = nullptr;  // of the first block and layer
  uint8_t* v = nullptr;
  size_t block_bytes = 0, layer_bytes = 0;  // from one to the next within what holds it
  size_t k_head_bytes = 0, v_head_bytes = 0;
  int block_size = 16, kv_heads = 0, head_dim = 0;
  KVFormat dtype = KVFormat::f16;
};
// A context is attended in segments of so many keys, each with a softmax of its own, merged in their order. So threads
// can share a long context (Flash-Decoding, Dao 2023), and a row's bits do not depend on whether they do (law 1).
constexpr int kAttendSegment = 512;
struct AttendItem {
  int32_t seq, kv_head, row_begin, row_end;  // rows are step rows of one sequence
  int32_t segment = -1, split = -1;          // -1: all segments; else one of them, and the index of its split
};
struct AttendSplit {  // an item cut into its segments, from that of the first key on; the last one done merges them
  int32_t segments, first_row;  // partials are rows [segment][query row] from first_row on
  int32_t left;                 // segments to come
};
// Floats of a partial row: its maximum and sum, then its output.
static constexpr size_t attend_partial_floats(int head_dim) { return 16 + (size_t(head_dim) + 15) / 16 * 16; }
// Rows of an item at most: about 48 query rows reuse a tile of K and V, and long prompts still make many items.
static constexpr int attend_row_tile(int group) { return group < 48 ? 48 / group : 1; }
struct Step {
  int T = 0, B = 0, L = 0, max_blocks = 0;
  const int32_t *tokens = nullptr, *positions = nullptr, *slots = nullptr, *logit_rows = nullptr, *tables = nullptr;
  const Seq* seqs = nullptr;
  const uint64_t* tree = nullptr;
  const AttendItem* items = nullptr;  // one work list a step, longest first, shared by all layers
  int num_items = 0;
  AttendSplit* splits = nullptr;
  float* partials = nullptr;
  KVLayout kv;
  uint8_t** scratch = nullptr;  // [thread] private scratch, scratch_bytes each, 64-byte aligned
  size_t scratch_bytes = 0;
};

// ---- ops ----------------------------------------------------------------------------------------------------------
enum class OpCode : int {
  embed,
  linear,
  rms_norm,
  quantize,
  rope_store,
  attend,
  gated_act,
  add,
  scale,
  softcap,
  select,
  layer_norm,
  gather,
  count
};
enum class EmbedIndex : int { token, position, zero, count };  // what an embed looks its rows up by
constexpr int kMaxSegments = 3;
struct Segment {
  Weight weight;
  const float* bias = nullptr;
};  // out columns follow one another
struct Op {
  OpCode code = OpCode::embed;
  bool logit_rows = false;  // L rows instead of T
  Mat in[3], out;
  Segment seg[kMaxSegments];  // linear: 1 to 3 merged weights; embed: seg[0]
  int num_segments = 0;
  // rms_norm: [0]; layer_norm: weight and bias; rope_store: q-norm and k-norm or null
  const float* norm_weight[2] = {nullptr, nullptr};
  const int32_t* column_order = nullptr;  // gather: [out.cols], columns of in[0]
  const float* rope_table = nullptr;      // [max position][2][rope_dims / 2]: cos, then sin
  // rope_store: q * query_factor and (k - key_shift) * key_factor, [kv_heads][head_dim] each, are what it makes of the
  // turned q and k; all three or none. Factors are powers of two whose products are 1, and what all keys of a head have
  // in common changes no softmax.
  const float *query_factor = nullptr, *key_shift = nullptr, *key_factor = nullptr;
  int rope_dims = 0, heads = 1, kv_heads = 0, head_dim = 0, layer = 0, window = 0, act = 0;
  EmbedIndex index = EmbedIndex::token;
  bool is_causal = true;  // attend: a row sees no later row of its sequence; else it sees them all
  float eps = 0, scale = 1, softcap = 0;
};
// in/out of each op:
//   embed      out[t] = dequantised row tokens[t], positions[t] or 0 of seg[0], times scale
//   linear     in[0] f32, or q8 where the weight formats are quantised; in[1] optional residual (f32, may be out
//   itself);
//              out f32 = in[0] @ W.T + bias + residual
//   rms_norm   in[0] f32; out f32 or q8; `heads` column groups; in[1] optional residual added after the norm
//   layer_norm in[0] f32; out f32 or q8
//   quantize   in[0] f32 -> out q8
//   rope_store in[0] q, in[1] k, in[2] v (f32); out = q normed, rotated and times its factors; k, likewise, and v go to
//              the KV cache
//   attend     in[0] q (f32) -> out f32 or q8
//   gated_act  act(in[0]) * in[1], or act(in[0]) alone -> out f32 or q8; act 0 silu, 1 gelu_tanh, 2 gelu
//   gather     out[t][j] = in[0][t][column_order[j]], f32 -> f32
//   add, scale, softcap, select  f32 -> f32

// ---- work sharing -------------------------------------------------------------------------------------------------
// Threads take items until none is left; who computes an item never changes its bits (law 1). A kernel returns only
// when `next` has gone past its items; a thread that comes late may skip the op, so no kernel divides by num_threads.
struct Work {
  int thread = 0, num_threads = 1;
  int (*next)(Work&, int grain) = nullptr;  // first index of the next `grain` items, counting up from 0 in this op
  void* counter = nullptr;
};
using Kernel = void (*)(const Op&, const Step&, Work&);

// Multiplies and adds from registers `loops` times; a null `run`: the ISA has no such multiply.
struct Probe {
  void (*run)(long loops) = nullptr;
  int macs_per_loop = 0;
};

struct KernelTable {
  const char* isa = nullptr;
  Kernel run[int(OpCode::count)] = {};
  // Private scratch bytes a thread needs for this op.
  size_t (*linear_scratch)(const Op&, int max_rows) = nullptr;
  size_t (*attend_scratch)(const Op&) = nullptr;
  // Parts that tests call on their own.
  void (*quantize_row)(const float* x, int k, uint8_t* q8_row) = nullptr;
  // [rows, k] floats, none beyond 65504, to blocks of `format`; importance [k] weighs the errors of the columns.
  // by_row: all blocks of a row share one scale. False: the format has no such encoder.
  bool (*encode_rows)(Format format, const float* w, const float* importance, int rows, int k, bool by_row,
                      uint8_t* out) = nullptr;
  // What the machine is measured with.
  Probe int8, bf16, f32;
  void (*read_memory)(const float* data, size_t count) = nullptr;
};
#define PL_DECLARE_ISA(isa)          \
  namespace isa {                    \
  const KernelTable& kernel_table(); \
  }
PL_DECLARE_ISA(scalar)
PL_DECLARE_ISA(avx2)
PL_DECLARE_ISA(avx512)
PL_DECLARE_ISA(avx512bf16)
PL_DECLARE_ISA(neon)
#undef PL_DECLARE_ISA

// Repack [rows, k] of GGUF blocks (row_bytes apart) into panels; pack.cpp, ISA-independent. Packed row i is source row
// row_order[i], or i where it is null. dst is panel 0; padding rows and bytes are zero.
constexpr int kPackVersion = 2;  // raise it when a packed byte moves, so that old caches are rewritten
size_t packed_panel_bytes(Format format, int k);
void pack_panels(Format format, const uint8_t* src, size_t row_bytes, int rows, int k, const int32_t* row_order,
                 int panel_begin, int panel_end, uint8_t* dst);

}  // namespace paceline
