// Choosing tokens from logits. tests/numerics/test_sampler.py holds the plain definition of it all.
#pragma once
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace paceline {

struct SamplingOptions {
  uint64_t seed = 0;
  float temperature = 1, top_p = 1, min_p = 0, typical_p = 1;
  int top_k = 0;  // 0: off
  float repetition = 1, presence = 0, frequency = 0;
  std::vector<std::pair<int, float>> bias;
  std::vector<std::vector<int>> bad_words;  // token sequences, none empty
  std::vector<int> end_ids;                 // forbidden until min_tokens
  int min_tokens = 0;
  int num_logprobs = -1;  // -1: none; k: the chosen one and the k most likely
};

// What the next draw of one sequence depends on besides its logits: never on its neighbours in the batch.
class SamplerState {
 public:
  SamplerState(SamplingOptions options, const std::vector<int>& prompt);
  void commit(int token);
  const SamplingOptions& options() const { return options_; }
  int64_t num_output() const { return num_output_; }
  bool is_greedy() const;
  bool changes_logits() const;
  void process(float* logits, int vocab) const;  // bias, forbidden tokens, penalties
  double uniform() const;                        // in [0, 1): a function of seed and num_output

 private:
  SamplingOptions options_;
  int64_t num_output_ = 0;
  std::vector<int> output_;  // kept for bad_words only
  struct Count {
    bool in_prompt = false;
    int in_output = 0;
  };
  std::unordered_map<int, Count> counts_;  // kept for penalties only
};

// Which tokens a row may choose: bit i % 32 of word i / 32 stands for token i, tokens beyond the words are forbidden.
struct AllowedTokens {
  const uint32_t* words = nullptr;  // null: all are allowed
  int num_words = 0;
};

constexpr int kNotFinite = -1, kAllForbidden = -2;
struct Choice {
  int token = kNotFinite;  // or one of the two above
  double logprob = 0;
  int rank = 0;  // 1 is the most likely
  std::vector<std::pair<int, double>> top;
};

class Sampler {
 public:
  explicit Sampler(int vocab) : vocab_(vocab) {}  // ids from vocab on are padding of the head: never chosen
  int vocab() const { return vocab_; }
  Choice sample(const float* logits, const SamplerState& state, AllowedTokens allowed = {});

 private:
  struct Candidate {
    float logit, key, weight;
    int id;
  };  // a smaller key is better; it is not negative
  static bool before(const Candidate& a, const Candidate& b) {
    if (a.key != b.key) return a.key < b.key;
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
  }

  bool scan(const float* x);  // fills block_max_ and max_; false if a logit is NaN or +infinity
  int argmax(const float* x) const;
  void weigh(const float* x, float inv_temperature);  // weight_[i] = exp((x[i] - max_) / T), block_sum_, total_
  void gather_top(const float* x, int count);         // the `count` best to candidates_, best first
  int draw_any(double u) const;
  int draw_filtered(const float* x, const SamplingOptions& o, double u);
  void keep_mass(double target);
  void keep_typical(double share, float inv_temperature);
  void describe(const float* x, int num_top, Choice& choice);

  int vocab_;
  float max_ = 0;
  double total_ = 0;
  std::vector<float> logits_, weight_, block_max_, bounds_;
  std::vector<double> block_sum_, range_mass_;
  std::vector<Candidate> candidates_, edge_;  // candidates_ is in the order of ids, after gather_top best first
};

}  // namespace paceline
