// A GPU, as it describes itself. The choice of a kernel depends only on this and on the problem.
#pragma once

#include <cstdint>

namespace fused_mlp {

struct Gpu {
  int major, minor, multiprocessors;
  int shared_of_cta, shared_of_multiprocessor;  // maximum bytes of shared memory
  double cycles_per_microsecond;
  double bytes_per_microsecond;  // the memory's nominal rate
  int64_t l2_bytes;
  bool geforce;  // its tensor cores add float32 at half the rate of other chips of their generation

  bool operator==(const Gpu&) const = default;
};

}  // namespace fused_mlp
