// The kernels of pointwise.h for one instruction set, on the blocks of memory.inl; see math.inl, which explains how
// this file is included.

// Calls body(column, count) for the blocks of a row; only the last may have a count below kBlock.
template <typename Body>
FUSED_MLP_INLINE void for_each_block(int64_t cols, const Body& body) {
  int64_t c = 0;
  for (; c + kBlock <= cols; c += kBlock) body(c, kBlock);
  if (c < cols) body(c, cols - c);
}

template <typename T, Activation kActivation>
void act_rows(const PointwiseShape& shape, Matrix x, Matrix out) {
  for (int64_t r = 0; r < shape.rows; ++r) {
    const T* x_row = row<T>(x, r);
    T* out_row = row<T>(out, r);
    for_each_block(shape.cols, [=](int64_t c, int64_t count) __attribute__((always_inline)) {
      Pair values = load(x_row + c, count);
      for (Vec& value : values.half) value = activate<kActivation, kIsBf16<T>>(value);
      store(out_row + c, count, values);
    });
  }
}

template <typename T, Activation kActivation>
void act_backward_rows(const PointwiseShape& shape, Matrix grad, Matrix x, Matrix dx, Matrix values) {
  for (int64_t r = 0; r < shape.rows; ++r) {
    const T *grad_row = row<T>(grad, r), *x_row = row<T>(x, r);
    T *dx_row = row<T>(dx, r), *values_row = values.data == nullptr ? nullptr : row<T>(values, r);
    for_each_block(shape.cols, [=](int64_t c, int64_t count) __attribute__((always_inline)) {
      const Pair grads = load(grad_row + c, count), xs = load(x_row + c, count);
      Pair dxs, acts;
      for (int h = 0; h < 2; ++h) {
        const Slope act = slope<kActivation>(xs.half[h]);
        dxs.half[h] = grads.half[h] * act.derivative;
        acts.half[h] = act.value;
      }
      store(dx_row + c, count, dxs);
      if (values_row != nullptr) store(values_row + c, count, acts);
    });
  }
}

template <typename T, Activation kActivation>
void act_and_mul_rows(const PointwiseShape& shape, Matrix gate, Matrix up, Matrix out) {
  for (int64_t r = 0; r < shape.rows; ++r) {
    const T *gate_row = row<T>(gate, r), *up_row = row<T>(up, r);
    T* out_row = row<T>(out, r);
    for_each_block(shape.cols, [=](int64_t c, int64_t count) __attribute__((always_inline)) {
      const Pair gates = load(gate_row + c, count), ups = load(up_row + c, count);
      Pair products;
      for (int h = 0; h < 2; ++h) products.half[h] = activate<kActivation, kIsBf16<T>>(gates.half[h]) * ups.half[h];
      store(out_row + c, count, products);
    });
  }
}

template <typename T, Activation kActivation>
void act_and_mul_backward_rows(const PointwiseShape& shape, Matrix grad, Matrix gate, Matrix up, Matrix dgate,
                               Matrix dup, Matrix values) {
  for (int64_t r = 0; r < shape.rows; ++r) {
    const T *grad_row = row<T>(grad, r), *gate_row = row<T>(gate, r), *up_row = row<T>(up, r);
    T *dgate_row = row<T>(dgate, r), *dup_row = row<T>(dup, r);
    T* values_row = values.data == nullptr ? nullptr : row<T>(values, r);
    for_each_block(shape.cols, [=](int64_t c, int64_t count) __attribute__((always_inline)) {
      const Pair grads = load(grad_row + c, count), gates = load(gate_row + c, count), ups = load(up_row + c, count);
      Pair dgates, dups, products;
      for (int h = 0; h < 2; ++h) {
        const Slope act = slope<kActivation>(gates.half[h]);
        dgates.half[h] = grads.half[h] * ups.half[h] * act.derivative;
        dups.half[h] = grads.half[h] * act.value;
        products.half[h] = act.value * ups.half[h];
      }
      store(dgate_row + c, count, dgates);
      store(dup_row + c, count, dups);
      if (values_row != nullptr) store(values_row + c, count, products);
    });
  }
}

static void column_sums(const PointwiseShape& shape, Matrix x, Matrix out) {
  for_each_block(shape.cols, [=](int64_t c, int64_t count) __attribute__((always_inline)) {
    Pair sums{};
    int64_t r = 0;
    for (; r + 4 <= shape.rows; r += 4) {  // four loads per addition to the sums, because additions wait for each other
      Pair rows[4];
      for (int i = 0; i < 4; ++i) rows[i] = load(row<BFloat16>(x, r + i) + c, count);
      for (int h = 0; h < 2; ++h) {
        sums.half[h] += (rows[0].half[h] + rows[1].half[h]) + (rows[2].half[h] + rows[3].half[h]);
      }
    }
    for (; r < shape.rows; ++r) {
      const Pair values = load(row<BFloat16>(x, r) + c, count);
      for (int h = 0; h < 2; ++h) sums.half[h] += values.half[h];
    }
    store(row<BFloat16>(out, 0) + c, count, sums);
  });
}

FUSED_MLP_INLINE float lanes_sum(Vec x) {
  float sum = 0.0f;
  for (int i = 0; i < kWidth; ++i) sum += x[i];
  return sum;
}

// Sets all but the first `count` elements of a block to 0.
template <typename T>
FUSED_MLP_INLINE void clear_rest(Pair& x, int64_t count) {
  for (int64_t i = count; i < kBlock; ++i) {
    x.half[kIsBf16<T> ? i % 2 : i / kWidth][kIsBf16<T> ? i / 2 : i % kWidth] = 0.0f;
  }
}

// As in cuda/norms/norm.cuh.
FUSED_MLP_INLINE float variance_of(float mean_square, float mean) {
  const float square = mean * mean;
  if (square < mean_square) return mean_square - square;
  return mean_square < 3e38f ? 0.0f : mean_square;
}

// A sum of vectors for long rows: some are added up first, so that rounding errors stay small.
struct LongSum {
  Vec all, few;
  int count;
};

FUSED_MLP_INLINE void add(LongSum& sum, const Pair& values) {
  constexpr int kFew = 16;
  sum.few += values.half[0] + values.half[1];
  if (++sum.count % kFew != 0) return;
  sum.all += sum.few;
  sum.few = splat(0.0f);
}

FUSED_MLP_INLINE float total(const LongSum& sum) { return lanes_sum(sum.all + sum.few); }

// A norm maps the values of a row to (value - mean - left) * scale, where `left` is the rounding error of the mean, so
// that a row of equal values gives 0.
struct Statistics {
  float mean, left, scale;
};

// values_at(c, count): the block of the row at column c.
template <typename T, typename ValuesAt>
FUSED_MLP_INLINE Statistics statistics_of(int64_t cols, const Norm& norm, const ValuesAt& values_at) {
  const float share = 1.0f / static_cast<float>(cols);
  float mean = 0.0f;
  if (norm.centred()) {
    LongSum sum{};
    for_each_block(cols, [&](int64_t c, int64_t count) __attribute__((always_inline)) {
      Pair values = values_at(c, count);
      for (Vec& value : values.half) value *= share;
      add(sum, values);
    });
    mean = total(sum);
  }
  LongSum rests{}, squares{};
  for_each_block(cols, [&](int64_t c, int64_t count) __attribute__((always_inline)) {
    Pair values = values_at(c, count);
    for (Vec& value : values.half) value -= mean;
    if (count < kBlock) clear_rest<T>(values, count);
    add(rests, values);
    for (Vec& value : values.half) value *= value;
    add(squares, values);
  });
  const float left = norm.centred() ? total(rests) * share : 0.0f;
  return {mean, left, 1.0f / __builtin_sqrtf(variance_of(total(squares) * share, left) + norm.eps)};
}

// The values of a row start at `first`, and may be of either type.
template <typename T>
FUSED_MLP_INLINE Pair load_features(const Features& features, int64_t first, int64_t col, int64_t count) {
  if (features.wide) return load_as<T>(static_cast<const float*>(features.data) + first + col, count);
  return load(static_cast<const T*>(features.data) + first + col, count);
}

template <typename T>
FUSED_MLP_INLINE Pair rounded(Pair x) {
  if constexpr (!kIsBf16<T>) return x;
  BFloat16 block[kBlock];
  store(block, x);
  return load(block);
}

template <typename T, Residual kResidual>
void norm_rows(const PointwiseShape& shape, const Norm& norm, int64_t first, Matrix x, Matrix residual, Matrix out,
               RowStatistics statistics) {
  for (int64_t r = 0; r < shape.rows; ++r) {
    const auto of_row = [=](const Features& f) { return (first + r) / f.rows * f.stride; };
    const int64_t first_weight = of_row(norm.weight), first_bias = of_row(norm.bias);
    const T* x_row = row<T>(x, r);
    const T* residual_row = kResidual == Residual::kNone ? nullptr : row<T>(residual, r);
    T* out_row = row<T>(out, r);
    const auto add_residual = [=](Pair values, int64_t c, int64_t count) __attribute__((always_inline)) {
      const Pair others = load(residual_row + c, count);
      for (int h = 0; h < 2; ++h) values.half[h] = values.half[h] * norm.factor + others.half[h];
      return values;
    };
    const auto values_at = [=](int64_t c, int64_t count) __attribute__((always_inline)) {
      const Pair values = load(x_row + c, count);
      return kResidual == Residual::kNormed ? add_residual(values, c, count) : values;
    };
    const Statistics its = norm.normed() ? statistics_of<T>(shape.cols, norm, values_at) : Statistics{};
    if (statistics.scales != nullptr) {
      statistics.scales[first + r] = its.scale;
      if (norm.centred()) statistics.means[first + r] = its.mean + its.left;
    }
    for_each_block(shape.cols, [=](int64_t c, int64_t count) __attribute__((always_inline)) {
      Pair values = values_at(c, count);
      if (norm.normed()) {
        for (Vec& value : values.half) value = (value - its.mean - its.left) * its.scale;
        if (norm.rounded) values = rounded<T>(values);
      }
      if (norm.weight.data != nullptr) {
        const Pair weights = load_features<T>(norm.weight, first_weight, c, count);
        for (int h = 0; h < 2; ++h) values.half[h] *= weights.half[h] + norm.weight_offset();
      }
      if (norm.bias.data != nullptr) {
        const Pair biases = load_features<T>(norm.bias, first_bias, c, count);
        for (int h = 0; h < 2; ++h) values.half[h] += biases.half[h];
      }
      store(out_row + c, count, kResidual == Residual::kAdded ? add_residual(values, c, count) : values);
    });
  }
}

template <typename T>
void norm_gradients_of(const PointwiseShape& shape, const Norm& norm, const NormGradients& rows) {
  const float share = 1.0f / static_cast<float>(shape.cols);
  const bool centred = norm.centred();
  const auto weights_at = [=](int64_t c, int64_t count) __attribute__((always_inline)) {
    if (norm.weight.data == nullptr) return Pair{{splat(1.0f), splat(1.0f)}};
    Pair weights = load_features<T>(norm.weight, 0, c, count);
    for (Vec& weight : weights.half) weight += norm.weight_offset();
    return weights;
  };
  const auto add_to = [](float* sums, const Pair& values) __attribute__((always_inline)) {
    Pair sum = load(sums);
    for (int h = 0; h < 2; ++h) sum.half[h] += values.half[h];
    store(sums, sum);
  };
  for (int64_t r = 0; r < shape.rows; ++r) {
    const T *x_row = row<T>(rows.x, r), *grad_row = row<T>(rows.grad, r);
    const T* residual_row = rows.residual_grad.data == nullptr ? nullptr : row<T>(rows.residual_grad, r);
    T* dx_row = rows.dx.data == nullptr ? nullptr : row<T>(rows.dx, r);
    const float scale = rows.scales[r], mean = centred ? rows.means[r] : 0.0f;
    LongSum slopes{}, shifts{};
    for_each_block(shape.cols, [&](int64_t c, int64_t count) __attribute__((always_inline)) {
      const Pair xs = load(x_row + c, count), weights = weights_at(c, count);
      const Pair grads = load(grad_row + c, count);  // a partial block is followed by zeros
      Pair products, weighted, of_slope;
      for (int h = 0; h < 2; ++h) {
        products.half[h] = grads.half[h] * ((xs.half[h] - mean) * scale);
        of_slope.half[h] = products.half[h] * weights.half[h];
        weighted.half[h] = grads.half[h] * weights.half[h];
      }
      add(slopes, of_slope);
      add(shifts, weighted);
      if (rows.weight_sums != nullptr) add_to(rows.weight_sums + c, products);
      if (rows.bias_sums != nullptr) add_to(rows.bias_sums + c, grads);
    });
    if (dx_row == nullptr) continue;
    const float slope = total(slopes) * share, shift = centred ? total(shifts) * share : 0.0f;
    for_each_block(shape.cols, [=](int64_t c, int64_t count) __attribute__((always_inline)) {
      const Pair xs = load(x_row + c, count), weights = weights_at(c, count), grads = load(grad_row + c, count);
      Pair changes;
      for (int h = 0; h < 2; ++h) {
        const Vec value = (xs.half[h] - mean) * scale;
        changes.half[h] = (grads.half[h] * weights.half[h] - value * slope - shift) * scale;
      }
      if (residual_row != nullptr) {
        const Pair others = load(residual_row + c, count);
        for (int h = 0; h < 2; ++h) changes.half[h] += others.half[h];
      }
      store(dx_row + c, count, changes);
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

static void act_backward(const PointwiseShape& shape, int64_t activation, Matrix grad, Matrix x, Matrix dx,
                         Matrix values) {
  visit(shape.dtype, activation,
        [&]<typename T, Activation kActivation>() { act_backward_rows<T, kActivation>(shape, grad, x, dx, values); });
}

static void act_and_mul(const PointwiseShape& shape, int64_t activation, Matrix gate, Matrix up, Matrix out) {
  visit(shape.dtype, activation,
        [&]<typename T, Activation kActivation>() { act_and_mul_rows<T, kActivation>(shape, gate, up, out); });
}

static void act_and_mul_backward(const PointwiseShape& shape, int64_t activation, Matrix grad, Matrix gate, Matrix up,
                                 Matrix dgate, Matrix dup, Matrix values) {
  visit(shape.dtype, activation, [&]<typename T, Activation kActivation>() {
    act_and_mul_backward_rows<T, kActivation>(shape, grad, gate, up, dgate, dup, values);
  });
}

template <typename T>
void norm_of(const PointwiseShape& shape, const Norm& norm, int64_t first, Matrix x, Matrix residual, Matrix out,
             RowStatistics statistics) {
  switch (norm.residual) {
    case Residual::kNone:
      return norm_rows<T, Residual::kNone>(shape, norm, first, x, residual, out, statistics);
    case Residual::kNormed:
      return norm_rows<T, Residual::kNormed>(shape, norm, first, x, residual, out, statistics);
    case Residual::kAdded:
      return norm_rows<T, Residual::kAdded>(shape, norm, first, x, residual, out, statistics);
  }
}

static void norm(const PointwiseShape& shape, const Norm& norm, int64_t first, Matrix x, Matrix residual, Matrix out,
                 RowStatistics statistics) {
  const auto rows = shape.dtype == DType::kFloat32 ? norm_of<float> : norm_of<BFloat16>;
  rows(shape, norm, first, x, residual, out, statistics);
}

static void norm_gradients(const PointwiseShape& shape, const Norm& norm, const NormGradients& rows) {
  const auto gradients = shape.dtype == DType::kFloat32 ? norm_gradients_of<float> : norm_gradients_of<BFloat16>;
  gradients(shape, norm, rows);
}

static void norm_sums(const PointwiseShape& shape, const float* sums, int64_t stride, bool wide, void* out) {
  for_each_block(shape.cols, [=](int64_t c, int64_t count) __attribute__((always_inline)) {
    constexpr int64_t kFew = 32;
    Pair total{};
    for (int64_t first = 0; first < shape.rows; first += kFew) {
      Pair few{};
      for (int64_t r = first; r < shape.rows && r < first + kFew; ++r) {
        const Pair part = load(sums + r * stride + c);
        for (int h = 0; h < 2; ++h) few.half[h] += part.half[h];
      }
      for (int h = 0; h < 2; ++h) total.half[h] += few.half[h];
    }
    if (shape.dtype == DType::kFloat32) {
      store(static_cast<float*>(out) + c, count, total);
    } else if (!wide) {
      store(static_cast<BFloat16*>(out) + c, count, total);
    } else {
      for (int64_t i = 0; i < count; ++i) static_cast<float*>(out)[c + i] = total.half[i % 2][i / 2];
    }
  });
}

const PointwiseKernels kPointwise = {act,         act_backward, act_and_mul,    act_and_mul_backward,
                                     column_sums, norm,         norm_gradients, norm_sums};
