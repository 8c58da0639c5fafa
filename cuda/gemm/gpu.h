// A GPU, as it describes itself. The choice of a kernel is a function of this and of the problem alone.
#pragma once

#include <cstdint>

namespace fused_mlp {

struct Gpu {
  int major, minor, multiprocessors;
  int shared_of_cta, shared_of_multiprocessor;  // bytes of shared memory, at most
  double cycles_per_microsecond;
  double bytes_per_microsecond;  // its memory's, nominally
  int64_t l2_bytes;
  bool geforce;  // its tensor cores add in float32 at half the rate of the other chips of their kind

  bool operator==(const Gpu&) const = default;
};

}  // namespace fused_mlp
