// The ops of layers with adapters, of the Backend of the file that includes this.
namespace fused_mlp {

std::vector<Tensor> adapted_forward(const Tensor& x, const std::vector<Tensor>& weights,
                                    const std::vector<OptionalTensor>& biases, const std::vector<OptionalTensor>& a,
                                    const std::vector<OptionalTensor>& b, const std::vector<double>& scalings,
                                    const std::vector<double>& dropouts, bool wide_dropout, bool up_drops_first,
                                    const std::vector<int64_t>& drawn, bool gated, int64_t activation, int64_t keep) {
  const AdaptedLayers layers(weights, biases, a, b, scalings, dropouts, gated);
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
  const AdaptedLayers layers(weights, biases, a, b, scalings, dropouts, gated);
  const KeptOfAdapted kept{gate, up, first_rows, second_rows, layers.places_of(masks)};
  layers.check_backward(grad, x, kept, needs, activation);
  const Backend::Guard guard(grad);
  return Adapted<Backend>(grad, x, layers, activation).backward(grad, kept, needs);
}

}  // namespace fused_mlp
