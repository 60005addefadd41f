#include "bpe.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <random>
#include <stdexcept>

namespace paceline {
namespace {

constexpr size_t kMaxStrings = size_t{1} << 26;  // far more than any model has
constexpr size_t kNone = SIZE_MAX;

// A secret of the process: no file can be made so that its strings share slots.
uint64_t seed() {
  static const uint64_t value = [] {
    std::random_device device;
    return uint64_t{device()} << 32 | device();
  }();
  return value;
}

uint64_t mix(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t hash_of(std::string_view text) {
  uint64_t hash = seed() ^ text.size(), word = 0;
  size_t at = 0;
  for (; at + 8 <= text.size(); at += 8) {
    std::memcpy(&word, text.data() + at, 8);
    hash = mix(hash ^ word, 0x9E3779B97F4A7C15);
  }
  word = 0;
  std::memcpy(&word, text.data() + at, text.size() - at);
  return mix(hash ^ word, 0xD1B54A32D192ED03);
}

// Of a merge. The parts of a word keep their hashes, so that a pair costs one multiplication.
uint32_t pair_hash(uint64_t left, uint64_t right) {
  return static_cast<uint32_t>(mix(left, right ^ 0x9E3779B97F4A7C15));
}

// True where `merge` is "left right".
bool joins(std::string_view merge, std::string_view left, std::string_view right) {
  return merge.size() == left.size() + 1 + right.size() && merge[left.size()] == ' ' && merge.starts_with(left) &&
         merge.ends_with(right);
}

// Bytes of the character that begins with `lead`.
size_t character_size(char lead) {
  const auto byte = static_cast<unsigned char>(lead);
  return byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

// The order of a heap whose top is the lowest rank, of equal ranks the leftmost.
bool is_behind(const BytePairs::Candidate& a, const BytePairs::Candidate& b) {
  return a.rank != b.rank ? a.rank > b.rank : a.left > b.left;
}

// Indexes the strings by `hash`. Their slots lie all over memory: they are fetched some strings ahead.
template <class Hash>
void put_all(const StringArray& strings, Hash hash, HashIndex& index) {
  std::array<uint32_t, 32> hashes;
  for (size_t begin = 0; begin < strings.count; begin += hashes.size()) {
    const size_t end = std::min(begin + hashes.size(), strings.count);
    for (size_t i = begin; i < end; ++i) index.prefetch(hashes[i - begin] = hash(strings[i]));
    for (size_t i = begin; i < end; ++i) {
      index.put(hashes[i - begin], static_cast<int32_t>(i), [&](int32_t j) { return strings[j] == strings[i]; });
    }
  }
}

size_t checked(size_t count) {
  if (count > kMaxStrings) throw std::invalid_argument("more than " + std::to_string(kMaxStrings) + " strings");
  return count;
}

}  // namespace

std::string_view StringArray::operator[](size_t i) const {
  const int64_t begin = offsets[i], end = offsets[i + 1];
  if (begin < 0 || end < begin || end - begin < 8 || end > static_cast<int64_t>(size)) {
    throw std::invalid_argument("string offsets leave the file");
  }
  return {data + begin + 8, static_cast<size_t>(end - begin - 8)};
}

void append_byte_level(std::string_view bytes, std::string& text) {
  static const auto codes = [] {
    std::array<uint16_t, 256> made{};
    uint16_t next = 0x100;  // for the bytes that print nothing, in order
    for (int byte = 0; byte < 256; ++byte) {
      const bool is_plain = (byte > 0x20 && byte < 0x7F) || (byte > 0xA0 && byte != 0xAD);
      made[byte] = is_plain ? static_cast<uint16_t>(byte) : next++;
    }
    return made;
  }();
  for (const char byte : bytes) {
    const uint16_t code = codes[static_cast<unsigned char>(byte)];
    if (code < 0x80) {
      text += static_cast<char>(code);
    } else {
      text += static_cast<char>(0xC0 | code >> 6);
      text += static_cast<char>(0x80 | (code & 0x3F));
    }
  }
}

HashIndex::HashIndex(size_t count) : slots_(std::bit_ceil(count + count / 3 + 2), Slot{0, -1}) {}

BytePairs::BytePairs(const StringArray& tokens, const StringArray& merges)
    : tokens_(tokens), merges_(merges), ids_(checked(tokens.count)), ranks_(checked(merges.count)) {
  put_all(
      tokens, [](std::string_view text) { return static_cast<uint32_t>(hash_of(text)); }, ids_);
  const auto hash_of_merge = [](std::string_view text) {  // one without a space is never asked for
    const size_t space = std::min(text.find(' '), text.size());
    return pair_hash(hash_of(text.substr(0, space)), hash_of(text.substr(std::min(space + 1, text.size()))));
  };
  put_all(merges, hash_of_merge, ranks_);
}

int32_t BytePairs::find_token(std::string_view text, uint64_t hash) const {
  return ids_.find(static_cast<uint32_t>(hash), [&](int32_t i) { return tokens_[i] == text; });
}

void BytePairs::offer(std::string_view word, size_t left, Scratch& scratch) const {
  const Part& first = scratch.parts[left];
  if (first.end >= word.size()) return;
  const Part& second = scratch.parts[first.end];
  const std::string_view left_text = word.substr(left, first.end - left);
  const std::string_view right_text = word.substr(first.end, second.end - first.end);
  const int32_t rank = ranks_.find(pair_hash(first.hash, second.hash),
                                   [&](int32_t i) { return joins(merges_[i], left_text, right_text); });
  if (rank < 0) return;
  scratch.heap.push_back({rank, left, first.end, second.end});
  std::push_heap(scratch.heap.begin(), scratch.heap.end(), is_behind);
}

void BytePairs::encode(std::string_view word, bool whole, Scratch& scratch, std::vector<int32_t>& ids) const {
  const int32_t whole_id = whole ? find_token(word, hash_of(word)) : -1;
  if (whole_id >= 0) return ids.push_back(whole_id);
  auto& [parts, heap] = scratch;
  parts.resize(word.size());
  heap.clear();
  for (size_t at = 0, before = kNone; at < word.size(); before = at, at = parts[at].end) {
    const size_t size = std::min(character_size(word[at]), word.size() - at);
    parts[at] = {at + size, before, hash_of(word.substr(at, size))};
    if (before != kNone) offer(word, before, scratch);
  }
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), is_behind);
    const Candidate best = heap.back();
    heap.pop_back();
    Part& left = parts[best.left];
    // Stale once a side has joined another part since: then it ends elsewhere.
    if (left.end != best.middle || parts[best.middle].end != best.end) continue;
    left.end = best.end;
    left.hash = hash_of(word.substr(best.left, best.end - best.left));
    parts[best.middle].end = 0;
    if (best.end < word.size()) parts[best.end].before = best.left;
    if (left.before != kNone) offer(word, left.before, scratch);
    offer(word, best.left, scratch);
  }
  for (size_t at = 0; at < word.size(); at = parts[at].end) {
    const int32_t id = find_token(word.substr(at, parts[at].end - at), parts[at].hash);
    if (id >= 0) ids.push_back(id);
  }
}

}  // namespace paceline
