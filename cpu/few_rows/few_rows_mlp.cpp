#include "few_rows_mlp.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "../isa/isa.h"
#include "../scratch.h"

namespace fused_mlp::few_rows {

namespace {

// True if bf16 is multiplied by dot products of pairs. With AMX, these kernels are used for so few rows that widened
// values are as fast.
bool by_dots(DType dtype) { return dtype == DType::kBFloat16 && isa() == Isa::kAvx512Bf16; }

// True if dot products were measured to pay for more rows than widened values do.
bool by_fast_dots(DType dtype) { return by_dots(dtype) && has_wide_vectors(); }

// The kernels of the best instruction set that this CPU has, or null.
const Kernels* kernels(DType dtype) {
#if defined(__x86_64__)
  if (by_dots(dtype)) return &avx512_bf16::kFewRows;
  return widest(avx512::kFewRows, avx2::kFewRows);
#else
  return nullptr;
#endif
}

// Those for a layer: codes are widened when they are decoded.
const Kernels* kernels(const Layer& layer) {
#if defined(__x86_64__)
  if (layer.gate.codes != nullptr) return widest(avx512::kFewRows, avx2::kFewRows);
#endif
  return kernels(layer.dtype);
}

// The number of rows up to which codes take less time than the alternatives (measured on a Xeon): tiles of decoded
// weights, or torch's products with weights that are decoded first.
int64_t most_rows_of_codes(DType dtype) { return dtype == DType::kBFloat16 && isa() == Isa::kAmx ? 5 : 96; }

// Minimum number of bytes of weights per thread.
constexpr int64_t kGrain = 32768;

// Bytes of weights that a core keeps in its cache between calls.
constexpr int64_t kCachedBytes = 2 << 20;

// Rows are an odd number of blocks apart, so that no two share a set of L1.
int64_t padded(const Layer& layer) {
  const int64_t block = kernels(layer)->block;
  return (ceil_div(layer.in_features, block) | 1) * block;
}

void run_layer(const Layer& layer, Rows rows, Matrix out, Rows next, Kept kept) {
  const int64_t block = kernels(layer)->block, elements = block * layer.in_features * (layer.gated ? 2 : 1);
  const quantized::Codes* const codes = layer.gate.codes;
  const int64_t block_bytes = codes != nullptr ? codes->bytes(elements) : elements * element_bytes(layer.dtype);
  torch::stable::parallel_for(
      0, ceil_div(layer.out_features, block), ceil_div(kGrain, block_bytes),
      [&](int64_t begin, int64_t end) { kernels(layer)->project(layer, rows, begin, end, out, next, kept); });
}

// The numbers of rows for which these kernels were measured to take less time than the alternatives: tiles, or torch's
// libraries. torch's float32 library is slow with few rows, except on Intel's processors. There it streams the weights
// as fast for one row, and with AVX-512 for up to three; with one row these kernels only shorten the call
// (`streams_one`).
struct Bounds {
  int64_t least, most;
  bool streams_one = false;
};

// Up to this many rows, and up to more if a core keeps the weights, bf16 takes less time by dot products than in
// oneDNN. oneDNN's kernels multiply as fast, but reorder the weights first (measured on a Zen 5).
constexpr int64_t kMostRowsByDots = 24, kMostCachedRows = 48;

// With more rows than have sums at once, a block of weights is read again with other rows. It comes from L2 if the
// weights and the rows both fit.
bool fits_l2(int64_t rows, const Layer& layer) {
  constexpr int64_t kL2Bytes = 1 << 20;
  const int64_t weights = kernels(layer.dtype)->block * (layer.gated ? 2 : 1);
  return rows <= kRowsAtOnce || (weights + rows) * layer.in_features * element_bytes(layer.dtype) <= kL2Bytes;
}

Bounds bounds_of(DType dtype) {
  const bool intel = is_intel(), wide = isa() != Isa::kAvx2;
  if (dtype == DType::kFloat32) {
    if (intel) return wide ? Bounds{4, 15, true} : Bounds{2, 12, true};
    return {1, has_wide_vectors() ? 16 : wide ? 20 : 15};
  }
  if (isa() == Isa::kAmx) return {1, 4};
  if (!wide) return {1, 20};
  if (by_fast_dots(dtype)) return {1, kMostCachedRows};
  return {1, intel ? 16 : 6};
}

// True if a row of the weights is not a whole number of cache lines, so that vectors of the next row cross two lines
// each.
bool crosses_lines(const Layer& layer) {
  constexpr int64_t kLine = 64;
  return layer.in_features * element_bytes(layer.dtype) % kLine != 0;
}

}  // namespace

const char* instruction_set(DType dtype) {
  return name(by_dots(dtype) ? Isa::kAvx512Bf16 : std::min(isa(), Isa::kAvx512));
}

bool may_pay(DType dtype, int64_t rows) {
  if (dtype == DType::kFloat16 || kernels(dtype) == nullptr) return false;
  const Bounds bounds = bounds_of(dtype);
  return (rows == 1 && bounds.streams_one) || (rows >= bounds.least && rows <= bounds.most);
}

bool take_codes(DType dtype, int64_t rows) { return isa() >= Isa::kAvx2 && rows <= most_rows_of_codes(dtype); }

bool take(int64_t rows, const Layer& hidden, const Layer* down, bool keeps) {
  if (!may_pay(hidden.dtype, rows)) return false;
  const int64_t block = kernels(hidden.dtype)->block;
  const auto holds = [&](const Layer& layer) { return layer.in_features >= block && layer.out_features >= block; };
  if (!holds(hidden) || (down != nullptr && !holds(*down))) return false;
  if (hidden.dtype == DType::kFloat32 && is_intel()) {  // MKL is fast there (measured on a Xeon)
    // After these kernels, MKL's products in a backward lose more time than the forward gains.
    if (keeps) return false;
    constexpr int64_t kMostAcrossLines = 10;
    const bool crosses = crosses_lines(hidden) || (down != nullptr && crosses_lines(*down));
    if (crosses && rows > kMostAcrossLines) return false;
  }
  const bool dots = by_fast_dots(hidden.dtype);
  if (dots && !(fits_l2(rows, hidden) && (down == nullptr || fits_l2(rows, *down)))) return false;
  const bool is_small_alone = rows == 1 && bounds_of(hidden.dtype).streams_one;
  if (!is_small_alone && !(dots && rows > kMostRowsByDots)) return true;
  const int64_t elements = hidden.in_features * hidden.out_features * (hidden.gated ? 2 : 1) +
                           (down == nullptr ? 0 : down->in_features * down->out_features);
  return elements * element_bytes(hidden.dtype) <= kCachedBytes * torch::stable::get_num_threads();
}

void run(Matrix x, int64_t rows, const Layer& hidden, const Layer* down, void* out, Kept kept) {
  const int64_t in_stride = padded(hidden), next_stride = down == nullptr ? 0 : padded(*down);
  const Scratch workspace(rows * (in_stride + next_stride) * static_cast<int64_t>(sizeof(float)));
  float* const data = workspace.at<float>(0);
  const bool for_codes = hidden.gate.codes != nullptr;
  const Rows prepared{data, in_stride, rows, for_codes};
  const Rows next{data + rows * in_stride, next_stride, rows, for_codes};
  const Matrix to{out, (down == nullptr ? hidden : *down).out_features};
  kernels(hidden)->prepare(hidden.dtype, x, hidden.in_features, prepared);
  run_layer(hidden, prepared, down == nullptr ? to : kNoMatrix, next, kept);
  if (down != nullptr) run_layer(*down, next, to, {}, {kNoMatrix, kNoMatrix});
}

}  // namespace fused_mlp::few_rows
