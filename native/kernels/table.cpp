// One table of kernels an ISA.
#include "kernels.h"

namespace paceline::PL_ISA {
#define PL_STR2(x) #x
#define PL_STR(x) PL_STR2(x)
const KernelTable& kernel_table() {
  static const KernelTable table = [] {
    KernelTable t;
    t.isa = PL_STR(PL_ISA);
    return t;
  }();
  return table;
}
}  // namespace paceline::PL_ISA
