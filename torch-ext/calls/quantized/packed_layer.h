#pragma once

#include <algorithm>

#include "../../operands/packed.h"
#include "../answers.h"

namespace fused_mlp {

// The quantised weights of the projections of a call, in their order.
struct PackedWeights {
  static constexpr int kMost = 3;
  PackedWeight of[kMost];
  int count = 0;

  bool in_four_bits() const {
    return std::none_of(of, of + count, [](const PackedWeight& weight) { return weight.blocked(); });
  }
};

// What is known of a linear layer of torch's by the class of its weight, or nullptr.
PyObject* known_by_weight(PyObject* layer);

// Adds the quantised weight that a layer holds now, and puts its bias into a tuple, and into the place of the weight
// what bitsandbytes' layers of 4 bits have there, or None.
// The class of the layer is known by a tuple: (attributes that are as they were read, the form of such layers, the
// class of their weights). kNo where Python has to read it, or its product is of another dtype than this one.
//
// It reads what models/parts/quantized.py reads, with the same answers.
Answer read_packed(PyObject* layer, PyObject* known, bool recording, PyObject* dtype, PyObject* operands,
                   Py_ssize_t weight_place, Py_ssize_t bias_place, PackedWeights* weights);

// True if these weights are of formats that go together, and are not left to their layers' own products of so many
// rows, as those are that round x too.
Answer takes_rows(const PackedWeights& weights, PyObject* x);

}  // namespace fused_mlp
