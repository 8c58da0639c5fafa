#pragma once

#include "../ops/norms/norm.h"
#include "registration.h"  // also includes Python.h

// Python objects and names that compiled code uses.
namespace fused_mlp {

// Set once, by configure(), and never released: they live as long as the process.
struct Settings {
  PyObject* tensor;  // the classes torch.Tensor, nn.Parameter, and of nn, Linear, Dropout, Identity, GELU; of functions
  PyObject* parameter;
  PyObject* linear;
  PyObject* dropout;
  PyObject* identity;
  PyObject* gelu;
  PyObject* function;
  PyObject* builtin;
  PyObject* method;          // the class of bound methods
  PyObject* partial;         // functools.partial
  PyObject* module;          // nn.Module
  PyObject* module_list;     // nn.ModuleList
  PyObject* call;            // torch's own nn.Module.__call__
  PyObject* mark;            // the attribute of fused modules; without it fused methods run the original
  PyObject* known;           // by class of activation, of nn.GELU by `approximate`, or by function: (guards, code,
                             // what an activation of the class may hold as its function, or None)
  PyObject* known_by;        // a function: the key in `known` of an activation returned by a method
  PyObject* kernels;         // a dictionary: by class of activation, the forward that kernelize puts into its modules
  PyObject* device_hooks;    // by class of accelerate's hooks: guards, and the code that calls a hook; or None
  PyObject* known_hook;      // a function of such a class: reads it into that dictionary
  PyObject* composites;      // a dictionary: the names of classes of activations that are several torch operations
  PyObject* adapters;        // by class of layers with adapters: attributes that must be unchanged
  PyObject* adapted;         // a function: computes layers, some of which have adapters (adapters.py)
  PyObject* drops;           // whether the ops support dropout before adapters
  PyObject* module_dict;     // nn.ModuleDict
  PyObject* linears;         // by class of linear layers other than torch's: (guards, whether weights are [in, out];
                             // if they are not, there is no bias)
  PyObject* norms;           // by class of norms: the result of read_norm()
  PyObject* ops;             // by name
  PyObject* dtypes;          // those that the ops support
  PyObject* float32;         // one of them
  PyObject* is_narrowed;     // a function: whether torch multiplies float32 in another dtype; None for a GPU
  PyObject* on_device;       // the attribute of a tensor that is true on the ops' device
  PyObject* refusal;         // by a GPU's index: the refusal, or None if the ops run on it; None for a CPU
  PyObject* every_gpu;       // a function: whether they run on all GPUs
  PyObject* parts;           // by memory of a pattern and name of an op: the function that computes it part by part
  PyObject* least_recorded;  // by dtype and name of an op: the number of hidden values from which it pays in training
  PyObject* least_work;      // by whether it is gated, and in eval mode: the work of the first layer from which it pays
  PyObject* least_sum;       // by dtype: elements from which the sum and norm after an MLP or a layer pay in training
  PyObject* least_norm;      // by dtype: the number of elements from which a norm under autograd pays in eval mode
  PyObject* blocks;          // a list with one element while no backend is forced
  PyObject* is_inference;    // the function of torch
  PyObject* is_transformed;  // a function: whether torch.func transforms the call
  PyObject* quiet;           // functions that return something true if every call is observed
  PyObject* autocast;        // (whether it is enabled at all, whether it is for a device, its dtype there, the device,
                             // on a GPU a function: whether it may compute an activation of a code in float32)
  PyObject* composed;   // a function of a pattern, operands, and whether the call is as recorded (modes.h): computes
                        // them part by part; None if it cannot
  PyObject* modes;      // (number of modes for torch functions, the mode of an index, class of those that
                        // change nothing here, class of a context in which none intercepts anything)
  PyObject* empty;      // dictionaries that are not empty if every call is observed
  PyObject* unchanged;  // triples (owner, name, value): attributes that differ if every call is observed
  PyObject* exchange;   // the arguments of configure_direct_calls()
  PyObject* is_negated;
  PyObject* empty_like;
  PyObject* is_profiled;
  PyObject* handles;       // torch functions: from a tensor to a handle, from a list of handles to tensors; or None
  PyObject* shares;        // by code of an activation: how many hidden values count as one in least_recorded, for MLPs
                           // without a gate
  PyObject* work_of_many;  // factor for the work of an MLP without a gate in least_work, if its parts are
                           // many operations: its activation is, or a norm of the sum follows it
  PyObject* saved_tensors_hooks;  // a torch function: the hooks of tensors that autograd saves
  PyObject* layout;               // functions of autograd/nodes.py
  PyObject* edges;
  PyObject* quantised;  // by class of quantised layers or weights: the result of read_packed()
  PyObject* codes;      // by 4-bit format and device index: the values of its codes
  PyObject* offsets;    // by id of the tensor of an offset: (a weak reference to it, its version, the number)
  PyObject* few_rows;   // quantised layers do not run calls of up to this many rows themselves
  PyObject* most_rows;  // a function of x, of whether weights are int8 and x may be rounded, and of the elements
                        // of the largest weight: the maximum number of rows of x, as above
};
extern Settings settings;

// The names used, created by configure().
struct Names {
  PyObject* state = PyUnicode_InternFromString("__dict__");
  PyObject* call = PyUnicode_InternFromString("__call__");
  PyObject* forward = PyUnicode_InternFromString("forward");
  // Of a module that accelerate hooks.
  PyObject* device_hook = PyUnicode_InternFromString("_hf_hook");
  PyObject* kept_forward = PyUnicode_InternFromString("_old_forward");
  PyObject* function_code = PyUnicode_InternFromString("__code__");
  PyObject* enter = PyUnicode_InternFromString("__enter__");
  PyObject* exit = PyUnicode_InternFromString("__exit__");
  PyObject* class_name = PyUnicode_InternFromString("__name__");
  PyObject* bound_to = PyUnicode_InternFromString("__self__");
  PyObject* bound_function = PyUnicode_InternFromString("__func__");
  PyObject* parameters = PyUnicode_InternFromString("_parameters");
  PyObject* modules = PyUnicode_InternFromString("_modules");
  PyObject* weight = PyUnicode_InternFromString("weight");
  PyObject* bias = PyUnicode_InternFromString("bias");
  PyObject* training = PyUnicode_InternFromString("training");
  PyObject* probability = PyUnicode_InternFromString("p");
  PyObject* normalized = PyUnicode_InternFromString("normalized_shape");
  PyObject* block_op = PyUnicode_InternFromString("residual_mlp");
  PyObject* mlp = PyUnicode_InternFromString("mlp");
  PyObject* gated_mlp = PyUnicode_InternFromString("gated_mlp");
  PyObject* whole = PyUnicode_InternFromString("whole");
  PyObject* gated_block_op = PyUnicode_InternFromString("residual_gated_mlp");
  PyObject* norm_forward = PyUnicode_InternFromString("norm_forward");
  PyObject* sum_norm_forward = PyUnicode_InternFromString("sum_norm_forward");
  PyObject* norm_backward = PyUnicode_InternFromString("norm_backward");
  PyObject* projections_forward = PyUnicode_InternFromString("projections_forward");
  PyObject* projections_backward = PyUnicode_InternFromString("projections_backward");
  PyObject* rotary = PyUnicode_InternFromString("rotary");
  PyObject* training_forward = PyUnicode_InternFromString("training_forward");
  PyObject* training_backward = PyUnicode_InternFromString("training_backward");
  PyObject* training_backward_ = PyUnicode_InternFromString("training_backward_");
  PyObject* adapted_forward = PyUnicode_InternFromString("adapted_forward");
  PyObject* adapted_backward = PyUnicode_InternFromString("adapted_backward");
  PyObject *zero = PyFloat_FromDouble(0.0), *one = PyFloat_FromDouble(1.0);
  PyObject* no_norm = PyLong_FromSsize_t(static_cast<Py_ssize_t>(NormKind::kNone));  // its code
  PyObject* scale = PyLong_FromSsize_t(static_cast<Py_ssize_t>(NormKind::kScale));   // likewise
  PyObject* layer_of_one_more = PyLong_FromSsize_t(static_cast<Py_ssize_t>(NormKind::kLayerOfOneMore));
  PyObject* rms_of_one_more = PyLong_FromSsize_t(static_cast<Py_ssize_t>(NormKind::kRmsOfOneMore));
  PyObject* approximate = PyUnicode_InternFromString("approximate");
  PyObject* act = PyUnicode_InternFromString("act");
  PyObject* partial_function = PyUnicode_InternFromString("func");
  PyObject* arguments = PyUnicode_InternFromString("args");
  PyObject* keywords = PyUnicode_InternFromString("keywords");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* numel = PyUnicode_InternFromString("numel");
  PyObject* size = PyUnicode_InternFromString("size");
  PyObject *first = PyLong_FromSsize_t(0), *last = PyLong_FromSsize_t(-1);  // dimensions
  PyObject* transpose = PyUnicode_InternFromString("t");
  PyObject* get_device = PyUnicode_InternFromString("get_device");
  PyObject* requires_grad = PyUnicode_InternFromString("requires_grad");
  PyObject* is_inference = PyUnicode_InternFromString("is_inference");
  PyObject* is_leaf = PyUnicode_InternFromString("is_leaf");
  PyObject* detach = PyUnicode_InternFromString("detach");
  // Attributes of an autograd node (autograd/training.py).
  PyObject* how = PyUnicode_InternFromString("how");
  PyObject* edges = PyUnicode_InternFromString("edges");
  PyObject* own = PyUnicode_InternFromString("own");
  PyObject* to_save = PyUnicode_InternFromString("to_save");
  PyObject* materialize_grads = PyUnicode_InternFromString("materialize_grads");
  PyObject* op = PyUnicode_InternFromString("op");
  PyObject* memory = PyUnicode_InternFromString("memory");
  PyObject* packed = PyUnicode_InternFromString("packed");
  PyObject* gated = PyUnicode_InternFromString("gated");
  PyObject* up_first = PyUnicode_InternFromString("up_first");
  PyObject* order = PyUnicode_InternFromString("__mro__");
  PyObject* buffers = PyUnicode_InternFromString("_buffers");
  PyObject* router_bias = PyUnicode_InternFromString("e_score_correction_bias");
  PyObject* config = PyUnicode_InternFromString("config");
  PyObject* experts_way =
      PyUnicode_InternFromString("_experts_implementation_internal");  // (models/experts/interface.py)
  // Attributes of PEFT's layers.
  PyObject* disabled = PyUnicode_InternFromString("_disable_adapters");
  PyObject* merged = PyUnicode_InternFromString("merged_adapters");
  PyObject* active = PyUnicode_InternFromString("_active_adapter");
  PyObject* scaling = PyUnicode_InternFromString("scaling");
  PyObject* base_layer = PyUnicode_InternFromString("base_layer");
  PyObject* casts_input = PyUnicode_InternFromString("cast_input_dtype_enabled");
  PyObject* variants = PyUnicode_InternFromString("lora_variant");
  PyObject* use_dora = PyUnicode_InternFromString("use_dora");
  PyObject* of_adapters[3] = {PyUnicode_InternFromString("lora_A"), PyUnicode_InternFromString("lora_B"),
                              PyUnicode_InternFromString("lora_dropout")};
  // Attributes of layers with quantised weights, and of their members.
  PyObject* compute_dtype = PyUnicode_InternFromString("compute_dtype");
  PyObject* compute_type_is_set = PyUnicode_InternFromString("compute_type_is_set");
  PyObject* quant_state = PyUnicode_InternFromString("quant_state");
  PyObject* quant_type = PyUnicode_InternFromString("quant_type");
  PyObject* nested = PyUnicode_InternFromString("nested");
  PyObject* packed_for_cpu = PyUnicode_InternFromString("packing_format_for_cpu");
  PyObject* ipex = PyUnicode_InternFromString("ipex");
  PyObject* blocksize = PyUnicode_InternFromString("blocksize");
  PyObject* absmax = PyUnicode_InternFromString("absmax");
  PyObject* code = PyUnicode_InternFromString("code");
  PyObject* state2 = PyUnicode_InternFromString("state2");
  PyObject* offset = PyUnicode_InternFromString("offset");
  PyObject* version = PyUnicode_InternFromString("_version");
  PyObject* activation_scheme = PyUnicode_InternFromString("activation_scheme");
  PyObject* activation_scale = PyUnicode_InternFromString("activation_scale");
  PyObject* scale_inv = PyUnicode_InternFromString("weight_scale_inv");
  PyObject* block_size = PyUnicode_InternFromString("block_size");
  PyObject* scale_of_rows = PyUnicode_InternFromString("weight_scale");
  PyObject* of_matmul = PyUnicode_InternFromString("state");
  PyObject* is_wide = PyUnicode_InternFromString("has_fp16_weights");
  PyObject* int8_data = PyUnicode_InternFromString("CB");
  PyObject* int8_scales = PyUnicode_InternFromString("SCB");
  PyObject* tensor_data = PyUnicode_InternFromString("qdata");
  PyObject* tensor_scale = PyUnicode_InternFromString("scale");
  PyObject* tile_scales = PyUnicode_InternFromString("scale_and_zero");
  // Attributes of a torchao tensor that change its input: none of them may be present.
  PyObject* on_input[3] = {PyUnicode_InternFromString("act_pre_scale"), PyUnicode_InternFromString("act_quant_scale"),
                           PyUnicode_InternFromString("act_quant_kwargs")};
  PyObject* input_bounds[2] = {PyUnicode_InternFromString("hp_value_lb"), PyUnicode_InternFromString("hp_value_ub")};
  // The methods that look up attributes: all names, and those that are not found otherwise.
  PyObject* finders[2] = {PyUnicode_InternFromString("__getattribute__"), PyUnicode_InternFromString("__getattr__")};
  // The hooks of a forward, then those of a backward.
  PyObject* hooks[4] = {PyUnicode_InternFromString("_forward_hooks"), PyUnicode_InternFromString("_forward_pre_hooks"),
                        PyUnicode_InternFromString("_backward_hooks"),
                        PyUnicode_InternFromString("_backward_pre_hooks")};
  // The call of a module that has its own: torch.nn.Module.compile() creates the second one.
  PyObject* own_calls[2] = {PyUnicode_InternFromString("_call_impl"),
                            PyUnicode_InternFromString("_compiled_call_impl")};
};
const Names& names();

// Reads the settings from a dictionary by name. False if a Python error is set.
bool configure(PyObject* given);

}  // namespace fused_mlp
