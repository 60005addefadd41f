#include "bindings.h"

void bind_weights(nb::module_& m) { (void)m; }
