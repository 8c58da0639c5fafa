#pragma once

#include "../calls/answers.h"

// Global state around a call, whatever is called: modes, autograd, autocast, and whoever watches.
namespace fused_mlp {

// True if nothing that the settings name watches or changes every call.
Answer is_undisturbed();

// The part of that which is no attribute and no hook: whether nothing traces or transforms what is called.
Answer is_quiet();

// torch.set_default_device, and a `with torch.device(...)`, add a mode that sees every call of a function of torch and
// every attribute of a tensor that is asked for, in Python, and changes nothing that is done here. As long as this
// lives, such modes see nothing.
class PastModes {
 public:
  PastModes() : said_(pass()) {}
  PastModes(const PastModes&) = delete;
  PastModes& operator=(const PastModes&) = delete;
  ~PastModes();
  // kNo where there are other modes.
  Answer said() const { return said_; }

 private:
  Answer pass();

  PyObject* context_ = nullptr;
  const Answer said_;
};

// True if autograd records what needs gradients.
Answer is_recording();

// True if no_grad() has turned autograd off, and inference mode has not.
Answer is_unrecorded();

// True if autocast is on for some device.
Answer is_autocasting();

// The dtype to which autocast casts operands on the ops' device; nullptr, which is no error in itself, where it is off.
PyObject* autocast_dtype();

}  // namespace fused_mlp
