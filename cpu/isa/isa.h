#pragma once

namespace fused_mlp {

// The instruction sets for which the kernels are compiled. Each includes those before it.
enum class Isa { kScalar, kAvx2, kAvx512, kAvx512Bf16, kAmx };

// The best instruction set that this CPU and its operating system support and run fast, or the one that the environment
// variable FUSED_MLP_CPU_ISA names (scalar, avx2, avx512, avx512_bf16 or amx; read once). Raises an error if the
// variable names anything else, or an instruction set that is not supported.
Isa isa();

// True if Intel made this processor.
bool is_intel();

// True if this is an AMD processor whose vector units have the full width of AVX-512, and isa() uses that.
bool has_wide_vectors();

// Its name in that variable.
const char* name(Isa isa);

// From two tables of kernels, the one compiled for the widest vectors in use; null if none are.
template <typename Kernels>
const Kernels* widest(const Kernels& avx512, const Kernels& avx2) {
  if (isa() >= Isa::kAvx512) return &avx512;
  return isa() == Isa::kAvx2 ? &avx2 : nullptr;
}

}  // namespace fused_mlp
