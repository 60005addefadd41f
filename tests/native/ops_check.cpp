// Checks the kernels of one ISA (PL_CHECK_ISA) that are written over f32x16 against the scalar ones: equal bits. Needs
// no Python, so that it also runs under an emulator. Exit code 1 on a difference.
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels.h"

namespace paceline {
#define PL_DECLARE(isa)                           \
  namespace isa {                                 \
  void rms_norm(const Op&, const Step&, Work&);   \
  void rope_store(const Op&, const Step&, Work&); \
  void attend(const Op&, const Step&, Work&);     \
  size_t attend_scratch(const Op&);               \
  void gated_act(const Op&, const Step&, Work&);  \
  void add(const Op&, const Step&, Work&);        \
  void scale(const Op&, const Step&, Work&);      \
  void softcap(const Op&, const Step&, Work&);    \
  void select(const Op&, const Step&, Work&);     \
  void gather(const Op&, const Step&, Work&);     \
  void layer_norm(const Op&, const Step&, Work&); \
  }
PL_DECLARE(scalar)
PL_DECLARE(PL_CHECK_ISA)
}  // namespace paceline

namespace {

using namespace paceline;
#define PL_STR2(x) #x
#define PL_STR(x) PL_STR2(x)

int checks = 0, differences = 0;

float random_float() {
  static uint32_t state = 1;
  state = state * 1664525 + 1013904223;
  return float(int(state >> 12) - (1 << 19)) * 0x1p-17f;  // [-4, 4)
}
std::vector<float> random_floats(size_t n) {
  std::vector<float> values(n);
  for (float& v : values) v = random_float();
  return values;
}
Mat mat(std::vector<float>& values, int cols) {
  return {reinterpret_cast<uint8_t*>(values.data()), size_t(cols) * 4, cols, false};
}

int take(Work& work, int grain) {
  int* next = static_cast<int*>(work.counter);
  return (*next += grain) - grain;
}
void run(Kernel kernel, const Op& op, const Step& step) {
  int next = 0;
  Work work{0, 1, take, &next};
  kernel(op, step, work);
}

struct Memory {  // what one run of an op writes
  std::vector<uint8_t> out, kv, scratch;
  uint8_t* scratch_of_thread[1];
};

Memory run_into(Kernel kernel, Op op, Step step, int rows, size_t kv_bytes, size_t scratch_bytes) {
  Memory m;
  m.out.resize(size_t(rows) * op.out.stride);
  m.scratch.resize(scratch_bytes + 64);
  if (kv_bytes) {
    const ptrdiff_t v_begin = step.kv.v - step.kv.k;
    m.kv.assign(step.kv.k, step.kv.k + kv_bytes);
    step.kv.k = m.kv.data();
    step.kv.v = m.kv.data() + v_begin;
  }
  op.out.data = m.out.data();
  m.scratch_of_thread[0] = m.scratch.data() + (64 - reinterpret_cast<uintptr_t>(m.scratch.data()) % 64) % 64;
  step.scratch = m.scratch_of_thread;
  run(kernel, op, step);
  return m;
}

void compare(const char* name, Kernel scalar, Kernel isa, const Op& op, const Step& step, int rows, size_t kv_bytes,
             size_t scratch_bytes) {
  Memory a = run_into(scalar, op, step, rows, kv_bytes, scratch_bytes),
         b = run_into(isa, op, step, rows, kv_bytes, scratch_bytes);
  checks++;
  if (a.out != b.out || a.kv != b.kv) {
    differences++;
    std::printf("%s: %d columns, q8 %d, head_dim %d, dtype %d differ\n", name, op.out.cols, op.out.is_q8, op.head_dim,
                int(step.kv.dtype));
  }
}

void set_out(Op& op, int cols, bool is_q8) {
  op.out = {nullptr, is_q8 ? q8_row_bytes(cols) : size_t(cols) * 4, cols, is_q8};
}

void check_row_ops(int cols) {
  const int rows = 3;
  std::vector<float> x = random_floats(size_t(rows * cols)), y = random_floats(size_t(rows * cols)),
                     weight = random_floats(size_t(cols)), bias = random_floats(size_t(cols));
  const int32_t selected[] = {2, 0};
  Step step;
  step.T = rows;
  step.L = 2;
  step.logit_rows = selected;
  Op op;
  op.in[0] = mat(x, cols);
  op.in[1] = mat(y, cols);
  op.norm_weight[0] = weight.data();
  op.norm_weight[1] = bias.data();
  op.eps = 1e-5f;
  op.scale = 0.37f;
  op.softcap = 2.5f;
  for (bool is_q8 : {false, true}) {
    set_out(op, cols, is_q8);
    compare("rms_norm", scalar::rms_norm, PL_CHECK_ISA::rms_norm, op, step, rows, 0, size_t(cols) * 4);
    compare("layer_norm", scalar::layer_norm, PL_CHECK_ISA::layer_norm, op, step, rows, 0, size_t(cols) * 4);
    for (op.act = 0; op.act < 3; op.act++) {
      compare("gated_act", scalar::gated_act, PL_CHECK_ISA::gated_act, op, step, rows, 0, 0);
      Op alone = op;
      alone.in[1] = {};
      compare("act", scalar::gated_act, PL_CHECK_ISA::gated_act, alone, step, rows, 0, 0);
    }
  }
  set_out(op, cols, false);
  compare("add", scalar::add, PL_CHECK_ISA::add, op, step, rows, 0, 0);
  compare("scale", scalar::scale, PL_CHECK_ISA::scale, op, step, rows, 0, 0);
  compare("softcap", scalar::softcap, PL_CHECK_ISA::softcap, op, step, rows, 0, 0);
  std::vector<int32_t> order;
  for (int i = 0; i < cols; i++) order.push_back(i % 2 ? cols - i : i / 2);
  op.column_order = order.data();
  compare("gather", scalar::gather, PL_CHECK_ISA::gather, op, step, rows, 0, 0);
  op.logit_rows = true;
  compare("select", scalar::select, PL_CHECK_ISA::select, op, step, 2, 0, 0);
}

// Rope, store and attention of 70 causal rows after `ctx`, or of a tree of 20 rows.
void check_attention(int dim, KVFormat dtype, int ctx, bool is_tree, int window, float softcap) {
  const int heads = 6, kv_heads = 2, rows = is_tree ? 20 : 70, block_size = 32, num_blocks = (ctx + 101) / 32 + 1;
  std::vector<float> q = random_floats(size_t(rows * heads * dim)), k = random_floats(size_t(rows * kv_heads * dim)),
                     v = k;
  std::vector<float> norm = random_floats(size_t(dim)), rope = random_floats(size_t((ctx + rows) * dim));
  const size_t k_head = kv_head_bytes(dtype, KVPart::keys, block_size, dim), part = kv_heads * k_head, layers = 2;
  const size_t v_head = kv_head_bytes(dtype, KVPart::values, block_size, dim), layer = part + kv_heads * v_head;
  std::vector<uint8_t> cache(size_t(num_blocks) * layers * layer + 64);
  for (size_t i = 0; i + 2 <= cache.size(); i += 2) cache[i + 1] = uint8_t(i / 2 % 3 + 0x3c);
  std::vector<int32_t> positions, slots, table;
  for (int i = 0; i < num_blocks; i++) table.push_back(num_blocks - 1 - i);
  std::vector<uint64_t> tree;
  for (int i = 0; i < rows; i++) {
    positions.push_back(ctx + i);
    slots.push_back(table[size_t((ctx + i) / block_size)] * block_size + (ctx + i) % block_size);
    tree.push_back(i < 2 ? (uint64_t(2) << i) - 1 : tree[size_t(i / 2)] | uint64_t(1) << i);
  }
  const Seq seq{0, rows, ctx};
  Step step;
  step.T = rows;
  step.B = 1;
  step.max_blocks = num_blocks;
  step.positions = positions.data();
  step.slots = slots.data();
  step.tables = table.data();
  step.seqs = &seq;
  step.tree = is_tree ? tree.data() : nullptr;
  step.kv = {cache.data(), cache.data() + part, layers * layer, layer, k_head,
             v_head,       block_size,          kv_heads,       dim,   dtype};
  Op op;
  op.in[0] = mat(q, heads * dim);
  op.in[1] = mat(k, kv_heads * dim);
  op.in[2] = mat(v, kv_heads * dim);
  set_out(op, heads * dim, false);
  op.heads = heads;
  op.kv_heads = kv_heads;
  op.head_dim = dim;
  op.norm_weight[0] = op.norm_weight[1] = norm.data();
  op.eps = 1e-6f;
  op.rope_table = rope.data();
  op.rope_dims = dim;
  std::vector<float> shift = random_floats(size_t(kv_heads * dim)), up, down;
  for (int i = 0; i < kv_heads * dim; i++) {
    up.push_back(float(1 << i % 9));
    down.push_back(1.0f / up.back());
  }
  if (kv_is_scaled(dtype)) {
    op.query_factor = up.data();
    op.key_shift = shift.data();
    op.key_factor = down.data();
  }
  op.layer = 1;
  compare("rope_store", scalar::rope_store, PL_CHECK_ISA::rope_store, op, step, rows, cache.size(), 0);
  Memory stored = run_into(scalar::rope_store, op, step, rows, cache.size(), 0);
  step.kv.k = stored.kv.data();
  step.kv.v = stored.kv.data() + part;
  std::vector<AttendItem> items;
  for (int g = 0; g < kv_heads; g++) {
    for (int begin = 0; begin < rows; begin += attend_row_tile(heads / kv_heads)) {
      int end = begin + attend_row_tile(heads / kv_heads);
      items.push_back({0, g, begin, end < rows ? end : rows});
    }
  }
  step.items = items.data();
  step.num_items = int(items.size());
  op.scale = 0.2f;
  op.window = window;
  op.softcap = softcap;
  for (bool is_q8 : {false, true}) {
    if (is_q8 && dim % kGroup) continue;
    set_out(op, heads * dim, is_q8);
    for (bool is_causal : {true, false}) {
      op.is_causal = is_causal || is_tree;
      compare("attend", scalar::attend, PL_CHECK_ISA::attend, op, step, rows, cache.size(), scalar::attend_scratch(op));
    }
  }
}

}  // namespace

int main() {
  for (int cols : {1, 31, 64, 100, 1030, 2100}) check_row_ops(cols);
  for (int dim : {8, 40, 64, 128}) {
    for (KVFormat dtype : {KVFormat::f32, KVFormat::f16, KVFormat::bf16, KVFormat::int8, KVFormat::fp8, KVFormat::k8v4,
                           KVFormat::int4}) {
      check_attention(dim, dtype, 30, false, 0, 0);
      check_attention(dim, dtype, 30, true, 25, 3);
      check_attention(dim, dtype, 470, false, 300, 0);  // over the end of a segment
      check_attention(dim, dtype, 500, true, 0, 0);
    }
  }
  std::printf("%s: %d checks, %d differences\n", PL_STR(PL_CHECK_ISA), checks, differences);
  return differences != 0;
}
