// One table of kernels an ISA.
#include "kernels.h"

namespace paceline::PL_ISA {

void embed(const Op&, const Step&, Work&);
void linear(const Op&, const Step&, Work&);
void quantize(const Op&, const Step&, Work&);
size_t linear_scratch(const Op&, int max_rows);
void quantize_one_row(const float* x, int k, uint8_t* q8_row);
bool encode_rows(Format format, const float* w, const float* importance, int rows, int k, bool by_row, uint8_t* out);

#define PL_STR2(x) #x
#define PL_STR(x) PL_STR2(x)
void rms_norm(const Op&, const Step&, Work&);
void rope_store(const Op&, const Step&, Work&);
void attend(const Op&, const Step&, Work&);
size_t attend_scratch(const Op&);
void gated_act(const Op&, const Step&, Work&);
void add(const Op&, const Step&, Work&);
void scale(const Op&, const Step&, Work&);
void softcap(const Op&, const Step&, Work&);
void select(const Op&, const Step&, Work&);
void layer_norm(const Op&, const Step&, Work&);
void gather(const Op&, const Step&, Work&);
void read_memory(const float* data, size_t count);
Probe int8_probe();
Probe bf16_probe();
Probe f32_probe();

const KernelTable& kernel_table() {
  static const KernelTable table = [] {
    KernelTable t;
    t.isa = PL_STR(PL_ISA);
    t.run[int(OpCode::embed)] = embed;
    t.run[int(OpCode::linear)] = linear;
    t.run[int(OpCode::quantize)] = quantize;
    t.linear_scratch = linear_scratch;
    t.quantize_row = quantize_one_row;
    t.encode_rows = encode_rows;
    t.run[int(OpCode::rms_norm)] = rms_norm;
    t.run[int(OpCode::rope_store)] = rope_store;
    t.run[int(OpCode::attend)] = attend;
    t.attend_scratch = attend_scratch;
    t.run[int(OpCode::gated_act)] = gated_act;
    t.run[int(OpCode::add)] = add;
    t.run[int(OpCode::scale)] = scale;
    t.run[int(OpCode::softcap)] = softcap;
    t.run[int(OpCode::select)] = select;
    t.run[int(OpCode::layer_norm)] = layer_norm;
    t.run[int(OpCode::gather)] = gather;
    t.read_memory = read_memory;
    t.int8 = int8_probe();
    t.bf16 = bf16_probe();
    t.f32 = f32_probe();
    return t;
  }();
  return table;
}
}  // namespace paceline::PL_ISA
