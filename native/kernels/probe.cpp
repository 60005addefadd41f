// What an ISA can do at best: multiply-adds from registers, and reading. The results go nowhere.
#include "simd.h"

#include "kernels.h"

namespace paceline::PL_ISA {
namespace {

// Says to the compiler that each x is read and may have changed: or it would compute one chain for all, or nothing.
template <class X>
PL_INLINE void hide(X& x) {
#ifdef __aarch64__
  asm volatile("" : "+w"(x));
#else
  asm volatile("" : "+v"(x));
#endif
}
template <class... X>
PL_INLINE void opaque(X&... x) {
  (hide(x), ...);
}

// The instructions of one multiply-add: operands, accumulator, and how many products it adds.
#if defined(PL_ISA_avx512) || defined(PL_ISA_avx512bf16)
struct F32 {
  using Operand = __m512;
  using Sum = __m512;
  static constexpr int kMacs = 16;
  static PL_INLINE Sum mac(Sum sum, Operand a, Operand b) { return _mm512_fmadd_ps(a, b, sum); }
};
struct Int8 {
  using Operand = __m512i;
  using Sum = __m512i;
  static constexpr int kMacs = 64;
  static PL_INLINE Sum mac(Sum sum, Operand a, Operand b) { return _mm512_dpbusd_epi32(sum, a, b); }
};
#elif defined(PL_ISA_avx2)
struct F32 {
  using Operand = __m256;
  using Sum = __m256;
  static constexpr int kMacs = 8;
  static PL_INLINE Sum mac(Sum sum, Operand a, Operand b) { return _mm256_fmadd_ps(a, b, sum); }
};
// The least that the byte multiply needs; a kernel that must not overflow also widens.
struct Int8 {
  using Operand = __m256i;
  using Sum = __m256i;
  static constexpr int kMacs = 32;
  static PL_INLINE Sum mac(Sum sum, Operand a, Operand b) { return _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b)); }
};
#elif defined(PL_ISA_neon)
struct F32 {
  using Operand = float32x4_t;
  using Sum = float32x4_t;
  static constexpr int kMacs = 4;
  static PL_INLINE Sum mac(Sum sum, Operand a, Operand b) { return vfmaq_f32(sum, a, b); }
};
struct Int8 {
  using Operand = int8x16_t;
  using Sum = int32x4_t;
  static constexpr int kMacs = 16;
  static PL_INLINE Sum mac(Sum sum, Operand a, Operand b) { return vdotq_s32(sum, a, b); }
};
#else
struct F32 {
  using Operand = float;
  using Sum = float;
  static constexpr int kMacs = 1;
  static PL_INLINE Sum mac(Sum sum, Operand a, Operand b) { return sum + a * b; }
};
using Int8 = F32;  // one product an instruction, of bytes as of floats
#endif
#ifdef PL_ISA_avx512bf16
struct Bf16 {
  using Operand = __m512bh;
  using Sum = __m512;
  static constexpr int kMacs = 32;
  static PL_INLINE Sum mac(Sum sum, Operand a, Operand b) { return _mm512_dpbf16_ps(sum, a, b); }
};
#endif

constexpr int kChains = 8;  // enough for two units of latency 4

template <class Mac>
void multiply(long loops) {
  typename Mac::Operand a0{}, a1{}, b0{}, b1{}, b2{}, b3{};
  typename Mac::Sum c0{}, c1{}, c2{}, c3{}, c4{}, c5{}, c6{}, c7{};
  for (long i = 0; i < loops; i++) {
    opaque(a0, a1, b0, b1, b2, b3);
    c0 = Mac::mac(c0, a0, b0), c1 = Mac::mac(c1, a0, b1), c2 = Mac::mac(c2, a0, b2), c3 = Mac::mac(c3, a0, b3);
    c4 = Mac::mac(c4, a1, b0), c5 = Mac::mac(c5, a1, b1), c6 = Mac::mac(c6, a1, b2), c7 = Mac::mac(c7, a1, b3);
  }
  opaque(c0, c1, c2, c3, c4, c5, c6, c7);
}

template <class Mac>
Probe probe() {
  return {multiply<Mac>, kChains * Mac::kMacs};
}

}  // namespace

// One stream does not keep enough lines in flight to fill a core's share of the bus; four do.
void read_memory(const float* data, size_t count) {
  constexpr size_t kStreams = 4;
  const size_t part = count / kStreams / 16 * 16;
  f32x16 sums[kStreams] = {set1(0), set1(0), set1(0), set1(0)};
  for (size_t i = 0; i < part; i += 16)
    for (size_t s = 0; s < kStreams; s++) sums[s] = add(sums[s], load(data + s * part + i));
  float out[16];
  store(out, add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  asm volatile("" ::"r"(out) : "memory");
}

Probe int8_probe() { return probe<Int8>(); }
Probe f32_probe() { return probe<F32>(); }
#ifdef PL_ISA_avx512bf16
Probe bf16_probe() { return probe<Bf16>(); }
#else
Probe bf16_probe() { return {}; }
#endif

}  // namespace paceline::PL_ISA
