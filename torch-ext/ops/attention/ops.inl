// The ops for attention, for the Backend of the file that includes this.
namespace fused_mlp {

std::vector<Tensor> projections_forward(const Tensor& x, const Tensor& first_weight,
                                        const OptionalTensor& second_weight, const OptionalTensor& third_weight,
                                        const OptionalTensor& first_bias, const OptionalTensor& second_bias,
                                        const OptionalTensor& third_bias) {
  const Backend::Guard guard(x);
  const OptionalTensor first(first_weight);
  return projections<Backend>(x, {&first, &second_weight, &third_weight}, {&first_bias, &second_bias, &third_bias});
}

std::vector<Tensor> projections_backward(const OptionalTensor& first_grad, const OptionalTensor& second_grad,
                                         const OptionalTensor& third_grad, const OptionalTensor& x,
                                         const OptionalTensor& first_weight, const OptionalTensor& second_weight,
                                         const OptionalTensor& third_weight, int64_t needs) {
  const Tensor& like = first_grad ? *first_grad : second_grad ? *second_grad : third_grad.value();
  const Backend::Guard guard(like);
  return projection_gradients<Backend>({&first_grad, &second_grad, &third_grad}, x,
                                       {&first_weight, &second_weight, &third_weight}, needs);
}

std::tuple<Tensor, Tensor> rotary(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                                  bool inverse) {
  const Backend::Guard guard(q);
  return rotated<Backend>(q, k, cos, sin, inverse);
}

}  // namespace fused_mlp
