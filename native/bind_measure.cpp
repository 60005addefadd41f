#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "bindings.h"
#include "cpu.h"
#include "probe.h"

namespace {

void check(const std::string& name, int num_threads, double seconds) {
  if (num_threads < 1 || num_threads > 1024 || !(seconds > 0) || seconds > 60)
    throw nb::value_error((name + ": 1 to 1024 threads, at most 60 s").c_str());
}

const paceline::Probe& probe_of(const paceline::KernelTable& table, const std::string& kind) {
  if (kind == "int8") return table.int8;
  if (kind == "bf16") return table.bf16;
  if (kind == "f32") return table.f32;
  throw nb::value_error(("peak_macs: '" + kind + "' is none of int8, bf16, f32").c_str());
}

}  // namespace

void bind_measure(nb::module_& m) {
  m.def(
      "read_bandwidth",
      [](size_t bytes, int num_threads, double seconds) {
        check("read_bandwidth", num_threads, seconds);
        if (bytes / size_t(num_threads) < 4096 || bytes > size_t(1) << 36)
          throw nb::value_error("read_bandwidth: 4096 bytes a thread to 64 GiB in all");
        const paceline::KernelTable& table = paceline::choose_table("");
        nb::gil_scoped_release release;
        return paceline::read_bandwidth(table, bytes, num_threads, seconds);
      },
      nb::arg("bytes"), nb::arg("num_threads"), nb::arg("seconds"),
      "Bytes a second that the threads read together from a buffer of `bytes`.");
  m.def(
      "peak_macs",
      [](const std::string& kind, int num_threads, double seconds, const std::optional<std::string>& isa) {
        check("peak_macs", num_threads, seconds);
        const paceline::Probe& probe = probe_of(paceline::choose_table(isa.value_or("")), kind);
        nb::gil_scoped_release release;
        return paceline::peak_macs(probe, num_threads, seconds);
      },
      nb::arg("kind"), nb::arg("num_threads"), nb::arg("seconds"), nb::arg("isa") = nb::none(),
      "Multiply-adds a second, from registers, of int8, bf16 or f32; 0 where the ISA has no such multiply.");
}
