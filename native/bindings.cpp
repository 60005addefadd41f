// The Python module: checks and conversions only, no maths. Each part binds itself in its own file.
#include "bindings.h"

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // a tokenizer that lives until the interpreter ends is no leak
  bind_program(m);
  bind_weights(m);
  bind_gguf(m);
  bind_sampler(m);
  bind_measure(m);
  bind_text(m);
}
