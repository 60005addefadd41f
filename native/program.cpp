#include "program.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

namespace paceline {
namespace {

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Of one layer's K or V in a block.
size_t part_bytes(const KVShape& kv, KVPart part) {
  return size_t(kv.kv_heads) * kv_head_bytes(kv.dtype, part, kv.block_size, kv.head_dim);
}
size_t layer_bytes(const KVShape& kv) { return part_bytes(kv, KVPart::keys) + part_bytes(kv, KVPart::values); }
// Kernels load sixteen values where a head's last eight are left, so the last head needs room behind it.
size_t cache_bytes(const KVShape& kv) { return size_t(kv.num_layers) * size_t(kv.num_blocks) * layer_bytes(kv) + 64; }
size_t total(const std::vector<size_t>& slot_bytes) {
  size_t sum = 64;
  for (size_t bytes : slot_bytes) sum += round_up(bytes, 64);
  return sum;
}

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }
void require(bool ok, const char* name, int64_t index, int64_t value, const std::string& rule) {
  if (!ok)
    fail(std::string(name) + "[" + std::to_string(index) + "] is " + std::to_string(value) + ": it must be " + rule);
}
void check_range(const char* name, const int32_t* values, int64_t count, int64_t end) {
  for (int64_t i = 0; i < count; i++) {
    if (values[i] < 0 || values[i] >= end) require(false, name, i, values[i], "in [0, " + std::to_string(end) + ")");
  }
}
void check_size(const char* name, int value, int limit) {
  if (value > limit)
    fail("the step has " + std::to_string(value) + " " + name + ", the limit is " + std::to_string(limit));
}

int take_shared(Work& work, int grain) {
  return static_cast<std::atomic<int>*>(work.counter)->fetch_add(grain, std::memory_order_relaxed);
}
int take_alone(Work& work, int grain) {
  int* next = static_cast<int*>(work.counter);
  return (*next += grain) - grain;
}

// One token's K, or V, of a head, from key to key of two blocks, or of one. The layouts are KVLayout's.
void copy_head(const KVLayout& kv, KVPart part, const uint8_t* from, size_t src, uint8_t* to, size_t dst) {
  const size_t size = size_t(kv.block_size), items = kv_items(kv.dtype, part, kv.head_dim);
  const size_t item = kv_item_bytes(kv.dtype), scale = kv_scale_bytes(kv.dtype);
  const bool has_nibbles = kv_has_nibbles(kv.dtype, part);
  const bool has_pairs = !has_nibbles && kv_is_scaled(kv.dtype) && kv.dtype != KVFormat::fp8;
  auto copy = [&](size_t to_at, size_t from_at, size_t bytes) { std::memmove(to + to_at, from + from_at, bytes); };
  if (part == KVPart::keys && has_pairs) {
    for (size_t d = 0; d < items; d += 2) copy(d * size + 2 * dst, d * size + 2 * src, 2);
  } else if (part == KVPart::keys) {
    for (size_t d = 0; d < items; d++) copy((d * size + dst) * item, (d * size + src) * item, item);
  } else if (has_pairs) {
    for (size_t d = 0; d < items; d++)
      copy((dst / 2 * items + d) * 2 + dst % 2, (src / 2 * items + d) * 2 + src % 2, 1);
  } else {
    copy(dst * items * item, src * items * item, items * item);
  }
  size_t rest = size * items * item;  // what lies behind the codes
  copy(rest + dst * scale, rest + src * scale, scale);
  rest += size * scale;
  for (size_t g = 0; has_nibbles && g < 2 * kv_groups(kv.head_dim); g++)
    copy(rest + g * size + dst, rest + g * size + src, 1);
}

}  // namespace

Mapping::Mapping(size_t bytes) : bytes_(round_up(bytes, 4096)) {
  void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<uint8_t*>(p);
}
Mapping::~Mapping() { munmap(data_, bytes_); }

Program::Program(const KernelTable& table, int num_threads, StepLimits limits, KVShape kv, Bounds bounds,
                 const std::vector<size_t>& slot_bytes)
    : table_(table),
      limits_(limits),
      kv_shape_(kv),
      bounds_(bounds),
      kv_(cache_bytes(kv)),
      arena_(total(slot_bytes)),
      pool_(num_threads) {
  size_t begin = 0;
  for (size_t bytes : slot_bytes) {
    slot_begin_.push_back(begin);
    begin += round_up(bytes, 64);
  }
  slot_begin_.push_back(begin);
  madvise(kv_.data(), cache_bytes(kv), MADV_HUGEPAGE);  // a hint: the cache works without huge pages
  step_.kv = {kv_.data(),
              kv_.data() + part_bytes(kv, KVPart::keys),
              size_t(kv.num_layers) * layer_bytes(kv),
              layer_bytes(kv),
              kv_head_bytes(kv.dtype, KVPart::keys, kv.block_size, kv.head_dim),
              kv_head_bytes(kv.dtype, KVPart::values, kv.block_size, kv.head_dim),
              kv.block_size,
              kv.kv_heads,
              kv.head_dim,
              kv.dtype};
  scratch_of_thread_.resize(size_t(num_threads));
}

uint8_t* Program::arena(int slot, size_t offset, size_t bytes) const {
  if (slot < 0 || size_t(slot) + 1 >= slot_begin_.size()) fail("there is no arena slot " + std::to_string(slot));
  size_t begin = slot_begin_[size_t(slot)], size = slot_begin_[size_t(slot) + 1] - begin;
  if (offset > size || bytes > size - offset) {
    fail(std::to_string(bytes) + " bytes at " + std::to_string(offset) + " do not fit arena slot " +
         std::to_string(slot));
  }
  return arena_.data() + begin + offset;
}

void Program::add_op(const Op& op) {
  if (!table_.run[int(op.code)]) fail(std::string("the ") + table_.isa + " kernels have no " + op_name(op.code));
  size_t need = 0;
  if (op.code == OpCode::linear) {
    need = table_.linear_scratch(op, op.logit_rows ? limits_.max_logit_rows : limits_.max_tokens);
  } else if (op.code == OpCode::attend) {
    need = table_.attend_scratch(op);
    if (has_attend_ && op.is_causal != is_causal_) fail("attention must be causal in all layers or in none");
    has_attend_ = true;
    is_causal_ = op.is_causal;
    attend_group_ = std::max(attend_group_, op.heads / op.kv_heads);
    size_t tile = size_t(attend_row_tile(attend_group_));
    attention_.reserve((size_t(limits_.max_tokens) / tile + size_t(limits_.max_seqs)) * size_t(kv_shape_.kv_heads));
  } else if (op.code == OpCode::rms_norm || op.code == OpCode::layer_norm) {
    need = size_t(op.in[0].cols) * 4;
  }
  ops_.push_back(op);
  seconds_.push_back(0);
  scratch_bytes_ = std::max(scratch_bytes_, round_up(need, 4096));
}

void Program::check(const StepArrays& a) const {
  check_size("tokens", a.T, limits_.max_tokens);
  check_size("logit rows", a.L, limits_.max_logit_rows);
  check_size("sequences", a.B, limits_.max_seqs);
  check_size("blocks a sequence", a.max_blocks, limits_.max_blocks_per_seq);
  check_range("tokens", a.tokens, a.T, bounds_.vocab_size);
  check_range("positions", a.positions, a.T, bounds_.num_positions);
  check_range("logit_rows", a.logit_rows, a.L, a.T);
  check_seqs(a);
  if (a.tree) check_tree(a);
}

void Program::check_seqs(const StepArrays& a) const {
  int size = kv_shape_.block_size, next_row = 0;
  for (int b = 0; b < a.B; b++) {
    const int32_t *seq = a.seqs + 3 * b, *table = a.tables + size_t(b) * size_t(a.max_blocks);
    int rows = seq[1], ctx = seq[2];
    require(seq[0] == next_row, "first row of seqs", b, seq[0],
            std::to_string(next_row) + ", after the sequence before");
    require(rows >= 1 && rows <= a.T - next_row, "number of rows of seqs", b, rows, "at least 1 and within the step");
    int64_t capacity = int64_t(a.max_blocks) * size;
    require(ctx >= 0 && ctx + int64_t(rows) <= capacity, "context of seqs", b, ctx,
            "at least 0 and fit the block table with the step's rows");
    check_range("block_tables of a sequence", table, (ctx + rows + size - 1) / size, kv_shape_.num_blocks);
    for (int i = 0; i < rows; i++) {
      int slot = table[(ctx + i) / size] * size + (ctx + i) % size;
      require(a.slots[next_row + i] == slot, "slots", next_row + i, a.slots[next_row + i],
              std::to_string(slot) + ", where the block table puts it");
    }
    next_row += rows;
  }
  if (next_row != a.T) fail("seqs cover " + std::to_string(next_row) + " rows, the step has " + std::to_string(a.T));
}

void Program::check_tree(const StepArrays& a) const {
  for (int b = 0; b < a.B; b++) {
    int first = a.seqs[3 * b], rows = a.seqs[3 * b + 1];
    for (int i = 0; i < rows; i++) {
      uint64_t mask = a.tree[first + i];
      if (mask == 0) continue;  // causal
      if (rows > 64)
        fail("sequence " + std::to_string(b) + " has a tree of " + std::to_string(rows) + " rows: at most 64");
      if (mask >> i != 1) fail("tree[" + std::to_string(first + i) + "] must see itself and no later row");
    }
  }
}

void Program::run_op(int index, int thread) {
  const Op& op = ops_[size_t(index)];
  if (thread == 0 && is_profiling_) time_op(index);
  Work work{thread, pool_.num_threads(), take_shared, &counters_[size_t(index)].next};
  int alone = 0;
  if (work.num_threads == 1) {
    work.next = take_alone;
    work.counter = &alone;
  }
  table_.run[int(op.code)](op, step_, work);
}

// Ends the timing of the op before and starts that of `index` (-1: none).
void Program::time_op(int index) {
  Clock::time_point now = Clock::now();
  if (timed_op_ >= 0) seconds_[size_t(timed_op_)] += std::chrono::duration<double>(now - timed_since_).count();
  timed_op_ = index;
  timed_since_ = now;
}

void Program::forward(const StepArrays& a) {
  check(a);
  if (num_counters_ != ops_.size()) {  // the first step: all ops are known
    num_counters_ = ops_.size();
    counters_ = std::make_unique<Counter[]>(num_counters_);
    scratch_ = std::make_unique<Mapping>(scratch_bytes_ * size_t(pool_.num_threads()) + 64);
    for (size_t i = 0; i < scratch_of_thread_.size(); i++)
      scratch_of_thread_[i] = scratch_->data() + i * scratch_bytes_;
  }
  for (size_t i = 0; i < num_counters_; i++) counters_[i].next.store(0, std::memory_order_relaxed);
  step_.T = a.T;
  step_.B = a.B;
  step_.L = a.L;
  step_.max_blocks = a.max_blocks;
  step_.tokens = a.tokens;
  step_.positions = a.positions;
  step_.slots = a.slots;
  step_.logit_rows = a.logit_rows;
  step_.tables = a.tables;
  step_.seqs = reinterpret_cast<const Seq*>(a.seqs);
  step_.tree = a.tree;
  step_.scratch = scratch_of_thread_.data();
  step_.scratch_bytes = scratch_bytes_;
  attention_.build(step_.seqs, a.B, a.tree, is_causal_, kv_shape_.kv_heads, attend_group_, kv_shape_.head_dim,
                   pool_.num_threads());
  attention_.give(step_);
  if (is_profiling_) time_op(0);  // also where other threads finish ops before this one comes
  pool_.run(
      int(ops_.size()), [](void* self, int op, int thread) { static_cast<Program*>(self)->run_op(op, thread); }, this);
  if (is_profiling_) time_op(-1);
}

void Program::check_block(int64_t block) const {
  if (block < 0 || block >= kv_shape_.num_blocks) {
    fail("block " + std::to_string(block) + " is outside of the KV cache of " + std::to_string(kv_shape_.num_blocks) +
         " blocks");
  }
}

uint8_t* Program::block(int index) const { return kv_.data() + size_t(index) * block_bytes(); }
void Program::copy_block(int src, int dst) { std::memmove(block(dst), block(src), block_bytes()); }
void Program::check_slot(int64_t slot) const {
  const int64_t num_slots = int64_t(kv_shape_.num_blocks) * kv_shape_.block_size;
  if (slot < 0 || slot >= num_slots)
    fail("slot " + std::to_string(slot) + " is outside of the KV cache of " + std::to_string(num_slots) + " slots");
}
void Program::copy_slot(int src, int dst) {
  const KVLayout& kv = step_.kv;
  const size_t from_key = size_t(src % kv.block_size), to_key = size_t(dst % kv.block_size);
  const uint8_t* from = block(src / kv.block_size);
  uint8_t* to = block(dst / kv.block_size);
  for (size_t layer = 0; layer < kv.block_bytes; layer += kv.layer_bytes) {
    for (size_t head = 0; head < size_t(kv.kv_heads); head++) {
      const size_t k = layer + head * kv.k_head_bytes;
      const size_t v = layer + size_t(kv.v - kv.k) + head * kv.v_head_bytes;
      copy_head(kv, KVPart::keys, from + k, from_key, to + k, to_key);
      copy_head(kv, KVPart::values, from + v, from_key, to + v, to_key);
    }
  }
}
void Program::read_block(int index, uint8_t* to) const { std::memcpy(to, block(index), block_bytes()); }
void Program::write_block(int index, const uint8_t* from) { std::memcpy(block(index), from, block_bytes()); }

std::vector<std::pair<OpCode, double>> Program::profile() const {
  std::vector<std::pair<OpCode, double>> seconds;
  for (size_t i = 0; i < ops_.size(); i++) seconds.emplace_back(ops_[i].code, seconds_[i]);
  return seconds;
}

const char* op_name(OpCode code) {
  constexpr const char* names[] = {"embed", "linear", "rms_norm", "quantize", "rope_store", "attend", "gated_act",
                                   "add",   "scale",  "softcap",  "select",   "layer_norm", "gather"};
  static_assert(std::size(names) == size_t(OpCode::count));
  return names[int(code)];
}

}  // namespace paceline
