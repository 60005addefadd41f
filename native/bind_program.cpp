#include "bindings.h"

void bind_program(nb::module_& m) { (void)m; }
