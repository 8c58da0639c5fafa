#pragma once

// The macros with which torch_binding.cpp registers its ops, under the names of the header that kernel-builder
// generates. Each expands TORCH_EXTENSION_NAME before torch's own macro turns it into a token.

#include <Python.h>

#define STABLE_TORCH_LIBRARY_EXPAND(name, ops) STABLE_TORCH_LIBRARY(name, ops)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(name, key, ops) STABLE_TORCH_LIBRARY_IMPL(name, key, ops)

// The extension does not link with Python: the interpreter that imports it defines these symbols. Weak symbols may stay
// undefined at link time; any other undefined symbol is an error then, and not at the import on a user's machine.
#pragma weak PyBool_FromLong
#pragma weak PyCapsule_GetPointer
#pragma weak PyCapsule_New
#pragma weak PyDict_GetItemString
#pragma weak PyDict_GetItemWithError
#pragma weak PyDict_New
#pragma weak PyDict_Next
#pragma weak PyDict_Type
#pragma weak PyErr_Clear
#pragma weak PyErr_ExceptionMatches
#pragma weak PyErr_Fetch
#pragma weak PyErr_Format
#pragma weak PyErr_NoMemory
#pragma weak PyErr_Occurred
#pragma weak PyErr_Restore
#pragma weak PyErr_SetString
#pragma weak PyErr_WriteUnraisable
#pragma weak PyEval_RestoreThread
#pragma weak PyEval_SaveThread
#pragma weak PyExc_AttributeError
#pragma weak PyExc_BufferError
#pragma weak PyExc_IndexError
#pragma weak PyExc_KeyError
#pragma weak PyExc_RuntimeError
#pragma weak PyExc_TypeError
#pragma weak PyExc_ValueError
#pragma weak PyFloat_AsDouble
#pragma weak PyFloat_FromDouble
#pragma weak PyFloat_Type
#pragma weak PyList_GetItem
#pragma weak PyList_New
#pragma weak PyList_SetItem
#pragma weak PyList_Size
#pragma weak PyLong_AsSsize_t
#pragma weak PyLong_FromSsize_t
#pragma weak PyModule_AddFunctions
#pragma weak PyModule_Create2
#pragma weak PyModule_GetDict
#pragma weak PyModule_Type
#pragma weak PyObject_CallFunctionObjArgs
#pragma weak PyObject_CallMethodObjArgs
#pragma weak PyObject_CallObject
#pragma weak PyObject_GenericGetAttr
#pragma weak PyObject_GetAttr
#pragma weak PyObject_HasAttrString
#pragma weak PyObject_IsTrue
#pragma weak PyObject_SetAttr
#pragma weak PyObject_Size
#pragma weak PySequence_Contains
#pragma weak PyTuple_GetItem
#pragma weak PyTuple_New
#pragma weak PyTuple_Pack
#pragma weak PyTuple_SetItem
#pragma weak PyTuple_Size
#pragma weak PyTuple_Type
#pragma weak PyType_GetFlags
#pragma weak PyType_IsSubtype
#pragma weak PyUnicode_CompareWithASCIIString
#pragma weak PyUnicode_InternFromString
#pragma weak PyWeakref_GetObject
#pragma weak _Py_Dealloc
#pragma weak _Py_FalseStruct
#pragma weak _Py_NoneStruct
#pragma weak _Py_TrueStruct

// An empty Python module: importing it loads the library, whose static initialisers register the ops. A binding whose
// module has functions makes its own.
#define REGISTER_EXTENSION(name) FUSED_MLP_DEFINE_MODULE(name)
#define FUSED_MLP_DEFINE_MODULE(name)                                                           \
  PyMODINIT_FUNC PyInit_##name() {                                                              \
    static PyModuleDef definition = {                                                           \
        PyModuleDef_HEAD_INIT, #name, nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr}; \
    return PyModule_Create(&definition);                                                        \
  }
