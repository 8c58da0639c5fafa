#include "products.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

#include <algorithm>

#include "../../../torch-ext/operands/operands.h"
#include "../../../torch-ext/ops/torch_gemm.h"
#include "../../device.h"
#include "copy_rows.h"

namespace fused_mlp {
namespace {

using torch::headeronly::ScalarType;

int64_t in_vectors(int64_t size) { return ceil_div(size, kVectorOfHalves) * kVectorOfHalves; }

// A matrix in terms of its contiguous lines, which are its rows or its columns.
struct Lines {
  Tensor matrix;
  bool are_columns;
  int64_t count, length, stride;

  explicit Lines(const Tensor& matrix)
      : matrix(matrix),
        are_columns(matrix.stride(1) != 1),
        count(matrix.size(are_columns ? 1 : 0)),
        length(matrix.size(are_columns ? 0 : 1)),
        stride(matrix.stride(are_columns ? 1 : 0)) {}

  bool are_adjacent() const { return matrix.stride(are_columns ? 0 : 1) == 1; }
  Matrix memory() const { return {const_cast<void*>(matrix.const_data_ptr()), stride}; }
  bool are_vectors() const {
    return length % kVectorOfHalves == 0 && stride % kVectorOfHalves == 0 &&
           reinterpret_cast<uintptr_t>(matrix.const_data_ptr()) % (2 * kVectorOfHalves) == 0;
  }

  // True if it has this size, in lines of whole vectors.
  bool fits(int64_t rows, int64_t columns) const {
    return are_vectors() && matrix.size(0) == rows && matrix.size(1) == columns;
  }
  // The matrix itself, or uninitialised memory for a larger one.
  Tensor memory_for(int64_t rows, int64_t columns) const {
    if (fits(rows, columns)) return matrix;
    const Tensor made = are_columns ? new_dense(matrix, {columns, rows}) : new_dense(matrix, {rows, columns});
    return are_columns ? transposed(made) : made;
  }
  // The matrix, or a copy with zeros after its rows and columns.
  Tensor padded(int64_t rows, int64_t columns) const {
    const Tensor made = memory_for(rows, columns);
    if (!fits(rows, columns)) copy_to(Lines(made));
    return made;
  }
  void copy_to(const Lines& other) const {
    const RowsCopy copy{memory(), count, length, other.memory(), other.count, other.length};
    check(launch_copy_rows(copy, current_stream(matrix)));
  }
};

Tensor rows_of(const Tensor& matrix, int64_t start, int64_t rows) {
  return matrix_view(matrix, {rows, matrix.size(1)}, {matrix.stride(0), matrix.stride(1)}, start * matrix.stride(0));
}

struct Product {
  Lines out, a, b;
  int64_t m, k, n;
  int64_t padded_k, padded_n;

  Product(const Tensor& out, const Tensor& a, const Tensor& b)
      : out(out), a(a), b(b), m(a.size(0)), k(a.size(1)), n(b.size(1)), padded_k(k), padded_n(in_vectors(n)) {
    if (!this->a.are_columns || this->b.are_columns) padded_k = in_vectors(k);
  }

  int64_t padded_m(int64_t rows) const { return a.are_columns ? in_vectors(rows) : rows; }

  // The bytes that copying the operands reads and writes.
  double copied_bytes() const {
    constexpr double kReadAndWritten = 2.0 * sizeof(uint16_t);
    double elements = 0.0;
    if (!out.fits(m, padded_n)) elements += static_cast<double>(m) * n;
    if (!a.fits(padded_m(m), padded_k)) elements += static_cast<double>(m) * k;
    if (!b.fits(padded_k, padded_n)) elements += static_cast<double>(k) * n;
    return kReadAndWritten * elements;
  }

  // True if copies take less time than they save. Measured only on an H200, with its rates in operations and bytes per
  // microsecond.
  bool gains_by_padding() const {
    constexpr double kOddRate = 95e6, kEvenRate = 230e6, kRate = 650e6, kCopyRate = 2.5e6;
    constexpr double kSurely = 0.9, kLaunches = 10.0;
    constexpr int64_t kLeast = 64;
    const ScalarType dtype = a.matrix.scalar_type();
    if ((dtype != ScalarType::Half && dtype != ScalarType::BFloat16) || out.matrix.scalar_type() != dtype) return false;
    if (out.are_columns || !out.are_adjacent() || !a.are_adjacent() || !b.are_adjacent()) return false;
    if (std::min({m, k, n}) < kLeast) return false;
    const double copies = copied_bytes();
    if (copies == 0.0 || gpu(a.matrix.get_device_index()).major != 9) return false;
    const auto is_odd = [](const Lines& lines) { return lines.length % 2 != 0 || lines.stride % 2 != 0; };
    const double operations = 2.0 * m * k * n;
    const double saved = operations / (is_odd(out) || is_odd(a) || is_odd(b) ? kOddRate : kEvenRate);
    return kSurely * saved > operations / kRate + copies / kCopyRate + kLaunches;
  }

  // The number of rows of a block, so that copies of them are small.
  int64_t rows_of_a_block() const {
    constexpr int64_t kElements = (int64_t{1} << 27) / sizeof(uint16_t), kLeastRows = 1024;
    const int64_t row = (out.fits(m, padded_n) ? 0 : padded_n) + (a.fits(padded_m(m), padded_k) ? 0 : padded_k);
    return std::max(kLeastRows, kElements / std::max<int64_t>(row, 1) / kLeastRows * kLeastRows);
  }
};

// Calls gemm(out, a, b) on padded blocks of rows.
template <typename Gemm>
void in_blocks(const Product& p, bool reads_out, Gemm gemm) {
  const Tensor b = p.b.padded(p.padded_k, p.padded_n);
  for (int64_t start = 0, block = p.rows_of_a_block(); start < p.m; start += block) {
    const int64_t rows = std::min(block, p.m - start), padded_rows = p.padded_m(rows);
    const Lines out(rows_of(p.out.matrix, start, rows));
    const Tensor a = Lines(rows_of(p.a.matrix, start, rows)).padded(padded_rows, p.padded_k);
    const Tensor made = reads_out ? out.padded(padded_rows, p.padded_n) : out.memory_for(padded_rows, p.padded_n);
    gemm(made, a, b);
    if (!out.fits(padded_rows, p.padded_n)) Lines(made).copy_to(out);
  }
}

void torch_product(const Tensor& out, const Tensor& a, const Tensor& b, const OptionalTensor& bias) {
  if (bias) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_addmm_out(out.get(), bias->get(), a.get(), b.get(), 1.0, 1.0));
  } else if (out.scalar_type() == a.scalar_type()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_mm_out(out.get(), a.get(), b.get()));
  } else {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_mm_dtype_out(out.get(), a.get(), b.get(), aoti_torch_dtype_float32()));
  }
}

}  // namespace

void multiply(const Tensor& out, const Tensor& a, const Tensor& b, const OptionalTensor& bias) {
  const Product p(out, a, b);
  if (!p.gains_by_padding() || (bias && bias->stride(0) != 1)) return torch_product(out, a, b, bias);
  OptionalTensor padded_bias;
  if (bias) {
    const Tensor row = Lines(matrix_view(*bias, {1, p.n}, {p.n, 1})).padded(1, p.padded_n);
    padded_bias = view_of(row, std::array{p.padded_n}, std::array{int64_t{1}});
  }
  in_blocks(p, false,
            [&](const Tensor& out, const Tensor& a, const Tensor& b) { torch_product(out, a, b, padded_bias); });
}

void multiply_and_add(const Tensor& out, const Tensor& a, const Tensor& b) {
  const auto add = [](const Tensor& out, const Tensor& a, const Tensor& b) { torch_product(out, a, b, out); };
  const Product p(out, a, b);
  p.gains_by_padding() ? in_blocks(p, true, add) : add(out, a, b);
}

}  // namespace fused_mlp
