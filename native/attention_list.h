// The work of a step's attention, as one list that all layers share.
#pragma once
#include <utility>
#include <vector>

#include "kernels.h"

namespace paceline {

class AttentionList {
 public:
  void reserve(size_t max_items);
  // Lists items for B sequences (`tree` of the step's rows, or null) of kv_heads heads with `group` query heads each.
  void build(const Seq* seqs, int B, const uint64_t* tree, bool is_causal, int kv_heads, int group, int head_dim,
             int num_threads);
  void give(Step& step);

 private:
  struct Entry {
    int64_t cost;
    AttendItem item;
  };
  void split(Entry entry, int end_key, int query_rows);

  std::vector<Entry> entries_;
  std::vector<AttendItem> items_;
  std::vector<AttendSplit> splits_;
  std::vector<float> partials_;
  int num_partials_ = 0;
};

}  // namespace paceline
