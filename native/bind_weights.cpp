// Packing, and the weight kernels one at a time for tests. Checks every size before a kernel sees a pointer.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "bindings.h"
#include "cpu.h"
#include "kernels/linear_layout.h"

namespace {

using namespace paceline;
template <class T, int dims>
using Array = nb::ndarray<const T, nb::ndim<dims>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Segments = std::vector<std::tuple<std::string, Array<uint8_t, 1>, int, int, std::optional<Array<float, 1>>>>;

struct Block {
  const char* name;
  int weights, bytes;
};  // of the source format
constexpr Block kBlocks[int(Format::count)] = {
    {"f32", 1, 4},         {"f16", 1, 2},       {"bf16", 1, 2},         {"q4_0", 32, 18},   {"q4_1", 32, 20},
    {"q5_0", 32, 22},      {"q5_1", 32, 24},    {"q8_0", 32, 34},       {"q2_k", 256, 84},  {"q3_k", 256, 110},
    {"q4_k", 256, 144},    {"q5_k", 256, 176},  {"q6_k", 256, 210},     {"iq4_nl", 32, 18}, {"i4_g64", 64, 34},
    {"i4_g128", 128, 66},  {"i4m_g64", 64, 36}, {"i4m_g128", 128, 68},  {"i8_g64", 64, 66}, {"i8_g128", 128, 130},
    {"i8m_g32", 32, 36},   {"i8m_g64", 64, 68}, {"i8m_g128", 128, 132}, {"f8_g32", 32, 34}, {"f8_g64", 64, 66},
    {"f8_g128", 128, 130},
};

void require(bool ok, const std::string& message) {
  if (!ok) throw std::invalid_argument(message);
}
std::string str(size_t n) { return std::to_string(n); }

// Maps the pages of a file on a thread of its own, before the first step would fault on each of them. If the range is
// unmapped meanwhile the kernel just stops.
void populate_pages(Array<uint8_t, 1> pages) {
  constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ of Linux 5.14; older kernels refuse it, which costs nothing
  void* begin = const_cast<uint8_t*>(pages.data());
  const size_t size = pages.size();
  std::thread([begin, size] { (void)madvise(begin, size, kPopulateRead); }).detach();
}

Format parse_format(const std::string& name) {
  for (int f = 0; f < int(Format::count); f++) {
    if (name == kBlocks[f].name) return Format(f);
  }
  throw std::invalid_argument("unknown weight format '" + name + "'");
}

Format checked(const std::string& name, int k) {
  const Format format = parse_format(name);
  const int block = kBlocks[int(format)].weights;
  require(k > 0 && k <= INT_MAX / 64 && k % block == 0, name + " weights have rows of " + std::to_string(k) +
                                                            " values; they must be a positive multiple of " +
                                                            std::to_string(block));
  return format;
}

const KernelTable& table_of(const std::string& isa) {
  for (const KernelTable* table : usable_tables()) {
    if (isa == table->isa) return *table;
  }
  throw std::invalid_argument("this machine cannot run ISA '" + isa + "'");
}

Weight weight_of(const std::string& name, const Array<uint8_t, 1>& packed, int rows, int k) {
  Weight w;
  w.format = checked(name, k);
  w.panel_bytes = packed_panel_bytes(w.format, k);
  require(rows > 0, "a weight needs rows, not " + std::to_string(rows));
  const size_t need = size_t(rows + kPanel - 1) / kPanel * w.panel_bytes;
  require(packed.size() >= need, "packed " + name + " [" + std::to_string(rows) + ", " + std::to_string(k) +
                                     "] takes " + str(need) + " bytes, got " + str(packed.size()));
  require(reinterpret_cast<uintptr_t>(packed.data()) % 64 == 0, "packed weights must be 64-byte aligned");
  w.data = packed.data();
  w.rows = rows;
  w.k = k;
  return w;
}

void pack(const std::string& name, const Array<uint8_t, 2>& src, int k,
          const std::optional<Array<int32_t, 1>>& row_order, Bytes dst, int panel_begin, int panel_end) {
  const Format format = checked(name, k);
  const Block& block = kBlocks[int(format)];
  const size_t rows = src.shape(0), row_bytes = src.shape(1), need_row = size_t(k) / block.weights * block.bytes;
  require(rows > 0 && rows <= INT_MAX / 2, "cannot pack " + str(rows) + " rows");
  require(row_bytes == need_row,
          name + " rows of " + std::to_string(k) + " values take " + str(need_row) + " bytes, got " + str(row_bytes));
  const int panels = int((rows + kPanel - 1) / kPanel);
  require(0 <= panel_begin && panel_begin <= panel_end && panel_end <= panels,
          "panels " + std::to_string(panel_begin) + " to " + std::to_string(panel_end) + " are outside 0 to " +
              std::to_string(panels));
  const size_t need = size_t(panels) * packed_panel_bytes(format, k);
  require(dst.size() == need, "the packed weight takes " + str(need) + " bytes, dst has " + str(dst.size()));
  const int32_t* order = nullptr;
  if (row_order) {
    require(row_order->size() == rows,
            "row_order has " + str(row_order->size()) + " entries for " + str(rows) + " rows");
    order = row_order->data();
    for (size_t i = 0; i < rows; i++) {
      require(order[i] >= 0 && size_t(order[i]) < rows,
              "row_order[" + str(i) + "] = " + std::to_string(order[i]) + " is outside the weight");
    }
  }
  nb::gil_scoped_release release;
  pack_panels(format, src.data(), row_bytes, int(rows), k, order, panel_begin, panel_end, dst.data());
}

void encode(const std::string& isa, const std::string& name, const Array<float, 2>& w,
            const Array<float, 1>& importance, bool by_row,
            nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> dst) {
  const KernelTable& table = table_of(isa);
  const size_t rows = w.shape(0), k = w.shape(1);
  require(k <= INT_MAX / 64 && rows <= INT_MAX / 2, "the weight is too large");
  const Format format = checked(name, int(k));
  const Block& block = kBlocks[int(format)];
  const size_t row_bytes = k / size_t(block.weights) * size_t(block.bytes);
  require(importance.size() == k, "importance needs one value a column");
  require(dst.shape(0) == rows && dst.shape(1) == row_bytes, "dst must be [" + str(rows) + ", " + str(row_bytes) + "]");
  bool is_known = false;
  {
    nb::gil_scoped_release release;
    is_known = table.encode_rows(format, w.data(), importance.data(), int(rows), int(k), by_row, dst.data());
  }
  require(is_known, "weights cannot be written in " + name + (by_row ? " with one scale a row" : ""));
}

template <class T, size_t dims>
nb::ndarray<nb::numpy, T, nb::ndim<dims>> owned(std::unique_ptr<T[]> data, const size_t (&shape)[dims]) {
  T* p = data.release();
  nb::capsule owner(p, [](void* q) noexcept { delete[] static_cast<T*>(q); });
  return nb::ndarray<nb::numpy, T, nb::ndim<dims>>(p, dims, shape, owner);
}

struct Aligned {  // 64-byte aligned bytes
  explicit Aligned(size_t n) : data(static_cast<uint8_t*>(std::aligned_alloc(64, (n + 127) / 64 * 64)), std::free) {}
  std::unique_ptr<uint8_t, decltype(&std::free)> data;
};

// Run one op on `num_threads` fresh threads.
void run_op(Kernel kernel, const Op& op, Step step, size_t scratch_bytes, int num_threads) {
  std::vector<Aligned> scratch;
  std::vector<uint8_t*> pointers;
  for (int i = 0; i < num_threads; i++) pointers.push_back(scratch.emplace_back(scratch_bytes).data.get());
  step.scratch = pointers.data();
  step.scratch_bytes = scratch_bytes;
  std::atomic<int> counter{0};
  auto take = [&](int thread) {
    Work work;
    work.thread = thread;
    work.num_threads = num_threads;
    work.counter = &counter;
    work.next = [](Work& w, int grain) { return static_cast<std::atomic<int>*>(w.counter)->fetch_add(grain); };
    kernel(op, step, work);
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < num_threads; i++) threads.emplace_back(take, i);
  take(0);
  for (std::thread& t : threads) t.join();
}

auto quantize_rows(const std::string& isa, const Array<float, 2>& x) {
  const KernelTable& table = table_of(isa);
  const size_t rows = x.shape(0), k = x.shape(1);
  require(k > 0 && k <= INT_MAX / 64, "rows need values");
  const size_t stride = q8_row_bytes(int(k));
  std::unique_ptr<uint8_t[]> out(new uint8_t[rows * stride]());
  for (size_t t = 0; t < rows; t++) table.quantize_row(x.data() + t * k, int(k), out.get() + t * stride);
  return owned<uint8_t, 2>(std::move(out), {rows, stride});
}

// x is quantised first where the weights are, unless `quantizes` says no.
auto linear(const std::string& isa, const Array<float, 2>& x, const Segments& segments,
            const std::optional<Array<float, 2>>& residual, int num_threads, bool quantizes) {
  const KernelTable& table = table_of(isa);
  const size_t rows = x.shape(0), k = x.shape(1);
  require(!segments.empty() && segments.size() <= size_t(kMaxSegments),
          "a linear has 1 to 3 weights, not " + str(segments.size()));
  require(num_threads >= 1 && num_threads <= 64, "num_threads must be 1 to 64, not " + std::to_string(num_threads));
  require(rows <= INT_MAX / 2, "too many rows");
  Op op;
  op.code = OpCode::linear;
  size_t cols = 0;
  int num_quantised = 0;
  for (const auto& [name, packed, n, weight_k, bias] : segments) {
    require(size_t(weight_k) == k, "x has " + str(k) + " columns, the weight " + std::to_string(weight_k));
    Segment& s = op.seg[op.num_segments++];
    s.weight = weight_of(name, packed, n, weight_k);
    require(!bias || bias->size() == size_t(n), "a bias needs one value an output row");
    if (bias) s.bias = bias->data();
    cols += size_t(n);
    num_quantised += !is_float(s.weight.format);
  }
  require(num_quantised == 0 || num_quantised == op.num_segments, "float and quantised weights cannot be merged");
  require(!residual || (residual->shape(0) == rows && residual->shape(1) == cols),
          "residual must have the shape of the result");
  const bool is_q8 = num_quantised && quantizes;
  const size_t q8_stride = is_q8 ? q8_row_bytes(int(k)) : 0;
  const Aligned q8(rows * q8_stride);
  op.in[0] = {reinterpret_cast<uint8_t*>(const_cast<float*>(x.data())), k * sizeof(float), int(k), false};
  for (size_t t = 0; is_q8 && t < rows; t++)
    table.quantize_row(x.data() + t * k, int(k), q8.data.get() + t * q8_stride);
  if (is_q8) op.in[0] = {q8.data.get(), q8_stride, int(k), true};
  std::unique_ptr<float[]> out(new float[rows * cols]);
  op.out = {reinterpret_cast<uint8_t*>(out.get()), cols * sizeof(float), int(cols), false};
  if (residual)
    op.in[1] = {reinterpret_cast<uint8_t*>(const_cast<float*>(residual->data())), cols * sizeof(float), int(cols),
                false};
  Step step;
  step.T = int(rows);
  {
    nb::gil_scoped_release release;
    run_op(table.run[int(OpCode::linear)], op, step, table.linear_scratch(op, int(rows)), num_threads);
  }
  return owned<float, 2>(std::move(out), {rows, cols});
}

auto embed(const std::string& isa, const std::string& format, const Array<uint8_t, 1>& packed, int rows, int k,
           const Array<int32_t, 1>& ids, float scale) {
  const KernelTable& table = table_of(isa);
  Op op;
  op.seg[op.num_segments++].weight = weight_of(format, packed, rows, k);
  op.scale = scale;
  for (size_t t = 0; t < ids.size(); t++) {
    require(ids.data()[t] >= 0 && ids.data()[t] < rows,
            "token id " + std::to_string(ids.data()[t]) + " is outside 0 to " + std::to_string(rows - 1));
  }
  std::unique_ptr<float[]> out(new float[ids.size() * size_t(k)]);
  op.out = {reinterpret_cast<uint8_t*>(out.get()), size_t(k) * sizeof(float), k, false};
  Step step;
  step.T = int(ids.size());
  step.tokens = ids.data();
  run_op(table.run[int(OpCode::embed)], op, step, 0, 1);
  return owned<float, 2>(std::move(out), {ids.size(), size_t(k)});
}

}  // namespace

void bind_weights(nb::module_& m) {
  m.attr("PACK_VERSION") = kPackVersion;
  m.def(
      "packed_panel_bytes", [](const std::string& format, int k) { return packed_panel_bytes(checked(format, k), k); },
      nb::arg("format"), nb::arg("k"), "Bytes of one packed panel: 16 rows of k weights.");
  m.def("pack", pack, nb::arg("format"), nb::arg("src"), nb::arg("k"), nb::arg("row_order").none(), nb::arg("dst"),
        nb::arg("panel_begin"), nb::arg("panel_end"),
        "Pack panels of [N, row_bytes] source rows into dst; releases the GIL.");
  m.def("encode", encode, nb::arg("isa"), nb::arg("format"), nb::arg("w"), nb::arg("importance"), nb::arg("by_row"),
        nb::arg("dst"),
        "Write the blocks of `format` nearest to w [N, K] into dst; releases the GIL. No |w| may be above 65504.");
  m.def("populate_pages", populate_pages, nb::arg("pages"), "Map a page-aligned range of a file, in the background.");
  m.def(
      "isas",
      [] {
        std::vector<std::string> names;
        for (const KernelTable* table : usable_tables()) names.emplace_back(table->isa);
        return names;
      },
      "Instruction sets that this machine can run, best first.");
  m.def("quantize_rows", quantize_rows, nb::arg("isa"), nb::arg("x"), "q8 rows of f32 rows, as bytes.");
  m.def("linear", linear, nb::arg("isa"), nb::arg("x"), nb::arg("segments"), nb::arg("residual").none() = nb::none(),
        nb::arg("num_threads") = 1, nb::arg("quantizes") = true,
        "x @ W.T + bias + residual over (format, packed, rows, k, bias) segments.");
  m.def("embed", embed, nb::arg("isa"), nb::arg("format"), nb::arg("packed"), nb::arg("rows"), nb::arg("k"),
        nb::arg("ids"), nb::arg("scale") = 1.0f, "Dequantised rows of a packed weight, times scale.");
}
