#pragma once
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_program(nb::module_& m);  // bind_program.cpp: ISA choice, thread pool, Program
void bind_weights(nb::module_& m);  // bind_weights.cpp: packing, and kernels one at a time for tests
void bind_gguf(nb::module_& m);     // bind_gguf.cpp: bounded walk over GGUF string arrays
void bind_sampler(nb::module_& m);  // bind_sampler.cpp: batched sampling
void bind_measure(nb::module_& m);  // bind_measure.cpp: peaks and read bandwidth of the machine
void bind_text(nb::module_& m);     // bind_text.cpp: byte-pair encoding
