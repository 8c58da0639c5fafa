// The ops for layers with adapters, for the Backend of the file that includes this.
namespace fused_mlp {
namespace {

std::vector<QuantizedWeight> weights_of(const std::vector<OptionalTensor>& operands,
                                        const std::vector<int64_t>& layouts, const std::vector<double>& offsets) {
  STD_TORCH_CHECK(operands.size() == offsets.size() * QuantizedWeight::kOperands &&
                      layouts.size() == offsets.size() * QuantizedWeight::kSizes,
                  "quantised weights must have 5 operands and 5 sizes each");
  std::vector<QuantizedWeight> found;
  for (size_t i = 0; i < offsets.size(); ++i) found.emplace_back(operands, layouts, offsets[i], i);
  return found;
}

}  // namespace

std::vector<Tensor> adapted_forward(const Tensor& x, const std::vector<Tensor>& weights,
                                    const std::vector<OptionalTensor>& biases, const std::vector<OptionalTensor>& a,
                                    const std::vector<OptionalTensor>& b, const std::vector<double>& scalings,
                                    const std::vector<double>& dropouts, bool wide_dropout, bool up_drops_first,
                                    const std::vector<int64_t>& drawn, bool gated, int64_t activation, int64_t keep) {
  return packed_adapted_forward({}, {}, {}, {}, x, weights, biases, a, b, scalings, dropouts, wide_dropout,
                                up_drops_first, drawn, gated, activation, keep);
}

std::vector<Tensor> packed_adapted_forward(const std::vector<OptionalTensor>& packed,
                                           const std::vector<int64_t>& layouts, const std::vector<double>& offsets,
                                           const std::vector<int64_t>& places, const Tensor& x,
                                           const std::vector<Tensor>& weights,
                                           const std::vector<OptionalTensor>& biases,
                                           const std::vector<OptionalTensor>& a, const std::vector<OptionalTensor>& b,
                                           const std::vector<double>& scalings, const std::vector<double>& dropouts,
                                           bool wide_dropout, bool up_drops_first, const std::vector<int64_t>& drawn,
                                           bool gated, int64_t activation, int64_t keep) {
  const std::vector<QuantizedWeight> quantized = weights_of(packed, layouts, offsets);
  AdaptedLayers layers(weights, biases, a, b, scalings, dropouts, gated);
  layers.take(quantized, places);
  layers.check(x, activation);
  STD_TORCH_CHECK(drawn.empty() || drawn.size() == 2 + kMostLayers, "drawn must be empty, or have 5 elements");
  const Backend::Guard guard(x);
  return Adapted<Backend>(x, x, layers, activation)
      .forward(static_cast<Keep>(keep), {wide_dropout, up_drops_first, drawn});
}

std::vector<Tensor> adapted_backward(const Tensor& grad, const OptionalTensor& x, const std::vector<Tensor>& weights,
                                     const std::vector<OptionalTensor>& biases, const std::vector<OptionalTensor>& a,
                                     const std::vector<OptionalTensor>& b, const std::vector<double>& scalings,
                                     const std::vector<double>& dropouts, const std::vector<OptionalTensor>& masks,
                                     const OptionalTensor& gate, const OptionalTensor& up,
                                     const OptionalTensor& first_rows, const OptionalTensor& second_rows, bool gated,
                                     int64_t activation, int64_t needs) {
  return packed_adapted_backward({}, {}, {}, {}, grad, x, weights, biases, a, b, scalings, dropouts, masks, gate, up,
                                 first_rows, second_rows, gated, activation, needs);
}

std::vector<Tensor> packed_adapted_backward(
    const std::vector<OptionalTensor>& packed, const std::vector<int64_t>& layouts, const std::vector<double>& offsets,
    const std::vector<int64_t>& places, const Tensor& grad, const OptionalTensor& x, const std::vector<Tensor>& weights,
    const std::vector<OptionalTensor>& biases, const std::vector<OptionalTensor>& a,
    const std::vector<OptionalTensor>& b, const std::vector<double>& scalings, const std::vector<double>& dropouts,
    const std::vector<OptionalTensor>& masks, const OptionalTensor& gate, const OptionalTensor& up,
    const OptionalTensor& first_rows, const OptionalTensor& second_rows, bool gated, int64_t activation,
    int64_t needs) {
  const std::vector<QuantizedWeight> quantized = weights_of(packed, layouts, offsets);
  AdaptedLayers layers(weights, biases, a, b, scalings, dropouts, gated);
  layers.take(quantized, places);
  const KeptOfAdapted kept{gate, up, first_rows, second_rows, layers.places_of(masks)};
  layers.check_backward(grad, x, kept, needs, activation);
  const Backend::Guard guard(grad);
  return Adapted<Backend>(grad, x, layers, activation).backward(grad, kept, needs);
}

}  // namespace fused_mlp
