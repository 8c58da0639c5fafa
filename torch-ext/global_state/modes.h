#pragma once

#include "../calls/answers.h"

// Global state during a call of any function: modes, autograd, autocast, and observers.
namespace fused_mlp {

// True if nothing named in the settings observes or changes every call.
Answer is_undisturbed();

// The part of that which is neither an attribute nor a hook: whether nothing traces or transforms the call.
Answer is_quiet();

// torch.set_default_device, and a `with torch.device(...)`, add a mode that intercepts, in Python, every call of a
// torch function and every access to a tensor's attribute, and changes nothing that matters here. During the lifetime
// of this object such modes intercept nothing.
class PastModes {
 public:
  PastModes() : said_(pass()) {}
  PastModes(const PastModes&) = delete;
  PastModes& operator=(const PastModes&) = delete;
  ~PastModes();
  // kNo if there are other modes.
  Answer said() const { return said_; }

 private:
  Answer pass();

  PyObject* context_ = nullptr;
  const Answer said_;
};

// A call in training mode under no_grad() has the bits of one that autograd records (autograd/training.py), so it is
// checked like one on an x that needs a gradient. During the lifetime of this object such checks run in this thread.
class AsRecorded {
 public:
  // `state` is the __dict__ of the module called, and may be null.
  explicit AsRecorded(PyObject* state);
  AsRecorded(const AsRecorded&) = delete;
  AsRecorded& operator=(const AsRecorded&) = delete;
  ~AsRecorded();

 private:
  const bool before_;
};
bool is_as_recorded();

// True if autograd records operations on tensors that need gradients, or a call is checked as if it did.
Answer is_recording();

// True if autocast is on for some device.
Answer is_autocasting();

// The dtype to which autocast casts operands on the ops' device; nullptr, without an error set, if it is off.
PyObject* autocast_dtype();

}  // namespace fused_mlp
