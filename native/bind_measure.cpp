#include "bandwidth.h"
#include "bindings.h"

void bind_measure(nb::module_& m) {
  m.def(
      "read_bandwidth",
      [](size_t bytes, int num_threads, double seconds) {
        if (num_threads < 1 || num_threads > 1024 || bytes / size_t(num_threads) < 4096 || seconds <= 0 || seconds > 60)
          throw nb::value_error("read_bandwidth: 1 to 1024 threads, at least 4096 bytes each, at most 60 s");
        nb::gil_scoped_release release;
        return paceline::read_bandwidth(bytes, num_threads, seconds);
      },
      nb::arg("bytes"), nb::arg("num_threads"), nb::arg("seconds"),
      "Bytes a second that the threads read together from a buffer of `bytes`.");
}
