// The kernels of pointwise.h for one instruction set; see math.inl for how this is included.

struct BFloat16 {
  uint16_t bits;
};

FUSED_MLP_INLINE Vec load(const float* from) {
  Vec x;
  __builtin_memcpy(&x, from, sizeof(x));
  return x;
}

FUSED_MLP_INLINE Vec load(const BFloat16* from) {
  VecHalf x;
  __builtin_memcpy(&x, from, sizeof(x));
  return from_bf16(x);
}

FUSED_MLP_INLINE void store(float* to, Vec x) { __builtin_memcpy(to, &x, sizeof(x)); }

FUSED_MLP_INLINE void store(BFloat16* to, Vec x) {
  const VecHalf rounded = to_bf16(x);
  __builtin_memcpy(to, &rounded, sizeof(rounded));
}

// The first `count` lanes only.
template <typename T>
FUSED_MLP_INLINE Vec load(const T* from, int64_t count) {
  if (count == kWidth) return load(from);
  T lanes[kWidth] = {};
  __builtin_memcpy(lanes, from, count * sizeof(T));
  return load(lanes);
}

template <typename T>
FUSED_MLP_INLINE void store(T* to, int64_t count, Vec x) {
  if (count == kWidth) return store(to, x);
  T lanes[kWidth];
  store(lanes, x);
  __builtin_memcpy(to, lanes, count * sizeof(T));
}

template <typename T>
FUSED_MLP_INLINE T* row(Matrix matrix, int64_t r) {
  return static_cast<T*>(matrix.data) + r * matrix.row_stride;
}

// Calls body(column, count) for the vectors of a row; only the last may have a count below kWidth.
template <typename Body>
FUSED_MLP_INLINE void for_each_vector(int64_t cols, const Body& body) {
  int64_t c = 0;
  for (; c + kWidth <= cols; c += kWidth) body(c, kWidth);
  if (c < cols) body(c, cols - c);
}

#define FUSED_MLP_VECTOR_BODY [=](int64_t c, int64_t count) __attribute__((always_inline))

template <typename T, Activation kActivation>
void act_rows(const PointwiseShape& shape, Matrix x, Matrix out) {
  for (int64_t r = 0; r < shape.rows; ++r) {
    const T* x_row = row<T>(x, r);
    T* out_row = row<T>(out, r);
    for_each_vector(
        shape.cols,
        FUSED_MLP_VECTOR_BODY { store(out_row + c, count, activate<kActivation>(load(x_row + c, count))); });
  }
}

template <typename T, Activation kActivation>
void act_and_mul_rows(const PointwiseShape& shape, Matrix gate, Matrix up, Matrix out) {
  for (int64_t r = 0; r < shape.rows; ++r) {
    const T *gate_row = row<T>(gate, r), *up_row = row<T>(up, r);
    T* out_row = row<T>(out, r);
    for_each_vector(
        shape.cols, FUSED_MLP_VECTOR_BODY {
          store(out_row + c, count, activate<kActivation>(load(gate_row + c, count)) * load(up_row + c, count));
        });
  }
}

template <typename T, Activation kActivation>
void act_and_mul_backward_rows(const PointwiseShape& shape, Matrix grad, Matrix gate, Matrix up, Matrix dgate,
                               Matrix dup) {
  for (int64_t r = 0; r < shape.rows; ++r) {
    const T *grad_row = row<T>(grad, r), *gate_row = row<T>(gate, r), *up_row = row<T>(up, r);
    T *dgate_row = row<T>(dgate, r), *dup_row = row<T>(dup, r);
    for_each_vector(
        shape.cols, FUSED_MLP_VECTOR_BODY {
          const Vec incoming = load(grad_row + c, count);
          const Slope act = slope<kActivation>(load(gate_row + c, count));
          store(dgate_row + c, count, incoming * load(up_row + c, count) * act.derivative);
          store(dup_row + c, count, incoming * act.value);
        });
  }
}

// Calls visit.template operator()<T, kActivation>() for the run-time dtype and activation.
template <typename Visitor>
void visit(DType dtype, int64_t activation, const Visitor& visitor) {
  visit_activation(activation, [&]<Activation kActivation>() {
    if (dtype == DType::kFloat32) {
      visitor.template operator()<float, kActivation>();
    } else {
      visitor.template operator()<BFloat16, kActivation>();
    }
  });
}

static void act(const PointwiseShape& shape, int64_t activation, Matrix x, Matrix out) {
  visit(shape.dtype, activation,
        [&]<typename T, Activation kActivation>() { act_rows<T, kActivation>(shape, x, out); });
}

static void act_and_mul(const PointwiseShape& shape, int64_t activation, Matrix gate, Matrix up, Matrix out) {
  visit(shape.dtype, activation,
        [&]<typename T, Activation kActivation>() { act_and_mul_rows<T, kActivation>(shape, gate, up, out); });
}

static void act_and_mul_backward(const PointwiseShape& shape, int64_t activation, Matrix grad, Matrix gate, Matrix up,
                                 Matrix dgate, Matrix dup) {
  visit(shape.dtype, activation, [&]<typename T, Activation kActivation>() {
    act_and_mul_backward_rows<T, kActivation>(shape, grad, gate, up, dgate, dup);
  });
}

const PointwiseKernels kPointwise = {act, act_and_mul, act_and_mul_backward};
