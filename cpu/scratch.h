#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace fused_mlp {

// Temporary memory of a kernel, in whole cache lines. It is not a tensor; PyTorch's libraries allocate theirs outside
// its allocator too.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : memory_(static_cast<char*>(operator new(static_cast<size_t>(bytes), kLine))) {}

  // From a given byte, as elements of T.
  template <typename T>
  T* at(int64_t byte) const {
    return reinterpret_cast<T*>(memory_.get() + byte);
  }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Delete {
    void operator()(char* memory) const { operator delete(memory, kLine); }
  };
  std::unique_ptr<char, Delete> memory_;
};

}  // namespace fused_mlp
