#pragma once

namespace fused_mlp {

// The instruction sets the kernels are compiled for, each a superset of those before it.
enum class Isa { kScalar, kAvx2, kAvx512, kAmx };

// The best one that this CPU and its operating system support, capped by the environment variable FUSED_MLP_CPU_ISA
// (scalar, avx2, avx512 or amx), which is read once. Raises an error if that names anything else or more than there is.
Isa isa();

// Its name in that variable.
const char* name(Isa isa);

}  // namespace fused_mlp
