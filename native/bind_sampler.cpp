#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "bindings.h"
#include "sampler.h"

using namespace paceline;

namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

using Masks = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Returns ids, and for each row (logprob, rank, [(id, logprob), ...]) or None. `mask_rows` names the row of `masks`
// that holds a choice's allowed tokens, -1 for all of them; empty: no choice has any.
nb::tuple sample(Sampler& sampler, Logits logits, const std::vector<int>& rows,
                 const std::vector<SamplerState*>& states, std::optional<Masks> masks,
                 const std::vector<int>& mask_rows) {
  if (rows.size() != states.size()) throw nb::value_error("rows and states differ in length");
  if (!mask_rows.empty() && mask_rows.size() != rows.size())
    throw nb::value_error("rows and mask_rows differ in length");
  std::vector<AllowedTokens> allowed(rows.size());
  for (size_t i = 0; i < mask_rows.size(); i++) {
    if (mask_rows[i] < 0) continue;
    if (!masks || size_t(mask_rows[i]) >= masks->shape(0)) throw nb::index_error("mask row out of range");
    allowed[i] = {masks->data() + size_t(mask_rows[i]) * masks->shape(1), int(masks->shape(1))};
  }
  if (size_t(sampler.vocab()) > logits.shape(1))
    throw nb::value_error("the logits have fewer columns than the vocabulary");
  for (int row : rows)
    if (row < 0 || size_t(row) >= logits.shape(0)) throw nb::index_error("row out of range");
  std::vector<Choice> choices(rows.size());
  {
    nb::gil_scoped_release release;
    for (size_t i = 0; i < rows.size(); i++)
      choices[i] = sampler.sample(logits.data() + size_t(rows[i]) * logits.shape(1), *states[i], allowed[i]);
  }
  nb::list ids, details;
  for (size_t i = 0; i < choices.size(); i++) {
    const Choice& c = choices[i];
    ids.append(c.token);
    if (c.token >= 0 && states[i]->options().num_logprobs >= 0)
      details.append(nb::make_tuple(c.logprob, c.rank, c.top));
    else
      details.append(nb::none());
  }
  return nb::make_tuple(ids, details);
}

}  // namespace

void bind_sampler(nb::module_& m) {
  nb::class_<SamplerState>(m, "SamplerState")
      .def(
          "__init__",
          [](SamplerState* self, uint64_t seed, float temperature, int top_k, float top_p, float min_p, float typical_p,
             float repetition, float presence, float frequency, std::vector<std::pair<int, float>> bias,
             std::vector<std::vector<int>> bad_words, std::vector<int> end_ids, int min_tokens, int num_logprobs,
             const std::vector<int>& prompt) {
            SamplingOptions o;
            o.seed = seed;
            o.temperature = temperature;
            o.top_k = top_k;
            o.top_p = top_p;
            o.min_p = min_p;
            o.typical_p = typical_p;
            o.repetition = repetition;
            o.presence = presence;
            o.frequency = frequency;
            o.bias = std::move(bias);
            o.bad_words = std::move(bad_words);
            o.end_ids = std::move(end_ids);
            o.min_tokens = min_tokens;
            o.num_logprobs = num_logprobs;
            for (const auto& word : o.bad_words)
              if (word.empty()) throw nb::value_error("a bad word has no tokens");
            for (auto [id, bias] : o.bias)
              if (id < 0) throw nb::value_error("a biased id is negative");
            new (self) SamplerState(std::move(o), prompt);
          },
          nb::kw_only(), nb::arg("seed"), nb::arg("temperature"), nb::arg("top_k"), nb::arg("top_p"), nb::arg("min_p"),
          nb::arg("typical_p"), nb::arg("repetition"), nb::arg("presence"), nb::arg("frequency"), nb::arg("bias"),
          nb::arg("bad_words"), nb::arg("end_ids"), nb::arg("min_tokens"), nb::arg("num_logprobs"), nb::arg("prompt"))
      .def("commit", &SamplerState::commit)
      .def_prop_ro("num_output", &SamplerState::num_output)
      .def("uniform", &SamplerState::uniform);
  nb::class_<Sampler>(m, "Sampler")
      .def(nb::init<int>())
      .def("sample", &sample, nb::arg("logits"), nb::arg("rows"), nb::arg("states"), nb::arg("masks") = nb::none(),
           nb::arg("mask_rows") = std::vector<int>{});
}
