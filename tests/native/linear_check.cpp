// Checks the quantize, encode, linear and embed kernels of one ISA (PL_CHECK_ISA) against the scalar ones: equal bits,
// but for bf16 weights on avx512bf16. Needs no Python, so that it also runs under an emulator. Exit code 1 on a
// difference.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels.h"

namespace paceline {
#define PL_DECLARE(isa)                                                                                          \
  namespace isa {                                                                                                \
  void linear(const Op&, const Step&, Work&);                                                                    \
  void embed(const Op&, const Step&, Work&);                                                                     \
  size_t linear_scratch(const Op&, int max_rows);                                                                \
  void quantize_one_row(const float* x, int k, uint8_t* q8_row);                                                 \
  bool encode_rows(Format, const float* w, const float* importance, int rows, int k, bool by_row, uint8_t* out); \
  }
PL_DECLARE(scalar)
PL_DECLARE(PL_CHECK_ISA)
}  // namespace paceline

namespace {

using namespace paceline;
#define PL_STR2(x) #x
#define PL_STR(x) PL_STR2(x)

struct Source {
  const char* name;
  Format format;
  int weights, bytes;
  int scales[2];
};  // scales: f16 fields of a block
constexpr Source kSources[] = {
    {"f32", Format::f32, 1, 4, {-1, -1}},
    {"f16", Format::f16, 1, 2, {-1, -1}},
    {"bf16", Format::bf16, 1, 2, {-1, -1}},
    {"q4_0", Format::q4_0, 32, 18, {0, -1}},
    {"q4_1", Format::q4_1, 32, 20, {0, 2}},
    {"q5_0", Format::q5_0, 32, 22, {0, -1}},
    {"q5_1", Format::q5_1, 32, 24, {0, 2}},
    {"q8_0", Format::q8_0, 32, 34, {0, -1}},
    {"q2_k", Format::q2_k, 256, 84, {80, 82}},
    {"q3_k", Format::q3_k, 256, 110, {108, -1}},
    {"q4_k", Format::q4_k, 256, 144, {0, 2}},
    {"q5_k", Format::q5_k, 256, 176, {0, 2}},
    {"q6_k", Format::q6_k, 256, 210, {208, -1}},
    {"iq4_nl", Format::iq4_nl, 32, 18, {0, -1}},
    {"i4_g64", Format::i4_g64, 64, 34, {0, -1}},
    {"i4_g128", Format::i4_g128, 128, 66, {0, -1}},
    {"i4m_g64", Format::i4m_g64, 64, 36, {0, 2}},
    {"i4m_g128", Format::i4m_g128, 128, 68, {0, 2}},
    {"i8_g64", Format::i8_g64, 64, 66, {0, -1}},
    {"i8_g128", Format::i8_g128, 128, 130, {0, -1}},
    {"i8m_g32", Format::i8m_g32, 32, 36, {0, 2}},
    {"i8m_g64", Format::i8m_g64, 64, 68, {0, 2}},
    {"i8m_g128", Format::i8m_g128, 128, 132, {0, 2}},
    {"f8_g32", Format::f8_g32, 32, 34, {0, -1}},
    {"f8_g64", Format::f8_g64, 64, 66, {0, -1}},
    {"f8_g128", Format::f8_g128, 128, 130, {0, -1}},
};

uint32_t next_random() {
  static uint32_t state = 12345;
  state = state * 1664525 + 1013904223;
  return state >> 8;
}
float random_float() { return float(int(next_random() % 20001) - 10000) / 5000.0f; }

// Random weights: finite floats, or random blocks with small scales.
std::vector<uint8_t> random_source(const Source& s, int rows, int k) {
  std::vector<uint8_t> data(size_t(rows) * (k / s.weights) * s.bytes);
  for (uint8_t& b : data) b = uint8_t(next_random());
  for (size_t at = 0; at < data.size(); at += size_t(s.bytes)) {
    const float value = random_float();
    const uint16_t half = uint16_t(0x1c00 + next_random() % 0x1000 + (next_random() % 2 << 15));
    if (s.format == Format::f32) std::memcpy(&data[at], &value, 4);
    if (s.format == Format::f16) std::memcpy(&data[at], &half, 2);
    if (s.format == Format::bf16) std::memcpy(&data[at], reinterpret_cast<const char*>(&value) + 2, 2);
    for (int field : s.scales) {
      if (field >= 0) std::memcpy(&data[at + size_t(field)], &half, 2);
    }
  }
  return data;
}

struct Buffer {  // 64-byte aligned
  explicit Buffer(size_t n) : data(static_cast<uint8_t*>(std::aligned_alloc(64, (n + 127) / 64 * 64))) {
    std::memset(data, 0, n);
  }
  ~Buffer() { std::free(data); }
  uint8_t* data;
};

struct Isa {
  Kernel linear, embed;
  size_t (*scratch)(const Op&, int);
  void (*quantize)(const float*, int, uint8_t*);
  bool (*encode)(Format, const float*, const float*, int, int, bool, uint8_t*);
};
constexpr Isa kScalar{scalar::linear, scalar::embed, scalar::linear_scratch, scalar::quantize_one_row,
                      scalar::encode_rows};
constexpr Isa kChecked{PL_CHECK_ISA::linear, PL_CHECK_ISA::embed, PL_CHECK_ISA::linear_scratch,
                       PL_CHECK_ISA::quantize_one_row, PL_CHECK_ISA::encode_rows};

void run(Kernel kernel, const Op& op, Step& step, size_t scratch_bytes) {
  Buffer scratch(scratch_bytes);
  step.scratch = &scratch.data;
  int counter = 0;
  Work work;
  work.counter = &counter;
  work.next = [](Work& w, int grain) {
    int& c = *static_cast<int*>(w.counter);
    c += grain;
    return c - grain;
  };
  kernel(op, step, work);
}

std::vector<float> linear_of(const Isa& isa, const Weight& weight, const std::vector<float>& x, int rows,
                             const std::vector<float>& bias, std::vector<float>& residual, bool is_q8) {
  const size_t k = size_t(weight.k), stride = is_q8 ? q8_row_bytes(weight.k) : k * 4, cols = size_t(weight.rows);
  Buffer in(stride * size_t(rows));
  for (size_t t = 0; t < size_t(rows); t++) {
    if (is_q8)
      isa.quantize(&x[t * k], weight.k, in.data + t * stride);
    else
      std::memcpy(in.data + t * stride, &x[t * k], stride);
  }
  std::vector<float> out(cols * size_t(rows));
  Op op;
  op.num_segments = 1;
  op.seg[0] = {weight, bias.data()};
  op.in[0] = {in.data, stride, weight.k, is_q8};
  op.in[1] = {reinterpret_cast<uint8_t*>(residual.data()), cols * 4, weight.rows, false};
  op.out = {reinterpret_cast<uint8_t*>(out.data()), cols * 4, weight.rows, false};
  Step step;
  step.T = rows;
  run(isa.linear, op, step, isa.scratch(op, rows));
  return out;
}

std::vector<float> embed_of(const Isa& isa, const Weight& weight) {
  std::vector<int32_t> ids;
  for (int i = 0; i < weight.rows; i++) ids.push_back(weight.rows - 1 - i);
  std::vector<float> out(size_t(weight.rows) * size_t(weight.k));
  Op op;
  op.num_segments = 1;
  op.seg[0].weight = weight;
  op.scale = 1.5f;
  op.out = {reinterpret_cast<uint8_t*>(out.data()), size_t(weight.k) * 4, weight.k, false};
  Step step;
  step.T = weight.rows;
  step.tokens = ids.data();
  run(isa.embed, op, step, 0);
  return out;
}

bool same_values(const std::vector<float>& a, const std::vector<float>& b, float tolerance) {
  if (tolerance == 0) return std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
  for (size_t i = 0; i < a.size(); i++) {
    if (!(std::fabs(a[i] - b[i]) <= tolerance)) return false;
  }
  return true;
}

int check(const Source& s, int rows, int k, int num_x) {
  const std::vector<uint8_t> source = random_source(s, rows, k);
  const int panels = (rows + kPanel - 1) / kPanel;
  Weight w;
  w.panel_bytes = packed_panel_bytes(s.format, k);
  w.rows = rows;
  w.k = k;
  w.format = s.format;
  Buffer packed(w.panel_bytes * size_t(panels));
  pack_panels(s.format, source.data(), source.size() / size_t(rows), rows, k, nullptr, 0, panels, packed.data);
  w.data = packed.data;
  std::vector<float> x(size_t(num_x) * size_t(k)), bias(static_cast<size_t>(rows)),
      residual(size_t(num_x) * size_t(rows));
  for (auto* v : {&x, &bias, &residual}) {
    for (float& f : *v) f = random_float();
  }
  const bool rounds = s.format == Format::bf16 && std::strcmp(PL_STR(PL_CHECK_ISA), "avx512bf16") == 0;
  const float tolerance = rounds ? 0.01f * std::sqrt(float(k)) * 4 : 0.0f;
  int bad = 0;
  for (bool is_q8 : {false, true}) {
    if (is_q8 && is_float(s.format)) continue;
    if (same_values(linear_of(kScalar, w, x, num_x, bias, residual, is_q8),
                    linear_of(kChecked, w, x, num_x, bias, residual, is_q8), tolerance))
      continue;
    std::printf("linear differs: %s rows %d k %d x rows %d q8 %d\n", s.name, rows, k, num_x, is_q8);
    bad++;
  }
  const bool same_rows = num_x != 1 || same_values(embed_of(kScalar, w), embed_of(kChecked, w), 0);
  if (!same_rows) std::printf("embed differs: %s rows %d k %d\n", s.name, rows, k);
  return bad + !same_rows;
}

int check_quantize() {
  int bad = 0;
  for (int k : {32, 33, 96, 896}) {
    for (float special : {0.0f, 1e30f, 1e-42f, INFINITY, NAN}) {
      std::vector<float> x(static_cast<size_t>(k));
      for (float& f : x) f = special == 0.0f ? 0.0f : random_float();
      x[size_t(k) / 2] = special;
      const size_t bytes = q8_row_bytes(k);
      Buffer a(bytes), b(bytes);
      kScalar.quantize(x.data(), k, a.data);
      kChecked.quantize(x.data(), k, b.data);
      if (std::memcmp(a.data, b.data, bytes) != 0) {
        std::printf("quantize differs: k %d with %g\n", k, double(special));
        bad++;
      }
    }
  }
  return bad;
}

int check_encode(const Source& s) {
  constexpr int rows = 3, k = 768;
  std::vector<float> w(static_cast<size_t>(rows * k)), importance(static_cast<size_t>(k));
  for (float& f : w) f = random_float() * 0.02f;
  for (float& f : importance) f = 1.0f + std::fabs(random_float());
  for (int i = 0; i < 256; i++) w[size_t(i)] = i % 32 < 16 ? 0.0f : w[size_t(i)] * 1e-5f;
  const size_t bytes = size_t(rows) * size_t(k / s.weights) * size_t(s.bytes);
  int bad = 0;
  for (bool by_row : {false, true}) {
    Buffer a(bytes), b(bytes);
    const bool is_known = kScalar.encode(s.format, w.data(), importance.data(), rows, k, by_row, a.data);
    if (kChecked.encode(s.format, w.data(), importance.data(), rows, k, by_row, b.data) == is_known &&
        std::memcmp(a.data, b.data, bytes) == 0)
      continue;
    std::printf("encode differs: %s by row %d\n", s.name, by_row);
    bad++;
  }
  return bad;
}

}  // namespace

int main() {
  int bad = check_quantize(), checks = 0;
  for (const Source& s : kSources) {
    const int small = s.weights == 1 ? 37 : s.weights == 32 ? 32 : 256, large = s.weights >= 128 ? 768 : 576;
    bad += check_encode(s);
    for (int rows : {1, 15, 16, 17, 33}) {
      for (int t : {1, 2, 5, 9}) bad += check(s, rows, small, t), checks++;
    }
    for (int t : {1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 33}) bad += check(s, 33, large, t), checks++;
    if (s.weights != 256) bad += check(s, 17, 896, 5), checks++;
  }
  std::printf("%s: %d shapes, %d differences\n", PL_STR(PL_CHECK_ISA), checks, bad);
  return bad != 0;
}
