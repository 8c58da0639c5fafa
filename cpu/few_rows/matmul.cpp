#include "matmul.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <limits>
#include <memory>

#include "../../torch-ext/ops/torch_gemm.h"
#include "../isa/isa.h"
#include "../parallel.h"

namespace fused_mlp::vectors {

using torch::stable::Tensor;

namespace {

const Kernels* kernels() {
#if defined(__x86_64__)
  return widest(avx512::kProducts, avx2::kProducts);
#else
  return nullptr;
#endif
}

// The numbers of rows, of a, or of both if a is read by columns, for which these kernels were measured to take less
// time than torch's libraries. The float32 library is as fast on Intel's processors; on others it is slow with few
// rows, and has no AVX-512 kernels. The bfloat16 library has no AVX2 kernels. A weight that is read by columns is
// packed on every call, which needs more rows to pay.
struct Bounds {
  int64_t least, most;
};

Bounds bounds_of(DType dtype, bool by_columns) {
  constexpr int64_t kAll = std::numeric_limits<int64_t>::max(), kLeastToPack = 17;
  const bool all = dtype == DType::kBFloat16 ? isa() == Isa::kAvx2 : has_wide_vectors();
  if (by_columns) return {kLeastToPack, all ? kAll : 0};
  if (all) return {1, kAll};
  if (dtype == DType::kBFloat16) return {1, 8};
  return {2, is_intel() ? 0 : 12};
}

Matrix matrix(const Tensor& tensor, int64_t row_stride) {
  return {const_cast<void*>(tensor.const_data_ptr()), row_stride};
}

bool takes(DType dtype, int64_t rows, int64_t cols, bool by_columns) {
  if (kernels() == nullptr || cols < kernels()->block) return false;
  const auto [least, most] = bounds_of(dtype, by_columns);
  return rows >= least && rows <= most;
}

}  // namespace

bool takes_layer(DType dtype, int64_t rows, const Tensor& weight) {
  const bool by_columns = weight.stride(0) != 1;
  return weight.numel() > 0 && (!by_columns || weight.stride(1) == 1) && takes(dtype, rows, weight.size(0), by_columns);
}

bool takes_backward(DType dtype, int64_t rows, int64_t cols) { return takes(dtype, rows, cols, false); }

bool takes_matmul(const Tensor& a, const Tensor& b) {
  const DType dtype = dtype_of(a, "a");
  const bool by_rows = a.stride(1) == 1;
  if (a.numel() == 0) return false;
  if (by_rows) return takes_layer(dtype, a.size(0), transposed(b));
  return a.stride(0) == 1 && b.stride(1) == 1 && takes_backward(dtype, a.size(1), b.size(1));
}

void matmul(const Tensor& out, const Tensor& a, const Tensor& b, bool accumulate) {
  constexpr int64_t kGrain = 1 << 16;  // minimum number of products per thread
  const DType dtype = dtype_of(a, "a");
  const bool a_by_columns = a.stride(1) != 1, b_by_columns = b.stride(1) != 1;
  const int64_t rows = a.size(0), depth = a.size(1), cols = b.size(1), block = kernels()->block;
  const int64_t stride = a.stride(a_by_columns ? 1 : 0);
  const Product product{dtype,
                        a.const_data_ptr(),
                        a_by_columns ? 1 : stride,
                        a_by_columns ? stride : 1,
                        matrix(b, b.stride(b_by_columns ? 1 : 0)),
                        b_by_columns,
                        matrix(out, out.stride(0)),
                        accumulate,
                        rows,
                        depth,
                        cols};

  const int64_t blocks = ceil_div(cols, block), most = ceil_div(rows * depth * cols, kGrain);
  constexpr int64_t kLeastRows = 8;  // minimum number of rows per thread
  const int64_t available = torch::stable::get_num_threads();
  // Threads divide columns, unless there are more rows, or too few columns for all threads.
  const bool shares_rows = rows > cols || blocks < std::min(available, rows / kLeastRows);
  const int64_t threads = std::clamp<int64_t>(available, 1, std::min(most, shares_rows ? rows : blocks));
  const int64_t scratch = kernels()->scratch_size(product, shares_rows ? blocks : ceil_div(blocks, threads));
  // Two vectors must not share a cache line.
  struct alignas(64) Line {
    float elements[16];
  };
  const int64_t lines = ceil_div(scratch, 16);
  const std::unique_ptr<Line[]> memory(new Line[threads * lines]);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const auto share = [&](int64_t of) { return std::pair(of * t / threads, of * (t + 1) / threads); };
      const auto [row, last_row] = shares_rows ? share(rows) : std::pair<int64_t, int64_t>(0, rows);
      const auto [column, last_column] = shares_rows ? std::pair<int64_t, int64_t>(0, blocks) : share(blocks);
      kernels()->multiply(product, row, last_row, column, last_column, memory[t * lines].elements);
    }
  });
}

}  // namespace fused_mlp::vectors
