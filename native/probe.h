// What the machine reaches at best, measured: nothing here is on the way of a step.
#pragma once
#include <cstddef>

#include "kernels.h"

namespace paceline {

// Bytes a second that `num_threads` threads read together from a buffer of `bytes`, in its fastest round of about
// `seconds`. A buffer within a cache is read from there. Returns 0 if the buffer cannot be had.
double read_bandwidth(const KernelTable& table, size_t bytes, int num_threads, double seconds);

// Multiply-adds a second of `probe`, likewise; 0 for a probe that the ISA does not have.
double peak_macs(const Probe& probe, int num_threads, double seconds);

}  // namespace paceline
