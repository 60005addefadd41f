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

// The instruction that multiplies and adds, or the least that does it.
#if defined(PL_ISA_avx512) || defined(PL_ISA_avx512bf16)
using Floats = __m512;
using Bytes = __m512i;
using Ints = __m512i;
PL_INLINE Floats mac(Floats sum, Floats a, Floats b) { return _mm512_fmadd_ps(a, b, sum); }
PL_INLINE Ints mac(Ints sum, Bytes a, Bytes b) { return _mm512_dpbusd_epi32(sum, a, b); }
#elif defined(PL_ISA_avx2)
using Floats = __m256;
using Bytes = __m256i;
using Ints = __m256i;
PL_INLINE Floats mac(Floats sum, Floats a, Floats b) { return _mm256_fmadd_ps(a, b, sum); }
// A kernel that must not overflow also widens.
PL_INLINE Ints mac(Ints sum, Bytes a, Bytes b) { return _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b)); }
#elif defined(PL_ISA_neon)
using Floats = float32x4_t;
using Bytes = int8x16_t;
using Ints = int32x4_t;
PL_INLINE Floats mac(Floats sum, Floats a, Floats b) { return vfmaq_f32(sum, a, b); }
PL_INLINE Ints mac(Ints sum, Bytes a, Bytes b) { return vdotq_s32(sum, a, b); }
#else
using Floats = float;
PL_INLINE Floats mac(Floats sum, Floats a, Floats b) { return sum + a * b; }
#endif
#ifdef PL_ISA_avx512bf16
PL_INLINE Floats mac(Floats sum, __m512bh a, __m512bh b) { return _mm512_dpbf16_ps(sum, a, b); }
#endif

// Operands, accumulator, and how many products one `mac` adds.
struct F32 {
  using Operand = Floats;
  using Sum = Floats;
  static constexpr int kMacs = int(sizeof(Floats) / sizeof(float));
};
#ifdef PL_ISA_scalar
using Int8 = F32;  // one product an instruction, of bytes as of floats
#else
struct Int8 {
  using Operand = Bytes;
  using Sum = Ints;
  static constexpr int kMacs = int(sizeof(Bytes));
};
#endif
#ifdef PL_ISA_avx512bf16
struct Bf16 {
  using Operand = __m512bh;
  using Sum = Floats;
  static constexpr int kMacs = 32;
};
#endif

constexpr int kChains = 8;  // enough for two units of latency 4

template <class Mac>
void multiply(long loops) {
  typename Mac::Operand a0{}, a1{}, b0{}, b1{}, b2{}, b3{};
  typename Mac::Sum c0{}, c1{}, c2{}, c3{}, c4{}, c5{}, c6{}, c7{};
  for (long i = 0; i < loops; i++) {
    opaque(a0, a1, b0, b1, b2, b3);
    c0 = mac(c0, a0, b0), c1 = mac(c1, a0, b1), c2 = mac(c2, a0, b2), c3 = mac(c3, a0, b3);
    c4 = mac(c4, a1, b0), c5 = mac(c5, a1, b1), c6 = mac(c6, a1, b2), c7 = mac(c7, a1, b3);
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
