// Activation and gate between the two products of experts in training, forward and backward, for cases in which no
// epilogue computes them. A CTA has a row. The kernels are memory-bound, so they deinterleave gates and ups in
// registers.
#pragma once

#include "../../gemm/epilogue.cuh"
#include "steps.h"

namespace fused_mlp {

constexpr int kGateThreads = 128;
constexpr int kGateColumns = 8;  // per thread at a time: 16 bytes

template <typename Element>
using GateVector = Packed<Element, kGateColumns>;

// A row of the sorted rows, and its position in its block.
struct GateRow {
  int row, at, filled, expert;

  __device__ __forceinline__ GateRow(const RowBlocks& blocks, int row) : row(row), at(row % kTiledBlock) {
    const int block = row / kTiledBlock;
    const BlockCode code{block < __ldg(blocks.count) ? __ldg(blocks.codes + block) : 0};
    filled = code.rows(), expert = code.expert();
  }
  __device__ __forceinline__ bool is_filled() const { return at < filled; }
  __device__ __forceinline__ bool is_read() const { return at < (filled + kZeroRows - 1) / kZeroRows * kZeroRows; }
  template <typename Element>
  __device__ __forceinline__ Element* of(const void* rows, int columns) const {
    return static_cast<Element*>(const_cast<void*>(rows)) + int64_t{row} * columns;
  }
};

template <typename Element>
__device__ __forceinline__ GateVector<Element> load_gates(const Element* from) {
  return *reinterpret_cast<const GateVector<Element>*>(from);
}

// From two words of two elements each: the first elements of both, and the second ones.
__device__ __forceinline__ uint2 parted(uint32_t first, uint32_t second) {
  return make_uint2(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
}

// Gates and ups of some columns of a row, and their positions in it.
template <typename Element>
struct GatePair {
  using Vector = GateVector<Element>;
  static constexpr int kWords = kGateColumns / 2;
  Vector gate{}, up{};

  __device__ __forceinline__ static int first(const ExpertGates& args, int column) {
    return args.interleaved ? 2 * column : column;
  }
  __device__ __forceinline__ static int second(const ExpertGates& args, int column) {
    return args.interleaved ? 2 * column + kGateColumns : args.width + column;
  }

  // Interleaved gates and ups to separate ones, or vice versa, in both vectors.
  template <bool kParts>
  __device__ __forceinline__ void exchange() {
    uint32_t turns[2 * kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (kParts) {
        turns[i] = gate.words[i], turns[kWords + i] = up.words[i];
      } else {
        const uint2 both = parted(gate.words[i], up.words[i]);
        turns[2 * i] = both.x, turns[2 * i + 1] = both.y;
      }
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (kParts) {
        const uint2 both = parted(turns[2 * i], turns[2 * i + 1]);
        gate.words[i] = both.x, up.words[i] = both.y;
      } else {
        gate.words[i] = turns[i], up.words[i] = turns[kWords + i];
      }
    }
  }

  __device__ __forceinline__ void load(const ExpertGates& args, const Element* row, int column) {
    gate = load_gates(row + first(args, column));
    if (args.gated) up = load_gates(row + second(args, column));
    if (args.interleaved) exchange<true>();
  }

  __device__ __forceinline__ void store(const ExpertGates& args, Element* row, int column) {
    if (args.interleaved) exchange<false>();
    *reinterpret_cast<Vector*>(row + first(args, column)) = gate;
    if (args.gated) *reinterpret_cast<Vector*>(row + second(args, column)) = up;
  }

  __device__ __forceinline__ float limited_gate(const ExpertGates& args, int i) const {
    return limited(args.limits, Operand::kGate, gate.lane(i));
  }
  __device__ __forceinline__ float limited_up(const ExpertGates& args, int i) const {
    return args.gated ? limited(args.limits, Operand::kUp, up.lane(i)) : 1.0f;
  }
};

// The gradient of a limited value: zero where a limit holds.
__device__ __forceinline__ float passed(float gradient, bool is_limited) { return is_limited ? 0.0f : gradient; }

template <typename Element>
__global__ void __launch_bounds__(kGateThreads) expert_gates_kernel(const __grid_constant__ ExpertGates args) {
  const GateRow at(args.blocks, blockIdx.x);
  if (!at.is_filled()) return;
  const auto* from = at.of<const Element>(args.gate_up, args.gated ? 2 * args.width : args.width);
  auto* to = at.of<Element>(args.hidden, args.width);
  visit_activation(args.activation, [&]<Activation A>() {
    for (int column = threadIdx.x * kGateColumns; column < args.width; column += kGateThreads * kGateColumns) {
      GatePair<Element> pair;
      pair.load(args, from, column);
      float values[kGateColumns];
#pragma unroll
      for (int i = 0; i < kGateColumns; ++i) {
        values[i] = ActivationFn<A, Precision::kFloat16>::value(pair.limited_gate(args, i)) * pair.limited_up(args, i);
      }
      store(to + column, values);
    }
  });
}

// The sum of all threads' values, in thread 0.
__device__ __forceinline__ float sum_of_cta(float value) {
  __shared__ float of_warps[kGateThreads / 32];
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, distance);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = of_warps[0];
#pragma unroll
  for (int i = 1; i < kGateThreads / 32; ++i) sum += of_warps[i];
  return sum;
}

template <typename Element>
__global__ void __launch_bounds__(kGateThreads)
    expert_gate_gradients_kernel(const __grid_constant__ ExpertGateGradients args) {
  using Vector = GateVector<Element>;
  const ExpertGates& gates = args.gates;
  const GateRow at(gates.blocks, blockIdx.x);
  if (!at.is_read()) return;
  const int columns = gates.gated ? 2 * gates.width : gates.width;
  const auto* gate_up = at.of<const Element>(gates.gate_up, columns);
  const auto* gradient = at.of<const Element>(args.gradient, gates.width);
  auto* gate_up_gradient = at.of<Element>(args.gate_up_gradient, columns);
  auto* hidden = at.of<Element>(gates.hidden, gates.width);
  const bool filled = at.is_filled();
  const float weight = filled ? __ldg(args.row_weights + at.row) : 0.0f;
  float sum = 0.0f;
  visit_activation(gates.activation, [&]<Activation A>() {
    for (int column = threadIdx.x * kGateColumns; column < gates.width; column += kGateThreads * kGateColumns) {
      GatePair<Element> pair;
      Vector values{};
      if (filled) {
        const Vector gradients = load_gates(gradient + column);
        pair.load(gates, gate_up, column);
#pragma unroll
        for (int word = 0; word < kGateColumns / 2; ++word) {
          float of_gate[2], of_up[2], of_hidden[2];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int i = 2 * word + half;
            const float limit = gates.limits.limit, up = pair.up.lane(i);
            const GluGradient<A> made(gradients.lane(i) * weight, pair.limited_gate(gates, i),
                                      pair.limited_up(gates, i));
            sum = fmaf(gradients.lane(i), made.value, sum);
            of_gate[half] = passed(made.gate, pair.gate.lane(i) > limit);
            of_up[half] = passed(made.up, up > limit || up < -limit);
            of_hidden[half] = made.value * weight;
          }
          pair.gate.words[word] = round_pair<Element>(of_gate[0], of_gate[1]);
          pair.up.words[word] = round_pair<Element>(of_up[0], of_up[1]);
          values.words[word] = round_pair<Element>(of_hidden[0], of_hidden[1]);
        }
      }
      pair.store(gates, gate_up_gradient, column);
      *reinterpret_cast<Vector*>(hidden + column) = values;
    }
  });
  if (!filled) return;
  if (args.down_bias != nullptr) {
    const auto* result_gradient = at.of<const Element>(args.result_gradient, args.features);
    const auto* bias = static_cast<const Element*>(args.down_bias) + int64_t{at.expert} * args.features;
    for (int column = threadIdx.x * kGateColumns; column < args.features; column += kGateThreads * kGateColumns) {
      const Vector gradients = load_gates(result_gradient + column), biases = load_gates(bias + column);
#pragma unroll
      for (int i = 0; i < kGateColumns; ++i) sum = fmaf(gradients.lane(i), biases.lane(i), sum);
    }
  }
  sum = sum_of_cta(sum);
  if (threadIdx.x == 0) args.row_sums[at.row] = sum;
}

}  // namespace fused_mlp
