#include "attention_list.h"

#include <algorithm>

namespace paceline {
namespace {

constexpr int kShares = 4;  // an item above a thread's share over this would leave the others waiting for it

bool is_tree(const Seq& seq, const uint64_t* tree) {
  return tree && std::any_of(tree + seq.first_row, tree + seq.first_row + seq.num_rows, [](uint64_t m) { return m; });
}

}  // namespace

void AttentionList::reserve(size_t max_items) {
  entries_.reserve(max_items);
  items_.reserve(max_items);
}

void AttentionList::build(const Seq* seqs, int B, const uint64_t* tree, bool is_causal, int kv_heads, int group,
                          int head_dim, int num_threads) {
  entries_.clear();
  items_.clear();
  splits_.clear();
  num_partials_ = 0;
  const int tile = attend_row_tile(group);
  int64_t total = 0;
  for (int b = 0; b < B; b++) {
    const Seq& seq = seqs[b];
    for (int begin = 0; begin < seq.num_rows; begin += tile) {
      const int end = std::min(begin + tile, seq.num_rows);
      const int64_t cost = int64_t(end - begin) * (seq.ctx_len + (is_causal ? end : seq.num_rows));
      for (int g = 0; g < kv_heads; g++) entries_.push_back({cost, {b, g, seq.first_row + begin, seq.first_row + end}});
      total += cost * kv_heads;
    }
  }
  const int64_t most = total / (int64_t(kShares) * num_threads);
  const size_t num_whole = entries_.size();
  for (size_t i = 0; i < num_whole && num_threads > 1; i++) {
    const Entry entry = entries_[i];
    const Seq& seq = seqs[entry.item.seq];
    const int end_key = seq.ctx_len + (is_causal ? entry.item.row_end - seq.first_row : seq.num_rows);
    if (entry.cost <= most || end_key <= kAttendSegment || is_tree(seq, tree)) continue;
    entries_[i].cost = 0;  // its segments take its place
    split(entry, end_key, (entry.item.row_end - entry.item.row_begin) * group);
  }
  // Longest first: what is left at the end is short.
  std::sort(entries_.begin(), entries_.end(), [](const Entry& x, const Entry& y) { return x.cost > y.cost; });
  for (const Entry& entry : entries_)
    if (entry.cost > 0) items_.push_back(entry.item);
  partials_.resize(size_t(num_partials_) * attend_partial_floats(head_dim));
}

void AttentionList::split(Entry entry, int end_key, int query_rows) {
  const int segments = (end_key + kAttendSegment - 1) / kAttendSegment,
            rows = entry.item.row_end - entry.item.row_begin;
  entry.item.split = int(splits_.size());
  splits_.push_back({segments, num_partials_, segments});
  num_partials_ += segments * query_rows;
  for (int s = 0; s < segments; s++) {
    entry.item.segment = s;
    entry.cost = int64_t(rows) * (std::min(end_key, (s + 1) * kAttendSegment) - s * kAttendSegment);
    entries_.push_back(entry);
  }
}

void AttentionList::give(Step& step) {
  step.items = items_.data();
  step.num_items = int(items_.size());
  step.splits = splits_.data();
  step.partials = partials_.data();
}

}  // namespace paceline
