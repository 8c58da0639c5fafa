#pragma once

#include <algorithm>

#include "../../operands/packed.h"
#include "../answers.h"

namespace fused_mlp {

// The quantised weights of the projections of a call, in order.
struct PackedWeights {
  static constexpr int kMost = 3;
  PackedWeight of[kMost];
  int count = 0;

  bool in_four_bits() const {
    return std::none_of(of, of + count, [](const PackedWeight& weight) { return weight.blocked(); });
  }
};

// Returns the entry of one of torch's linear layers by the class of its weight, or nullptr.
PyObject* known_by_weight(PyObject* layer);

// Appends the quantised weight that a layer currently holds, and puts its bias into a tuple; the weight's place in the
// tuple gets the weight of a four-bit bitsandbytes layer, or None for other layers.
// The entry of the layer's class is a tuple: (attributes that must be unchanged, the form of such layers, the class of
// their weights). kNo if Python has to read the layer, or its product has another dtype than this one.
//
// It reads the same as models/parts/quantized.py, with the same answers.
Answer read_packed(PyObject* layer, PyObject* known, bool recording, PyObject* dtype, PyObject* operands,
                   Py_ssize_t weight_place, Py_ssize_t bias_place, PackedWeights* weights);

// True if these weights have compatible formats, and are not left to their layers' own products for this many rows,
// which may round x too. kError, perhaps without an error set, if Python has to decide.
Answer takes_rows(const PackedWeights& weights, PyObject* x);

}  // namespace fused_mlp
