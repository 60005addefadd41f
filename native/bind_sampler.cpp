#include "bindings.h"

void bind_sampler(nb::module_& m) { (void)m; }
