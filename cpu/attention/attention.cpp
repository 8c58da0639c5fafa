// The ops of attentions: their projections of one input, and rotary embeddings.
#include <bit>
#include <type_traits>

#include "../../torch-ext/ops/attention/projections.h"
#include "../../torch-ext/ops/attention/rotated.h"
#include "../parallel.h"
#include "../training_gemms.h"

namespace fused_mlp {
namespace {

float to_float(float x) { return x; }
float to_float(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }  // a bfloat16

template <typename T>
T rounded(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    const auto bits = std::bit_cast<uint32_t>(x);
    if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

// One head of one token.
template <typename T, bool Inverse>
void turn(const T* in, T* out, const T* cos, const T* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float low = to_float(in[i]), high = to_float(in[half + i]);
    const float low_sin = to_float(sin[i]), high_sin = to_float(sin[half + i]);
    const float to_first = Inverse ? high * high_sin : -high * low_sin;
    const float to_second = Inverse ? -low * low_sin : low * high_sin;
    out[i] = rounded<T>(low * to_float(cos[i]) + to_first);
    out[half + i] = rounded<T>(high * to_float(cos[half + i]) + to_second);
  }
}

template <typename T>
void turn_all(const Rotary& p) {
  const auto of = p.inverse ? turn<T, true> : turn<T, false>;
  const int64_t heads = p.of[0].heads + p.of[1].heads;
  const int64_t grain = ceil_div(kGrain, std::max<int64_t>(2 * p.half * heads, 1));
  torch::stable::parallel_for(0, p.batch * p.tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t batch = row / p.tokens, token = row % p.tokens;
      const auto angles = [&](const Angles& each) {
        return static_cast<const T*>(each.data) + batch * each.of_batch + token * each.of_token;
      };
      for (const Heads& each : p.of) {
        const auto offset = [&](const int64_t* strides, int64_t head) {
          return batch * strides[0] + head * strides[1] + token * strides[2];
        };
        for (int64_t head = 0; head < each.heads; ++head) {
          of(static_cast<const T*>(each.in) + offset(each.in_strides, head),
             static_cast<T*>(each.out) + offset(each.out_strides, head), angles(p.cos), angles(p.sin), p.half);
        }
      }
    }
  });
}

// The functions that projections.h and rotated.h ask of a backend.
struct Backend : Cpu {
  static Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
    const TensorRows rows(x);
    const Tensor out = new_dense(x, with_features(x, weight.size(0)));
    fused_mlp::linear_into<aoti_torch_cpu_mm_out, aoti_torch_cpu_addmm_out>(
        matrix_view(out, {rows.rows, weight.size(0)}, {weight.size(0), 1}), matrix_view(rows), weight, bias);
    return out;
  }

  static std::vector<Tensor> all_column_sums(const std::vector<Tensor>& given) {
    std::vector<Tensor> found;
    for (const Tensor& each : given) found.push_back(column_sums(each, std::nullopt));
    return found;
  }

  static DType dtype(const Tensor& q) { return dtype_of(q, "q"); }
  static void rotary(const Rotary& rotary, const Tensor&) {
    rotary.dtype == DType::kFloat32 ? turn_all<float>(rotary) : turn_all<uint16_t>(rotary);
  }
};

}  // namespace

}  // namespace fused_mlp

#include "../../torch-ext/ops/attention/ops.inl"
