#include "cpu.h"

#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace paceline {
namespace {

#if defined(__x86_64__)
struct Features {
  bool avx2, avx512, avx512bf16;
};

// What the operating system saves at a context switch. XGETBV faults unless CPUID says OSXSAVE.
uint64_t enabled_state() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

bool has(uint32_t word, int bit) { return word >> bit & 1; }

Features detect() {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return {};
  bool fma = has(c, 12), osxsave = has(c, 27), avx = has(c, 28), f16c = has(c, 29);
  if (!osxsave || !avx) return {};
  uint64_t state = enabled_state();
  bool saves_ymm = (state & 0x6) == 0x6, saves_zmm = (state & 0xe6) == 0xe6;
  if (!saves_ymm || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return {};
  bool avx2 = has(b, 5) && fma && f16c;
  bool avx512 =
      avx2 && saves_zmm && has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31) && has(c, 11);  // F DQ BW VL VNNI
  uint32_t a1 = 0;
  bool bf16 = avx512 && __get_cpuid_count(7, 1, &a1, &b, &c, &d) && has(a1, 5);
  return {avx2, avx512, bf16};
}
#endif

std::vector<const KernelTable*> find_usable() {
  std::vector<const KernelTable*> tables;
#if defined(__x86_64__)
  Features cpu = detect();
#ifdef PL_HAVE_avx512bf16
  if (cpu.avx512bf16) tables.push_back(&avx512bf16::kernel_table());
#endif
#ifdef PL_HAVE_avx512
  if (cpu.avx512) tables.push_back(&avx512::kernel_table());
#endif
#ifdef PL_HAVE_avx2
  if (cpu.avx2) tables.push_back(&avx2::kernel_table());
#endif
#elif defined(__aarch64__) && defined(PL_HAVE_neon)
  unsigned long needed = HWCAP_ASIMDDP | HWCAP_ASIMDHP | HWCAP_FPHP;
  if ((getauxval(AT_HWCAP) & needed) == needed) tables.push_back(&neon::kernel_table());
#endif
  tables.push_back(&scalar::kernel_table());
  return tables;
}

}  // namespace

const std::vector<const KernelTable*>& usable_tables() {
  static const std::vector<const KernelTable*> tables = find_usable();
  return tables;
}

const KernelTable& choose_table(const std::string& isa) {
  const char* forced = std::getenv("PACELINE_ISA");
  std::string wanted = isa.empty() && forced ? forced : isa, names;
  if (wanted.empty()) return *usable_tables().front();
  for (const KernelTable* table : usable_tables()) {
    if (wanted == table->isa) return *table;
    names += (names.empty() ? "" : ", ") + std::string(table->isa);
  }
  throw std::invalid_argument((isa.empty() ? "PACELINE_ISA is '" : "isa is '") + wanted +
                              "': this build on this CPU can run " + names);
}

}  // namespace paceline
