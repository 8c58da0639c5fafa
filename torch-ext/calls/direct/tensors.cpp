#include "tensors.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "../../global_state/settings.h"
#include "../answers.h"
#include "../plain_mlp.h"

namespace fused_mlp {
namespace {

// torch's functions from a Python tensor to a new handle of it, in a capsule, and from a list of capsules to tensors.
// The function from one capsule to a tensor leaks it (PyTorch 2.13).
PyObject* to_handle() { return PyTuple_GetItem(settings.handles, 0); }
PyObject* to_tensors() { return PyTuple_GetItem(settings.handles, 1); }

#if defined(CUDA_KERNEL)
constexpr auto device_of_ops = aoti_torch_device_type_cuda;
#else
constexpr auto device_of_ops = aoti_torch_device_type_cpu;
#endif

// A tensor of values without memory is one that torch's dispatcher fills with zeros.
bool is_plain(const Tensor& tensor) {
  static const int32_t device = device_of_ops(), strided = aoti_torch_layout_strided();
  int32_t its_device = -1, layout = -1;
  return aoti_torch_get_device_type(tensor.get(), &its_device) == 0 && its_device == device &&
         aoti_torch_get_layout(tensor.get(), &layout) == 0 && layout == strided &&
         (tensor.data_ptr() != nullptr || tensor.numel() == 0);
}

}  // namespace

bool take_tensor(PyObject* given, OptionalTensor* tensor, bool seen) {
  if (!is_tensor(given)) return false;
  if (!seen && truth(Owned(PyObject_CallFunctionObjArgs(settings.is_negated, given, nullptr)).get()) != kNo) {
    return false;
  }
  const Owned capsule(PyObject_CallFunctionObjArgs(to_handle(), given, nullptr));
  void* const handle = capsule ? PyCapsule_GetPointer(capsule.get(), nullptr) : nullptr;
  if (handle == nullptr) return false;
  *tensor = Tensor(static_cast<AtenTensorHandle>(handle));
  return is_plain(**tensor);
}

PyObject* tensors_of(const std::vector<Tensor>& found) {
  const Owned handles(PyList_New(found.size()));
  for (size_t i = 0; handles && i < found.size(); ++i) {
    AtenTensorHandle handle = nullptr;
    if (aoti_torch_new_tensor_handle(found[i].get(), &handle) != 0) return PyErr_NoMemory();
    PyObject* const capsule = PyCapsule_New(handle, nullptr, nullptr);
    if (capsule == nullptr || PyList_SetItem(handles.get(), i, capsule) != 0) return nullptr;
  }
  return handles ? PyObject_CallFunctionObjArgs(to_tensors(), handles.get(), nullptr) : nullptr;
}

}  // namespace fused_mlp
