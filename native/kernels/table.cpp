// One table of kernels an ISA.
#include "kernels.h"

namespace paceline::PL_ISA {

void embed(const Op&, const Step&, Work&);
void linear(const Op&, const Step&, Work&);
void quantize(const Op&, const Step&, Work&);
size_t linear_scratch(const Op&, int max_rows);
void quantize_one_row(const float* x, int k, uint8_t* q8_row);

#define PL_STR2(x) #x
#define PL_STR(x) PL_STR2(x)
const KernelTable& kernel_table() {
  static const KernelTable table = [] {
    KernelTable t;
    t.isa = PL_STR(PL_ISA);
    t.run[int(OpCode::embed)] = embed;
    t.run[int(OpCode::linear)] = linear;
    t.run[int(OpCode::quantize)] = quantize;
    t.linear_scratch = linear_scratch;
    t.quantize_row = quantize_one_row;
    return t;
  }();
  return table;
}
}  // namespace paceline::PL_ISA
