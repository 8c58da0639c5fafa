#pragma once

#include "registration.h"  // and with it Python.h

namespace fused_mlp {

// The functions of the extension as a Python module: what a fused call asks of the modules that it stands for, each
// time anew. In Python the same questions take most of a small call: inside of a model the processor's caches are full
// of the rest of the model, and an interpreter touches far more code and data than this does.
//
//   configure(linear, parameter, dropout, call, quiet, empty, unchanged)
//     The classes nn.Linear, nn.Parameter and nn.Dropout; nn.Module.__call__ as torch wrote it; and what disturbs every
//     call: functions that return something true then, dictionaries that hold something, and triples (owner, name,
//     value) of attributes that have become another object.
//   is_bare(module) -> bool
//     Whether calling a module runs the forward of its class and nothing else: no hooks, no forward of its own.
//   is_undisturbed() -> bool
//     Whether nothing that configure() named disturbs.
//   operands(projections, act, forward, unchanged, between) -> tuple | None
//     The weights of linear layers, then their biases (None where there is none), if calling the layers, the activation
//     and what is between would compute nothing else: the layers plain, `forward` that of the activation's class,
//     `unchanged` as above, and between nothing but inactive dropout.
extern PyMethodDef plain_module_methods[];

}  // namespace fused_mlp
