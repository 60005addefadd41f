// Byte-pair encoding over strings that stay in the mapped file.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace paceline {

// An array of strings as a GGUF holds it: each behind the eight bytes of its length, `offsets[i]` is where they begin.
struct StringArray {
  const char* data;
  size_t size;
  const int64_t* offsets;  // [count + 1]
  size_t count;
  std::string_view operator[](size_t i) const;  // throws std::invalid_argument where it leaves the data
};

// Appends the printable character that stands for each byte in a byte-level vocabulary (GPT-2), as UTF-8.
void append_byte_level(std::string_view bytes, std::string& text);

// Indices of keys by their hash, open addressing. The keys lie elsewhere: `is_key(index)` compares.
class HashIndex {
 public:
  explicit HashIndex(size_t count);  // of keys, at most
  void prefetch(uint32_t hash) const { __builtin_prefetch(&slots_[hash & (slots_.size() - 1)], 1); }
  template <class IsKey>
  void put(uint32_t hash, int32_t index, IsKey is_key) {  // takes the place of an equal key
    slots_[find_slot(hash, is_key)] = {hash, index};
  }
  template <class IsKey>
  int32_t find(uint32_t hash, IsKey is_key) const {  // -1: there is none
    return slots_[find_slot(hash, is_key)].index;
  }

 private:
  struct Slot {
    uint32_t hash;
    int32_t index;  // -1: empty
  };
  template <class IsKey>
  size_t find_slot(uint32_t hash, IsKey is_key) const {
    const size_t mask = slots_.size() - 1;
    size_t i = hash & mask;
    while (slots_[i].index >= 0 && (slots_[i].hash != hash || !is_key(slots_[i].index))) i = (i + 1) & mask;
    return i;
  }
  std::vector<Slot> slots_;  // a power of two, at most three quarters of them taken
};

// A vocabulary and its merges, whose arrays must outlive it. Of equal strings the last one counts.
class BytePairs {
 public:
  BytePairs(const StringArray& tokens, const StringArray& merges);

  struct Part {  // of a word; its place in `parts` is where it begins
    size_t end;  // 0: joined to the part before it
    size_t before;
    uint64_t hash;
  };
  struct Candidate {  // the parts [left, middle) and [middle, end) would join
    int32_t rank;
    size_t left, middle, end;
  };
  struct Scratch {
    std::vector<Part> parts;  // [bytes of the word]
    std::vector<Candidate> heap;
  };
  // Appends the ids of a word of UTF-8 without spaces: its characters are joined, lowest rank first and leftmost among
  // equals, O(n log n). With `whole`, a word that is a token is that token. A part that is no token is left out.
  void encode(std::string_view word, bool whole, Scratch& scratch, std::vector<int32_t>& ids) const;

 private:
  int32_t find_token(std::string_view text, uint64_t hash) const;
  void offer(std::string_view word, size_t left, Scratch& scratch) const;

  StringArray tokens_, merges_;
  HashIndex ids_, ranks_;
};

}  // namespace paceline
