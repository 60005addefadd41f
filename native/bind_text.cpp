#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings.h"
#include "bpe.h"

using namespace paceline;

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Offsets = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = std::vector<std::pair<nb::str, nb::object>>;

StringArray strings(const Bytes& data, const Offsets& offsets) {
  if (offsets.size() == 0) throw std::invalid_argument("string offsets are empty");
  return {reinterpret_cast<const char*>(data.data()), data.size(), offsets.data(), offsets.size() - 1};
}

std::string_view utf8(nb::handle text) {
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (!data) throw nb::python_error();
  return {data, static_cast<size_t>(size)};
}

// The ids of all words. They are copied first, byte by byte: a str must not be touched without the GIL.
nb::list encode_words(const BytePairs& pairs, const Words& words, bool whole) {
  std::string text;
  std::vector<size_t> ends;
  ends.reserve(words.size());
  for (const auto& [word, _] : words) {
    append_byte_level(utf8(word), text);
    ends.push_back(text.size());
  }
  std::vector<int32_t> ids;
  {
    nb::gil_scoped_release release;
    BytePairs::Scratch scratch;
    size_t begin = 0;
    for (size_t end : ends) {
      pairs.encode(std::string_view(text).substr(begin, end - begin), whole, scratch, ids);
      begin = end;
    }
  }
  nb::list result;
  for (int32_t id : ids) result.append(id);
  return result;
}

}  // namespace

void bind_text(nb::module_& m) {
  nb::class_<BytePairs>(m, "BytePairs",
                        "A byte-pair encoding of GGUF string arrays, which it keeps and goes on to read.")
      .def(
          "__init__",
          [](BytePairs* self, Bytes tokens, Offsets token_offsets, Bytes merges, Offsets merge_offsets) {
            const StringArray token_strings = strings(tokens, token_offsets);
            const StringArray merge_strings = strings(merges, merge_offsets);
            nb::gil_scoped_release release;
            new (self) BytePairs(token_strings, merge_strings);
          },
          // What is viewed must be what was given: a converted copy would be gone with this call.
          nb::arg("tokens").noconvert(), nb::arg("token_offsets").noconvert(), nb::arg("merges").noconvert(),
          nb::arg("merge_offsets").noconvert(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
          nb::keep_alive<1, 5>())
      .def("encode_words", &encode_words, nb::arg("words"), nb::arg("whole"),
           "Ids of the words that a pre-tokenizer of `tokenizers` returns: (str, offsets) each.");
}
