#include "isa.h"

#include <torch/headeronly/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <iterator>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fused_mlp {
namespace {

constexpr const char* kNames[] = {"scalar", "avx2", "avx512", "avx512_bf16", "amx"};

#if defined(__x86_64__) && defined(__linux__)
// The state of AMX is large: Linux lets a process use it only after the process has requested it.
bool amx_granted() {
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if (!(edx & kAmxBf16) || !(edx & kAmxTile)) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

Isa supported() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::kScalar;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!avx512) return Isa::kAvx2;
  if (!__builtin_cpu_supports("avx512bf16")) return Isa::kAvx512;
  return amx_granted() ? Isa::kAmx : Isa::kAvx512Bf16;
}
#else
Isa supported() { return Isa::kScalar; }
#endif

Isa choose() {
  const Isa best = supported();
  const char* cap = std::getenv("FUSED_MLP_CPU_ISA");
  // Intel's processors take as long for a product of bfloat16 pairs as for four of float32 (measured on a Xeon).
  if (cap == nullptr) return best == Isa::kAvx512Bf16 && is_intel() ? Isa::kAvx512 : best;
  for (int i = 0; i < static_cast<int>(std::size(kNames)); ++i) {
    if (std::strcmp(cap, kNames[i]) != 0) continue;
    STD_TORCH_CHECK(i <= static_cast<int>(best), "FUSED_MLP_CPU_ISA is ", cap, ", but this CPU supports at most ",
                    name(best));
    return static_cast<Isa>(i);
  }
  STD_TORCH_CHECK(false, "FUSED_MLP_CPU_ISA must be scalar, avx2, avx512, avx512_bf16 or amx, not ", cap);
}

}  // namespace

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

bool is_intel() {
#if defined(__x86_64__)
  static const bool intel = [] {
    __builtin_cpu_init();
    return __builtin_cpu_is("intel") != 0;
  }();
  return intel;
#else
  return false;
#endif
}

bool has_wide_vectors() {
#if defined(__x86_64__) && defined(__linux__)
  static const bool wide = [] {
    unsigned eax, ebx, ecx, edx;
    if (isa() < Isa::kAvx512 || is_intel() || !__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return false;
    const unsigned family = (eax >> 8 & 0xf) + (eax >> 20 & 0xff), model = (eax >> 4 & 0xf) + (eax >> 12 & 0xf0);
    // Zen 5 was measured. Its server and desktop models have 512-bit units; most laptop models do not.
    constexpr unsigned kZen5 = 0x1a;
    return family > kZen5 || (family == kZen5 && (model < 0x20 || (model >= 0x40 && model < 0x50)));
  }();
  return wide;
#else
  return false;
#endif
}

const char* name(Isa isa) { return kNames[static_cast<int>(isa)]; }

}  // namespace fused_mlp
