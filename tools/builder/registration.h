#pragma once

// The macros torch_binding.cpp registers its ops with, under the names kernel-builder gives them in the header it
// generates: each expands TORCH_EXTENSION_NAME before torch's own macro turns it into a token.

#include <Python.h>

#define STABLE_TORCH_LIBRARY_EXPAND(name, ops) STABLE_TORCH_LIBRARY(name, ops)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(name, key, ops) STABLE_TORCH_LIBRARY_IMPL(name, key, ops)

// Python is not linked against: the interpreter that imports the extension defines this. Being weak, it may stay
// undefined at link time, while any other undefined symbol is an error there and not at the import on a user's machine.
#pragma weak PyModule_Create2

// An empty Python module: importing it loads the library, whose static initialisers register the ops.
#define REGISTER_EXTENSION(name) FUSED_MLP_DEFINE_MODULE(name)
#define FUSED_MLP_DEFINE_MODULE(name)                                                           \
  PyMODINIT_FUNC PyInit_##name() {                                                              \
    static PyModuleDef definition = {                                                           \
        PyModuleDef_HEAD_INIT, #name, nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr}; \
    return PyModule_Create(&definition);                                                        \
  }
