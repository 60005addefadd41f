// A lowered plan with its memory: runs one step a call, on the pool's threads. It allocates only for contexts longer
// than any before.
#pragma once
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention_list.h"
#include "kernels.h"
#include "thread_pool.h"

namespace paceline {

// Anonymous zero-filled memory that the system provides page by page, at first touch.
class Mapping {
 public:
  explicit Mapping(size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  uint8_t* data() const { return data_; }

 private:
  uint8_t* data_;
  size_t bytes_;
};

struct StepLimits {
  int max_tokens, max_logit_rows, max_seqs, max_blocks_per_seq;
};
struct KVShape {
  int num_layers, num_blocks, block_size, kv_heads, head_dim;
  KVFormat dtype;
};
struct Bounds {
  int vocab_size, num_positions;
};  // of token ids and positions

// The arrays of one step, shapes checked, contents not yet. Layouts as in backends/base.py.
struct StepArrays {
  int T, B, L, max_blocks;
  const int32_t *tokens, *positions, *slots, *seqs, *tables, *logit_rows;
  const uint64_t* tree;
};

class Program {
 public:
  Program(const KernelTable& table, int num_threads, StepLimits limits, KVShape kv, Bounds bounds,
          const std::vector<size_t>& slot_bytes);

  const KernelTable& table() const { return table_; }
  const StepLimits& limits() const { return limits_; }
  int num_threads() const { return pool_.num_threads(); }
  // The memory of `slot` from `offset`; throws std::invalid_argument where `bytes` do not fit.
  uint8_t* arena(int slot, size_t offset, size_t bytes) const;
  void add_op(const Op& op);

  // Runs all ops. Throws std::invalid_argument, before anything runs, where a value is out of range.
  void forward(const StepArrays& arrays);

  size_t block_bytes() const { return step_.kv.block_bytes; }
  void check_block(int64_t block) const;
  void copy_block(int src, int dst);
  void check_slot(int64_t slot) const;
  void copy_slot(int src, int dst);  // K and V of one token, all layers
  void read_block(int index, uint8_t* to) const;
  void write_block(int index, const uint8_t* from);

  void set_profiling(bool on) { is_profiling_ = on; }
  std::vector<std::pair<OpCode, double>> profile() const;  // seconds so far

 private:
  using Clock = std::chrono::steady_clock;
  struct alignas(64) Counter {
    std::atomic<int> next{0};
  };

  void check(const StepArrays& arrays) const;
  void check_seqs(const StepArrays& arrays) const;
  void check_tree(const StepArrays& arrays) const;
  void run_op(int index, int thread);
  void time_op(int index);
  uint8_t* block(int index) const;

  const KernelTable& table_;
  StepLimits limits_;
  KVShape kv_shape_;
  Bounds bounds_;
  Mapping kv_, arena_;
  std::vector<size_t> slot_begin_;
  std::vector<Op> ops_;
  std::unique_ptr<Counter[]> counters_;
  size_t num_counters_ = 0;
  int attend_group_ = 1;
  bool has_attend_ = false, is_causal_ = true;
  AttentionList attention_;
  std::unique_ptr<Mapping> scratch_;
  std::vector<uint8_t*> scratch_of_thread_;
  size_t scratch_bytes_ = 0;
  Step step_;
  ThreadPool pool_;
  bool is_profiling_ = false;
  int timed_op_ = -1;
  Clock::time_point timed_since_;
  std::vector<double> seconds_;  // of each op
};

const char* op_name(OpCode code);

}  // namespace paceline
