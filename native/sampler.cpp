// Every loop runs in one fixed order over one row, in explicit vectors of four, so a row's result is the same bits
// whatever the batch and the compiler.
#include "sampler.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

namespace paceline {
namespace {

typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));

constexpr int kBlock = 64;                   // logits that share an entry of block_max_ and block_sum_
constexpr float kGreedyTemperature = 1e-5f;  // below it a draw could only differ by rounding

inline f32x4 load4(const float* p) {
  f32x4 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store4(float* p, f32x4 v) { std::memcpy(p, &v, sizeof v); }
inline f32x4 splat(float x) { return f32x4{x, x, x, x}; }
inline f32x4 max4(f32x4 a, f32x4 b) { return a > b ? a : b; }
inline float sum(f32x4 a) { return (a[0] + a[2]) + (a[1] + a[3]); }
inline float largest(f32x4 a) { return std::max(std::max(a[0], a[2]), std::max(a[1], a[3])); }

// e^x for x <= 0 within 2 ulp, exactly 1 at 0, 0 below -87.
inline f32x4 exp4(f32x4 x) {
  f32x4 c = max4(x, splat(-87.0f));
  f32x4 shifted = c * splat(1.44269504f) + splat(12582912.0f);  // 1.5 * 2^23: rounds to the nearest integer
  f32x4 n = shifted - splat(12582912.0f);
  i32x4 bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  f32x4 r = c - n * splat(0.693145752f) - n * splat(1.42860677e-6f);
  f32x4 p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * (r * r) + r + splat(1.0f);
  i32x4 exponent = (bits - 0x4b400000 + 127) << 23;
  f32x4 power;
  std::memcpy(&power, &exponent, sizeof power);
  return x >= splat(-87.0f) ? p * power : splat(0.0f);
}

uint64_t mix(uint64_t z) {  // SplitMix64, Steele 2014
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;

void forbid_others(float* logits, int vocab, AllowedTokens allowed) {
  for (int begin = 0; begin < vocab; begin += 32) {
    int word = begin / 32, end = std::min(begin + 32, vocab);
    uint32_t bits = word < allowed.num_words ? allowed.words[word] : 0;
    if (bits == ~0u) continue;
    if (bits == 0) {
      std::fill(logits + begin, logits + end, -INFINITY);
      continue;
    }
    for (int i = begin; i < end; i++)
      if (!(bits >> (i - begin) & 1)) logits[i] = -INFINITY;
  }
}

}  // namespace

SamplerState::SamplerState(SamplingOptions options, const std::vector<int>& prompt) : options_(std::move(options)) {
  if (options_.repetition != 1)
    for (int token : prompt) counts_[token].in_prompt = true;
}

void SamplerState::commit(int token) {
  num_output_++;
  if (!options_.bad_words.empty()) output_.push_back(token);
  if (options_.repetition != 1 || options_.presence != 0 || options_.frequency != 0) counts_[token].in_output++;
}

bool SamplerState::is_greedy() const {
  return options_.temperature < kGreedyTemperature || options_.top_k == 1 || options_.min_p == 1;
}

bool SamplerState::changes_logits() const {
  return !options_.bias.empty() || num_output_ < options_.min_tokens || !options_.bad_words.empty() || !counts_.empty();
}

void SamplerState::process(float* logits, int vocab) const {
  for (auto [id, bias] : options_.bias)
    if (id < vocab) logits[id] += bias;
  if (num_output_ < options_.min_tokens)
    for (int id : options_.end_ids)
      if (id < vocab) logits[id] = -INFINITY;
  for (const auto& word : options_.bad_words) {
    size_t prefix = word.size() - 1;
    if (word.back() >= vocab || prefix > output_.size()) continue;
    if (std::equal(word.begin(), word.end() - 1, output_.end() - prefix)) logits[word.back()] = -INFINITY;
  }
  for (const auto& [id, count] : counts_) {
    if (id >= vocab) continue;
    float& x = logits[id];
    x = x > 0 ? x / options_.repetition : x * options_.repetition;
    if (count.in_output) x -= options_.frequency * float(count.in_output) + options_.presence;
  }
}

double SamplerState::uniform() const {
  uint64_t bits = mix(mix(options_.seed + kGolden) + uint64_t(num_output_ + 1) * kGolden);
  return double(bits >> 11) * 0x1p-53;
}

bool Sampler::scan(const float* x) {
  int num_blocks = (vocab_ + kBlock - 1) / kBlock;
  block_max_.resize(num_blocks);
  i32x4 finite = {-1, -1, -1, -1};
  bool tail_finite = true;
  for (int b = 0; b < num_blocks; b++) {
    const float* p = x + b * kBlock;
    int n = std::min(kBlock, vocab_ - b * kBlock), i = 0;
    f32x4 top = splat(-INFINITY);
    for (; i + 4 <= n; i += 4) {
      f32x4 v = load4(p + i);
      finite &= v <= splat(FLT_MAX);
      top = max4(v, top);
    }
    float best = largest(top);
    for (; i < n; i++) {
      tail_finite &= p[i] <= FLT_MAX;
      best = std::max(best, p[i]);
    }
    block_max_[b] = best;
  }
  max_ = *std::max_element(block_max_.begin(), block_max_.end());
  return tail_finite && (finite[0] & finite[1] & finite[2] & finite[3]);
}

int Sampler::argmax(const float* x) const {
  size_t b = std::find(block_max_.begin(), block_max_.end(), max_) - block_max_.begin();
  return int(std::find(x + b * kBlock, x + vocab_, max_) - x);
}

void Sampler::weigh(const float* x, float inv_temperature) {
  int num_blocks = int(block_max_.size());
  weight_.resize(size_t(num_blocks) * kBlock);
  block_sum_.resize(num_blocks);
  total_ = 0;
  f32x4 top = splat(max_), inv = splat(inv_temperature);
  for (int b = 0; b < num_blocks; b++) {
    const float* p = x + b * kBlock;
    float padded[kBlock];
    if (int n = vocab_ - b * kBlock; n < kBlock) {
      std::fill(std::copy(p, p + n, padded), padded + kBlock, -INFINITY);
      p = padded;
    }
    float* w = weight_.data() + b * kBlock;
    f32x4 acc = splat(0.0f);
    for (int i = 0; i < kBlock; i += 4) {
      f32x4 e = exp4((load4(p + i) - top) * inv);
      store4(w + i, e);
      acc += e;
    }
    block_sum_[b] = sum(acc);
    total_ += block_sum_[b];
  }
}

// The count-th largest of the block maxima is a lower bound of the count-th largest logit, and few logits exceed it.
void Sampler::gather_top(const float* x, int count) {
  float bound = -FLT_MAX;
  if (size_t(count) <= block_max_.size()) {
    bounds_ = block_max_;
    std::nth_element(bounds_.begin(), bounds_.begin() + (count - 1), bounds_.end(), std::greater<>());
    bound = std::max(bound, bounds_[count - 1]);
  }
  candidates_.clear();
  for (size_t b = 0; b < block_max_.size(); b++) {
    if (block_max_[b] < bound) continue;
    int end = std::min(int(b + 1) * kBlock, vocab_);
    for (int i = int(b) * kBlock; i < end; i++)
      if (x[i] >= bound) candidates_.push_back({x[i], max_ - x[i], 0, i});
  }
  size_t kept = std::min(candidates_.size(), size_t(count));
  std::partial_sort(candidates_.begin(), candidates_.begin() + kept, candidates_.end(), before);
  candidates_.resize(kept);
}

// Of the candidates in the order of `before`, keep the shortest beginning that weighs `target`. Their masses
// are added up by ranges of the key, so that only the range where the share is reached has to be sorted.
void Sampler::keep_mass(double target) {
  constexpr int kShift = 19, kRanges = 1 << (31 - kShift);  // 16 ranges an octave
  auto range = [](const Candidate& c) {
    uint32_t bits;
    std::memcpy(&bits, &c.key, sizeof bits);
    return (bits & 0x7fffffff) >> kShift;
  };
  range_mass_.assign(kRanges, 0);
  for (const Candidate& c : candidates_) range_mass_[range(c)] += c.weight;
  double mass = 0;
  uint32_t edge = 0;
  while (edge + 1 < kRanges && mass + range_mass_[edge] < target) mass += range_mass_[edge++];
  edge_.clear();
  for (const Candidate& c : candidates_)
    if (range(c) == edge) edge_.push_back(c);
  if (edge_.empty()) return;
  std::sort(edge_.begin(), edge_.end(), before);
  size_t last = 0;
  for (; last + 1 < edge_.size(); last++)
    if ((mass += edge_[last].weight) >= target) break;
  Candidate cut = edge_[last];
  std::erase_if(candidates_, [&](const Candidate& c) { return before(cut, c); });
}

// Locally typical sampling, Meister 2022: tokens whose surprise is nearest to the entropy come first.
void Sampler::keep_typical(double share, float inv_temperature) {
  double total = 0, entropy = 0;
  for (const Candidate& c : candidates_) total += c.weight;
  double log_total = std::log(total);
  auto surprise = [&](const Candidate& c) { return log_total - double((c.logit - max_) * inv_temperature); };
  for (const Candidate& c : candidates_) entropy += c.weight / total * surprise(c);
  for (Candidate& c : candidates_) c.key = float(std::abs(surprise(c) - entropy));
  keep_mass(share * total);
}

int Sampler::draw_any(double u) const {
  double target = u * total_, mass = 0;
  size_t b = 0, last = 0;
  for (; b < block_sum_.size(); b++) {
    if (block_sum_[b] <= 0) continue;
    last = b;
    if (mass + block_sum_[b] > target) break;
    mass += block_sum_[b];
  }
  int id = -1;
  for (int i = int(last) * kBlock; i < int(last + 1) * kBlock; i++) {
    if (weight_[i] <= 0) continue;
    id = i;
    mass += weight_[i];
    if (mass > target) break;
  }
  return id;
}

int Sampler::draw_filtered(const float* x, const SamplingOptions& o, double u) {
  float inv = 1.0f / o.temperature;
  if (o.top_k > 0 && o.top_k < vocab_) {
    gather_top(x, o.top_k);
    total_ = 0;
    for (Candidate& c : candidates_) total_ += c.weight = exp4((splat(c.logit) - splat(max_)) * splat(inv))[0];
    auto by_id = [](const Candidate& a, const Candidate& b) { return a.id < b.id; };
    std::sort(candidates_.begin(), candidates_.end(), by_id);
  } else {
    weigh(x, inv);
    // All tokens lighter than this weigh less than 1 - top_p together: none of them can be kept.
    float bound = o.top_p < 1 ? float((1.0 - o.top_p) * 0.999 * total_ / vocab_) : 0.0f;
    candidates_.clear();
    for (int i = 0; i < vocab_; i++)
      if (weight_[i] >= bound) candidates_.push_back({x[i], max_ - x[i], weight_[i], i});
  }
  std::erase_if(candidates_, [](const Candidate& c) { return c.weight <= 0; });
  if (o.top_p < 1) keep_mass(o.top_p * total_);
  if (o.min_p > 0) std::erase_if(candidates_, [&](const Candidate& c) { return c.weight < o.min_p; });
  if (o.typical_p < 1) keep_typical(o.typical_p, inv);
  double total = 0, mass = 0;
  for (const Candidate& c : candidates_) total += c.weight;
  for (const Candidate& c : candidates_)
    if ((mass += c.weight) > u * total) return c.id;
  return candidates_.back().id;
}

// Log-probabilities are those of the model's raw logits, whatever was done to choose.
void Sampler::describe(const float* x, int num_top, Choice& choice) {
  scan(x);
  weigh(x, 1.0f);
  double log_total = std::log(total_) + max_;
  float chosen = x[choice.token];
  i32x4 before4 = {0, 0, 0, 0};
  int i = 0;
  for (; i + 4 <= vocab_; i += 4) before4 -= load4(x + i) > splat(chosen);
  int num_before = before4[0] + before4[1] + before4[2] + before4[3];
  for (; i < vocab_; i++) num_before += x[i] > chosen;
  num_before += int(std::count(x, x + choice.token, chosen));
  choice.rank = num_before + 1;
  choice.logprob = chosen - log_total;
  if (!num_top) return;
  gather_top(x, std::min(num_top, vocab_));
  for (const Candidate& c : candidates_) choice.top.emplace_back(c.id, c.logit - log_total);
}

Choice Sampler::sample(const float* logits, const SamplerState& state, AllowedTokens allowed) {
  const SamplingOptions& o = state.options();
  Choice choice;
  if (!scan(logits)) return choice;
  const float* x = logits;
  if (state.changes_logits() || allowed.words) {
    logits_.assign(logits, logits + vocab_);
    state.process(logits_.data(), vocab_);
    if (allowed.words) forbid_others(logits_.data(), vocab_, allowed);
    x = logits_.data();
    if (!scan(x)) return choice;
  }
  if (max_ == -INFINITY) {
    choice.token = kAllForbidden;
    return choice;
  }
  if (state.is_greedy()) {
    choice.token = argmax(x);
  } else if ((o.top_k > 0 && o.top_k < vocab_) || o.top_p < 1 || o.min_p > 0 || o.typical_p < 1) {
    choice.token = draw_filtered(x, o, state.uniform());
  } else {
    weigh(x, 1.0f / o.temperature);
    choice.token = draw_any(state.uniform());
  }
  if (o.num_logprobs >= 0) describe(logits, o.num_logprobs, choice);
  return choice;
}

}  // namespace paceline
