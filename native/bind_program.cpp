// Program for Python: every array is checked here for type, shape and contiguity; program.cpp checks what is in it.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "cpu.h"
#include "program.h"

namespace {

using namespace paceline;
using Array = nb::ndarray<nb::ro, nb::device::cpu>;
using Logits = nb::ndarray<nb::numpy, float, nb::ndim<2>>;
using Place = std::tuple<int, size_t, size_t, int, bool>;  // arena slot, byte offset, row bytes, columns, is q8
using WeightPart = std::tuple<Array, size_t, int, int, std::string, std::optional<Array>>;

// The clock of Python's time.monotonic_ns.
int64_t monotonic_ns() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

Format parse_format(const std::string& name) {
  constexpr const char* names[] = {"f32",     "f16",      "bf16",    "q4_0",     "q4_1",   "q5_0",    "q5_1",
                                   "q8_0",    "q2_k",     "q3_k",    "q4_k",     "q5_k",   "q6_k",    "iq4_nl",
                                   "i4_g64",  "i4_g128",  "i4m_g64", "i4m_g128", "i8_g64", "i8_g128", "i8m_g32",
                                   "i8m_g64", "i8m_g128", "f8_g32",  "f8_g64",   "f8_g128"};
  static_assert(std::size(names) == size_t(Format::count));
  for (size_t i = 0; i < std::size(names); i++)
    if (name == names[i]) return Format(i);
  fail("unknown weight format '" + name + "'");
}
KVFormat parse_kv_format(const std::string& name) {
  constexpr const char* names[] = {"f32", "f16", "bf16", "int8", "fp8", "k8v4", "int4"};
  static_assert(std::size(names) == size_t(KVFormat::count));
  for (size_t i = 0; i < std::size(names); i++)
    if (name == names[i]) return KVFormat(i);
  fail("kv dtype is '" + name + "': choose f16, bf16, f32, int8, fp8, k8v4 or int4");
}
OpCode parse_op(const std::string& name) {
  for (int i = 0; i < int(OpCode::count); i++)
    if (name == op_name(OpCode(i))) return OpCode(i);
  fail("the native program has no op '" + name + "'");
}

template <class T>
const T* check_array(const Array& a, const char* name, size_t ndim) {
  bool contiguous = a.ndim() == ndim;
  int64_t stride = 1;
  for (size_t i = a.ndim(); contiguous && i-- > 0;) {
    contiguous = a.shape(i) <= 1 || a.stride(i) == stride;
    stride *= int64_t(a.shape(i));
  }
  if (a.dtype() != nb::dtype<T>() || !contiguous) {
    fail(std::string(name) + " must be a C-contiguous array of " + std::to_string(ndim) + " dimensions and of " +
         (nb::dtype<T>().code == uint8_t(nb::dlpack::dtype_code::Float) ? "float"
          : nb::dtype<T>().code == uint8_t(nb::dlpack::dtype_code::Int) ? "int"
                                                                        : "uint") +
         std::to_string(sizeof(T) * 8));
  }
  return static_cast<const T*>(a.data());
}
void check_length(const Array& a, const char* name, size_t dim, size_t length) {
  if (a.shape(dim) != length) {
    fail(std::string(name) + " has " + std::to_string(a.shape(dim)) + " entries along dimension " +
         std::to_string(dim) + ": it must have " + std::to_string(length));
  }
}
const float* check_vector(const std::optional<Array>& a, const char* name, size_t least) {
  if (!a) return nullptr;
  const float* p = check_array<float>(*a, name, 1);
  if (a->shape(0) < least)
    fail(std::string(name) + " has " + std::to_string(a->shape(0)) + " values: " + std::to_string(least) + " are read");
  return p;
}

// A Program and the arrays that its ops point into.
class BoundProgram {
 public:
  BoundProgram(int num_threads, const std::optional<std::string>& isa, std::tuple<int, int, int, int> limits,
               std::tuple<int, int, int, int, int, std::string> kv, std::tuple<int, int> bounds,
               const std::vector<size_t>& slot_bytes)
      : program_(choose_table(isa.value_or("")), check_threads(num_threads), std::make_from_tuple<StepLimits>(limits),
                 check_kv(kv), std::make_from_tuple<Bounds>(bounds), slot_bytes) {
    std::tie(num_layers_, std::ignore, std::ignore, kv_heads_, head_dim_, std::ignore) = kv;
    num_positions_ = std::get<1>(bounds);
  }

  void add_op(const std::string& name, const Place& out, const std::vector<Place>& inputs,
              const std::vector<WeightPart>& weights, const std::vector<std::optional<Array>>& norms,
              const std::optional<Array>& rope_table, const std::optional<Array>& evening, bool logit_rows, int heads,
              int kv_heads, int head_dim, int layer, int window, int act, float eps, float scale, float softcap,
              int index, bool is_causal, const std::optional<Array>& column_order) {
    Op op;
    op.code = parse_op(name);
    op.logit_rows = logit_rows;
    op.out = place(out, logit_rows);
    if (inputs.size() > 3 || weights.size() > size_t(kMaxSegments) || norms.size() > 2)
      fail(name + " has too many inputs or weights");
    for (size_t i = 0; i < inputs.size(); i++) op.in[i] = place(inputs[i], logit_rows && op.code != OpCode::select);
    for (const WeightPart& part : weights) op.seg[op.num_segments++] = segment(part);
    op.heads = heads;
    op.kv_heads = kv_heads;
    op.head_dim = head_dim;
    op.layer = layer;
    op.window = window;
    op.act = act;
    op.eps = eps;
    op.scale = scale;
    op.softcap = softcap;
    op.is_causal = is_causal;
    if (index < 0 || index >= int(EmbedIndex::count)) fail(name + " has no index " + std::to_string(index));
    op.index = EmbedIndex(index);
    if (op.code == OpCode::embed && op.index == EmbedIndex::position && op.seg[0].weight.rows < num_positions_)
      fail("an embedding of " + std::to_string(op.seg[0].weight.rows) + " positions serves no " +
           std::to_string(num_positions_));
    if (heads < 1 || kv_heads < 1) fail(name + " needs at least one head");
    const bool norms_rows = op.code == OpCode::rms_norm || op.code == OpCode::layer_norm;
    size_t norm_cols = norms_rows ? size_t(op.in[0].cols / heads) : size_t(head_dim);
    for (size_t i = 0; i < norms.size(); i++)
      op.norm_weight[i] = keep(check_vector(norms[i], "norm weight", norm_cols), norms[i]);
    if (op.code == OpCode::layer_norm && !(op.norm_weight[0] && op.norm_weight[1]))
      fail(name + " needs a weight and a bias");
    if (op.code == OpCode::rope_store || op.code == OpCode::attend) check_attention(op);
    if (op.code == OpCode::gather) set_order(op, column_order);
    if (rope_table) {
      op.rope_table = keep(check_array<float>(*rope_table, "rope_table", 3), rope_table);
      check_length(*rope_table, "rope_table", 0, size_t(num_positions_));
      check_length(*rope_table, "rope_table", 1, 2);
      op.rope_dims = int(rope_table->shape(2)) * 2;
      if (op.rope_dims > head_dim)
        fail("rope_table turns " + std::to_string(op.rope_dims) + " columns of a head of " + std::to_string(head_dim));
    }
    if (evening) {  // of query_factor, key_shift and key_factor
      op.query_factor = keep(check_array<float>(*evening, "evening", 3), evening);
      check_length(*evening, "evening", 0, 3);
      check_length(*evening, "evening", 1, size_t(kv_heads));
      check_length(*evening, "evening", 2, size_t(head_dim));
      op.key_shift = op.query_factor + kv_heads * head_dim;
      op.key_factor = op.key_shift + kv_heads * head_dim;
    }
    program_.add_op(op);
  }

  void set_output(const Place& out) {
    logits_ = place(out, true);
    if (logits_.is_q8 || logits_.stride != size_t(logits_.cols) * 4) fail("the output must be contiguous f32");
  }

  Logits forward(nb::handle self, const Array& tokens, const Array& positions, const Array& slots, const Array& seqs,
                 const Array& tables, const Array& logit_rows, const std::optional<Array>& tree) {
    StepArrays a{};
    a.tokens = check_array<int32_t>(tokens, "tokens", 1);
    a.positions = check_array<int32_t>(positions, "positions", 1);
    a.slots = check_array<int32_t>(slots, "slots", 1);
    a.seqs = check_array<int32_t>(seqs, "seqs", 2);
    a.tables = check_array<int32_t>(tables, "block_tables", 2);
    a.logit_rows = check_array<int32_t>(logit_rows, "logit_rows", 1);
    if (tree) a.tree = check_array<uint64_t>(*tree, "tree", 1);
    check_length(positions, "positions", 0, tokens.shape(0));
    check_length(slots, "slots", 0, tokens.shape(0));
    if (tree) check_length(*tree, "tree", 0, tokens.shape(0));
    check_length(seqs, "seqs", 1, 3);
    check_length(tables, "block_tables", 0, seqs.shape(0));
    for (size_t n : {tokens.shape(0), seqs.shape(0), tables.shape(1), logit_rows.shape(0)})
      if (n > size_t(INT32_MAX)) fail("the step is too large");
    a.T = int(tokens.shape(0));
    a.B = int(seqs.shape(0));
    a.L = int(logit_rows.shape(0));
    a.max_blocks = int(tables.shape(1));
    {
      nb::gil_scoped_release unlocked;
      program_.forward(a);
      forward_end_ns_ = monotonic_ns();
    }
    return Logits(logits_.data, {size_t(a.L), size_t(logits_.cols)}, self);
  }

  void copy_blocks(const std::vector<int64_t>& src, const std::vector<int64_t>& dst) {
    if (src.size() != dst.size()) fail("copy_blocks needs as many sources as destinations");
    check_blocks(src);
    check_blocks(dst);
    for (size_t i = 0; i < src.size(); i++) program_.copy_block(int(src[i]), int(dst[i]));
  }
  // One after the other, so a slot that was written may be read.
  void copy_slots(const std::vector<int64_t>& src, const std::vector<int64_t>& dst) {
    if (src.size() != dst.size()) fail("copy_slots needs as many sources as destinations");
    for (int64_t slot : src) program_.check_slot(slot);
    for (int64_t slot : dst) program_.check_slot(slot);
    for (size_t i = 0; i < src.size(); i++) program_.copy_slot(int(src[i]), int(dst[i]));
  }
  void read_blocks(const std::vector<int64_t>& blocks,
                   nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> out) const {
    check_blocks(blocks);
    check_block_array(blocks.size(), out.shape(0), out.shape(1));
    for (size_t i = 0; i < blocks.size(); i++)
      program_.read_block(int(blocks[i]), out.data() + i * program_.block_bytes());
  }
  void write_blocks(const std::vector<int64_t>& blocks, const Array& data) {
    const uint8_t* from = check_array<uint8_t>(data, "data", 2);
    check_blocks(blocks);
    check_block_array(blocks.size(), data.shape(0), data.shape(1));
    for (size_t i = 0; i < blocks.size(); i++) program_.write_block(int(blocks[i]), from + i * program_.block_bytes());
  }

  Program& program() { return program_; }
  // When the last forward was done: what the caller waits beyond it, it waits for the GIL.
  int64_t forward_end_ns() const { return forward_end_ns_; }

  std::vector<double> op_seconds() const {
    std::vector<double> seconds;
    for (const auto& [code, s] : program_.profile()) seconds.push_back(s);
    return seconds;
  }

 private:
  static int check_threads(int n) {
    if (n < 1 || n > 1024) fail("num_threads is " + std::to_string(n) + ": it must be between 1 and 1024");
    return n;
  }
  static KVShape check_kv(const std::tuple<int, int, int, int, int, std::string>& kv) {
    auto [layers, blocks, size, heads, dim, dtype] = kv;
    KVFormat format = parse_kv_format(dtype);
    if (layers < 1 || blocks < 1 || heads < 1 || int64_t(blocks) * size > INT32_MAX)
      fail("the KV cache has an impossible shape");
    if (size < 16 || size % 16) fail("block_size is " + std::to_string(size) + ": choose a multiple of 16");
    if (dim < 8 || dim % 8 || dim > 256)
      fail("head_dim is " + std::to_string(dim) + ": the native backend takes multiples of 8 up to 256");
    return {layers, blocks, size, heads, dim, format};
  }
  void check_attention(const Op& op) const {
    if (op.kv_heads != kv_heads_ || op.head_dim != head_dim_ || op.heads % op.kv_heads || op.layer < 0 ||
        op.layer >= num_layers_) {
      fail("an attention op does not fit the KV cache's layers, heads or head_dim");
    }
    if (op.out.is_q8 && op.head_dim % kGroup) fail("attend writes q8 only for head_dim a multiple of 32");
  }
  void set_order(Op& op, const std::optional<Array>& order) {
    if (!order) fail("gather needs a column_order");
    op.column_order = keep(check_array<int32_t>(*order, "column_order", 1), order);
    check_length(*order, "column_order", 0, size_t(op.out.cols));
    for (int i = 0; i < op.out.cols; i++)
      if (op.column_order[i] < 0 || op.column_order[i] >= op.in[0].cols)
        fail("column_order[" + std::to_string(i) + "] is " + std::to_string(op.column_order[i]) + ": the input has " +
             std::to_string(op.in[0].cols) + " columns");
  }
  Mat place(const Place& p, bool logit_rows) const {
    auto [slot, offset, stride, cols, is_q8] = p;
    size_t rows = size_t(logit_rows ? program_.limits().max_logit_rows : program_.limits().max_tokens);
    size_t row_bytes = is_q8 ? q8_row_bytes(cols) : size_t(cols) * 4;
    return {program_.arena(slot, offset, (rows - 1) * stride + row_bytes), stride, cols, is_q8};
  }
  template <class T>
  const T* keep(const T* p, const std::optional<Array>& a) {
    if (a) kept_.push_back(*a);
    return p;
  }
  Segment segment(const WeightPart& part) {
    const auto& [data, panel_bytes, rows, k, format, bias] = part;
    Segment s;
    s.weight = {check_array<uint8_t>(data, "packed weight", 1), panel_bytes, rows, k, parse_format(format)};
    size_t panels = (size_t(rows) + kPanel - 1) / kPanel;
    if (panel_bytes < packed_panel_bytes(s.weight.format, k) || data.shape(0) < panels * panel_bytes)
      fail("a packed weight is too short");
    kept_.push_back(data);
    s.bias = keep(check_vector(bias, "bias", size_t(rows)), bias);
    return s;
  }
  void check_blocks(const std::vector<int64_t>& blocks) const {
    for (int64_t block : blocks) program_.check_block(block);
  }
  void check_block_array(size_t blocks, size_t rows, size_t cols) const {
    if (rows != blocks || cols != program_.block_bytes())
      fail("block data must be [blocks, " + std::to_string(program_.block_bytes()) + "] bytes");
  }

  std::vector<Array> kept_;
  Program program_;
  Mat logits_;
  int64_t forward_end_ns_ = 0;
  int num_layers_ = 0, kv_heads_ = 0, head_dim_ = 0, num_positions_ = 0;
};

}  // namespace

void bind_program(nb::module_& m) {
  m.def(
      "active_isa", [] { return choose_table("").isa; }, "Name of the kernels that run where none are asked for.");
  m.def(
      "q8_row_bytes", [](int cols) { return q8_row_bytes(cols); }, "Bytes of a q8 row of so many columns.");
  nb::class_<BoundProgram>(m, "Program")
      .def(nb::init<int, std::optional<std::string>, std::tuple<int, int, int, int>,
                    std::tuple<int, int, int, int, int, std::string>, std::tuple<int, int>, std::vector<size_t>>(),
           nb::kw_only(), nb::arg("num_threads"), nb::arg("isa").none(), nb::arg("limits"), nb::arg("kv"),
           nb::arg("bounds"), nb::arg("slot_bytes"))
      .def("add_op", &BoundProgram::add_op, nb::arg("name"), nb::arg("out"), nb::arg("inputs"), nb::kw_only(),
           nb::arg("weights") = std::vector<WeightPart>(), nb::arg("norms") = std::vector<std::optional<Array>>(),
           nb::arg("rope_table") = nb::none(), nb::arg("evening") = nb::none(), nb::arg("logit_rows") = false,
           nb::arg("heads") = 1, nb::arg("kv_heads") = 1, nb::arg("head_dim") = 0, nb::arg("layer") = 0,
           nb::arg("window") = 0, nb::arg("act") = 0, nb::arg("eps") = 0.0f, nb::arg("scale") = 1.0f,
           nb::arg("softcap") = 0.0f, nb::arg("index") = 0, nb::arg("is_causal") = true,
           nb::arg("column_order") = nb::none())
      .def("set_output", &BoundProgram::set_output)
      .def(
          "forward",
          [](nb::handle self, const Array& tokens, const Array& positions, const Array& slots, const Array& seqs,
             const Array& tables, const Array& logit_rows, const std::optional<Array>& tree) {
            return nb::cast<BoundProgram&>(self).forward(self, tokens, positions, slots, seqs, tables, logit_rows,
                                                         tree);
          },
          nb::arg("tokens"), nb::arg("positions"), nb::arg("slots"), nb::arg("seqs"), nb::arg("block_tables"),
          nb::arg("logit_rows"), nb::arg("tree") = nb::none())
      .def("copy_blocks", &BoundProgram::copy_blocks)
      .def("copy_slots", &BoundProgram::copy_slots)
      .def("read_blocks", &BoundProgram::read_blocks, nb::arg("blocks"), nb::arg("out").noconvert())
      .def("write_blocks", &BoundProgram::write_blocks)
      .def("set_profiling", [](BoundProgram& self, bool on) { self.program().set_profiling(on); })
      .def("op_seconds", &BoundProgram::op_seconds, "Seconds spent so far in each op, while profiling was on.")
      .def_prop_ro("forward_end_ns", &BoundProgram::forward_end_ns,
                   "time.monotonic_ns when the last forward was done; the caller waits for the GIL after it.")
      .def_prop_ro("isa", [](BoundProgram& self) { return self.program().table().isa; })
      .def_prop_ro("num_threads", [](BoundProgram& self) { return self.program().num_threads(); })
      .def_prop_ro("block_bytes", [](BoundProgram& self) { return self.program().block_bytes(); });
}
