// linear: out = x @ W.T + bias + residual over one to three weights. An item of work is one panel times one block of
// rows that fits the cache. Few rows read the packed panel and unpack in registers; more rows unpack it to scratch
// first or, on AVX-512, only its scales, and take two panels at once. Where activations stay f32, quantised weights are
// widened to f32 in scratch.
#include "kernels/linear_tile.h"
#include "kernels/rows.h"

namespace paceline::PL_ISA {
namespace {

constexpr size_t kRowBlockBytes = 224 << 10;  // of activations: they stay in the L2 beside an unpacked panel

// Up to here, unpacking in registers again and again costs less than unpacking to scratch once (measured on Zen 3).
constexpr int kPackedRows = kTileRows >= 8 ? 8 : 4 * kTileRows;
constexpr int kNumSizes = kTileRows >= 8 ? 4 : kTileRows >= 4 ? 3 : 1, kPackedSizes = kNumSizes > 3 ? 3 : kNumSizes;
struct Tiles {
  Tile size[kNumSizes];  // [i] takes 2^i rows
};

template <class Source, int num_sizes>
constexpr Tiles quant_tiles() {
  if constexpr (num_sizes == 4)
    return {{quant_tile<Source, 1>, quant_tile<Source, 2>, quant_tile<Source, 4>, quant_tile<Source, 8>}};
  else if constexpr (num_sizes == 3)
    return {{quant_tile<Source, 1>, quant_tile<Source, 2>, quant_tile<Source, 4>}};
  else
    return {{quant_tile<Source, 1>}};
}
template <Format f>
constexpr Tiles float_tiles() {
  if constexpr (kNumSizes == 4)
    return {{float_tile<f, 1>, float_tile<f, 2>, float_tile<f, 4>, float_tile<f, 8>}};
  else if constexpr (kNumSizes == 3)
    return {{float_tile<f, 1>, float_tile<f, 2>, float_tile<f, 4>}};
  else
    return {{float_tile<f, 1>}};
}

struct FormatKernels {
  Tiles packed, unpacked;
  void (*unpack)(const uint8_t* panel, int num_groups, uint8_t* scratch);  // null: tiles read the packed panel always
  size_t unpacked_group_bytes;
  void (*unpack_floats)(const uint8_t* panel, int num_groups, float* scratch);  // for f32 activations; null: floats
  Tile pair = nullptr;  // kPairRows rows times two panels, whose scales `unpack` unpacks
};
template <Format f>
constexpr FormatKernels quantised() {
  using S = ShapeOf<f>;
#if defined(PL_ISA_avx512) || defined(PL_ISA_avx512bf16)
  return {quant_tiles<Packed<f>, kPackedSizes>(),
          {},
          unpack_scales<f>,
          sizeof(Scales<S::scaling>),
          unpack_floats<f>,
          pair_tile<f>};
#else
  return {quant_tiles<Packed<f>, kPackedSizes>(), quant_tiles<Unpacked<S>, kNumSizes>(), unpack_panel<f>,
          sizeof(UnpackedGroup<S>), unpack_floats<f>};
#endif
}
template <Format f>
constexpr FormatKernels floating() {
  return {float_tiles<f>(), {}, nullptr, 0, nullptr};
}

template <Format f>
constexpr FormatKernels widened() {  // FP8: arithmetic no CPU here has
  return {{}, {}, nullptr, 0, unpack_floats<f>};
}

#if defined(PL_ISA_avx512bf16)
constexpr bool kRoundsRows = true;
constexpr FormatKernels bfloat() {
  return {{{bf16_tile<1>, bf16_tile<2>, bf16_tile<4>, bf16_tile<8>}}, {}, nullptr, 0, nullptr};
}
#else
constexpr bool kRoundsRows = false;
constexpr FormatKernels bfloat() { return floating<Format::bf16>(); }
#endif

constexpr FormatKernels kFormats[int(Format::count)] = {
    floating<Format::f32>(),      floating<Format::f16>(),       bfloat(),
    quantised<Format::q4_0>(),    quantised<Format::q4_1>(),     quantised<Format::q5_0>(),
    quantised<Format::q5_1>(),    quantised<Format::q8_0>(),     quantised<Format::q2_k>(),
    quantised<Format::q3_k>(),    quantised<Format::q4_k>(),     quantised<Format::q5_k>(),
    quantised<Format::q6_k>(),    quantised<Format::iq4_nl>(),   quantised<Format::i4_g64>(),
    quantised<Format::i4_g128>(), quantised<Format::i4m_g64>(),  quantised<Format::i4m_g128>(),
    quantised<Format::i8_g64>(),  quantised<Format::i8_g128>(),  quantised<Format::i8m_g32>(),
    quantised<Format::i8m_g64>(), quantised<Format::i8m_g128>(), widened<Format::f8_g32>(),
    widened<Format::f8_g64>(),    widened<Format::f8_g128>(),
};

constexpr size_t round64(size_t n) { return (n + 63) / 64 * 64; }
int panels_of(const Weight& w) { return (w.rows + kPanel - 1) / kPanel; }

int row_block(size_t row_bytes) {
  constexpr int tile = kHasPairs ? kPairRows : kTileRows;
  const int rows = int(kRowBlockBytes / (row_bytes + 1)) / tile * tile;
  return rows < 4 * tile ? 4 * tile : rows;
}

// Whether quantised weights meet f32 activations, and so are widened to f32 too.
bool widens(const Weight& w, const Op& op) { return kFormats[int(w.format)].unpack_floats && !op.in[0].is_q8; }
bool rounds_rows(const Weight& w) { return kRoundsRows && w.format == Format::bf16; }
size_t rounded_row_bytes(int k) { return round64((size_t(k) + 15) / 16 * 32); }

// f32 rows to bfloat16 rows in scratch, padded with zeros.
void round_rows(const uint8_t* x, size_t stride, int rows, int k, uint8_t* out) {
  for (int t = 0; t < rows; t++) {
    const float* row = (const float*)(x + t * stride);
    uint16_t* to = (uint16_t*)(out + t * rounded_row_bytes(k));
    int i = 0;
    for (; i + 16 <= k; i += 16) store_bf16(to + i, load(row + i));
    if (i == k) continue;
    float tail[16] = {};
    for (int j = i; j < k; j++) tail[j - i] = row[j];
    store_bf16(to + i, load(tail));
  }
}

void skip_rows(TileArgs& a, int rows) {
  a.x += size_t(rows) * a.x_stride;
  a.out += size_t(rows) * a.out_stride;
  if (a.residual) a.residual += size_t(rows) * a.residual_stride;
}

void run_tiles(const Tiles& tiles, TileArgs a, int rows) {
  for (int t = 0; t < rows;) {
    int size = kNumSizes - 1;
    while ((1 << size) > rows - t || !tiles.size[size]) size--;
    tiles.size[size](a);
    t += 1 << size;
    skip_rows(a, 1 << size);
  }
}

struct Panel {  // one panel of one segment, or two
  const Segment* segment;
  int index;
  int column;  // of its first output in out
};
// Panels are counted in units of one or two within each segment.
int units_of(const Weight& w, int unit) { return (panels_of(w) + unit - 1) / unit; }
Panel panel_at(const Op& op, int index, int unit) {
  int column = 0, s = 0;
  for (; index >= units_of(op.seg[s].weight, unit); s++) {
    index -= units_of(op.seg[s].weight, unit);
    column += op.seg[s].weight.rows;
  }
  return {&op.seg[s], index * unit, column + index * unit * kPanel};
}

TileArgs tile_args(const Op& op, const Panel& p, const uint8_t* x, size_t x_stride, int begin) {
  const Weight& w = p.segment->weight;
  TileArgs a;
  a.weight = w.data + size_t(p.index) * w.panel_bytes;
  a.k = w.k;
  a.x = x;
  a.x_stride = x_stride;
  a.out = op.out.data + begin * op.out.stride + size_t(p.column) * sizeof(float);
  a.out_stride = op.out.stride;
  a.bias = p.segment->bias ? p.segment->bias + p.index * kPanel : nullptr;
  a.residual = op.in[1].data ? op.in[1].data + begin * op.in[1].stride + size_t(p.column) * sizeof(float) : nullptr;
  a.residual_stride = op.in[1].stride;
  a.lanes = min_int(w.rows - p.index * kPanel, kPanel);
  return a;
}

// Rows [begin, begin + rows) times one panel.
void run_panel(const Op& op, const Panel& p, const uint8_t* x, size_t x_stride, int begin, int rows, uint8_t* scratch) {
  const Weight& w = p.segment->weight;
  const FormatKernels& kernels = kFormats[int(w.format)];
  TileArgs a = tile_args(op, p, x, x_stride, begin);
  if (widens(w, op)) {
    kernels.unpack_floats(a.weight, w.k / kGroup, (float*)scratch);
    a.weight = scratch;
    run_tiles(kFormats[int(Format::f32)].packed, a, rows);
    return;
  }
  if (rows <= kPackedRows || !kernels.unpacked.size[0]) {
    run_tiles(kernels.packed, a, rows);
    return;
  }
  kernels.unpack(a.weight, w.k / kGroup, scratch);
  a.weight = scratch;
  run_tiles(kernels.unpacked, a, rows);
}

// The same times the panel and its neighbour in the segment, if there is one.
void run_two(const Op& op, Panel p, const uint8_t* x, size_t x_stride, int begin, int rows, uint8_t* scratch) {
  const Weight& w = p.segment->weight;
  const FormatKernels& kernels = kFormats[int(w.format)];
  const int left = w.rows - p.index * kPanel;
  int t = 0;
  if (kernels.pair && left > kPanel && rows > kPackedRows && !widens(w, op)) {
    TileArgs a = tile_args(op, p, x, x_stride, begin);
    a.lanes = min_int(left, 2 * kPanel);
    a.panel_bytes = w.panel_bytes;
    a.scales = scratch;
    const int groups = w.k / kGroup;
    kernels.unpack(a.weight, groups, scratch);
    kernels.unpack(a.weight + w.panel_bytes, groups, scratch + size_t(groups) * kernels.unpacked_group_bytes);
    for (; t + kPairRows <= rows; t += kPairRows) {
      kernels.pair(a);
      skip_rows(a, kPairRows);
    }
  }
  if (t == rows) return;
  run_panel(op, p, x + size_t(t) * x_stride, x_stride, begin + t, rows - t, scratch);
  if (left <= kPanel) return;
  p.index++;
  p.column += kPanel;
  run_panel(op, p, x + size_t(t) * x_stride, x_stride, begin + t, rows - t, scratch);
}

// Panels a thread takes at once: few rows stream, in long runs of memory; many rows want an even end.
int grain(int items, int rows, int num_threads) {
  const int shares = num_threads == 1 ? 1 : rows <= kPackedRows ? 4 * num_threads : 16 * num_threads;
  return items / shares > 1 ? items / shares : 1;
}

}  // namespace

void linear(const Op& op, const Step& step, Work& work) {
  const Mat& in = op.in[0];
  const int rows = op.logit_rows ? step.L : step.T, block = row_block(in.stride), blocks = (rows + block - 1) / block;
  uint8_t* scratch = step.scratch ? step.scratch[work.thread] : nullptr;
  const int unit = kHasPairs && rows > kPackedRows ? 2 : 1;
  int units = 0;
  for (int s = 0; s < op.num_segments; s++) units += units_of(op.seg[s].weight, unit);
  const int take = grain(units * blocks, rows, work.num_threads);
  int rounded = -1;  // the row block that scratch holds as bfloat16
  for (int i; (i = work.next(work, take)) < units * blocks;) {
    const int end = min_int(i + take, units * blocks);
    for (int item = i; item < end; item++) {
      const Panel panel = panel_at(op, item % units, unit);
      const int begin = item / units * block, count = min_int(rows - begin, block);
      const uint8_t* x = in.data + begin * in.stride;
      size_t x_stride = in.stride;
      if (rounds_rows(panel.segment->weight)) {
        if (rounded != begin) round_rows(x, in.stride, count, in.cols, scratch);
        rounded = begin;
        x = scratch;
        x_stride = rounded_row_bytes(in.cols);
      }
      if (unit == 2)
        run_two(op, panel, x, x_stride, begin, count, scratch);
      else
        run_panel(op, panel, x, x_stride, begin, count, scratch);
    }
  }
}

size_t linear_scratch(const Op& op, int max_rows) {
  size_t bytes = 0;
  for (int s = 0; s < op.num_segments; s++) {
    const Weight& w = op.seg[s].weight;
    const int block = row_block(op.in[0].stride);
    size_t need = w.k / kGroup * kFormats[int(w.format)].unpacked_group_bytes * (kHasPairs ? 2 : 1);
    if (widens(w, op)) need = size_t(w.k) * kPanel * sizeof(float);
    if (rounds_rows(w)) need = size_t(max_rows < block ? max_rows : block) * rounded_row_bytes(w.k);
    bytes = need > bytes ? need : bytes;
  }
  return round64(bytes);
}

}  // namespace paceline::PL_ISA
