#pragma once
#include <cstddef>

namespace paceline {

// Bytes a second that `num_threads` threads read together from a buffer of `bytes` (larger than the caches): the best
// pass seen in about `seconds`. Returns 0 if the buffer cannot be had.
double read_bandwidth(size_t bytes, int num_threads, double seconds);

}  // namespace paceline
