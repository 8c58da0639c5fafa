// The structures that the tuner's C++ and its Python (model.py) exchange.
#pragma once

#include <cstdint>

#include "../../cuda/gemm/problem.h"

namespace tuning {

// Dense bf16 matrices without biases.
struct Shape {
  int64_t m, n, k, gated, activation, multiprocessors;
};

struct Kernel {
  int loop, block_m, block_n, schedule, split_k;
};

inline fused_mlp::GemmProblem problem_of(const Shape& s) {
  alignas(128) static char somewhere;  // a second weight marks a gated problem
  fused_mlp::GemmProblem p{};
  p.a = {nullptr, s.k};
  p.weight = {nullptr, s.k};
  p.up_weight = {s.gated ? &somewhere : nullptr, s.k};
  p.out = {nullptr, s.n};
  p.m = s.m;
  p.n = s.n;
  p.k = s.k;
  p.dtype = fused_mlp::DType::kBFloat16;
  p.epilogue.activation = s.activation;
  return p;
}

}  // namespace tuning
