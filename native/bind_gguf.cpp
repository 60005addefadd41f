#include "bindings.h"

void bind_gguf(nb::module_& m) { (void)m; }
