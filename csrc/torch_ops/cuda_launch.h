// How an op calls its CUDA launcher: on the tensors' device and torch's current stream.
#pragma once

#if defined(BAPO_WITH_CUDA)

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>

#include "cuda/launch.h"

// Weak: a torch without CUDA does not have it, and the extension must load there too.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream)
    __attribute__((weak));

namespace bapo {

// Whether the torch in this process has CUDA streams.
inline bool torch_has_cuda_streams() { return aoti_torch_get_current_cuda_stream != nullptr; }

// Makes the tensor's device the current one for as long as it lives.
class LaunchScope {
 public:
  explicit LaunchScope(const torch::stable::Tensor& tensor)
      : device_index_(tensor.get_device_index()), guard_(device_index_) {}

  void* stream() const {
    STD_TORCH_CHECK(torch_has_cuda_streams(),
                    "tensors are on a CUDA device, but this torch was built without CUDA");
    void* stream = nullptr;
    const AOTITorchError error = aoti_torch_get_current_cuda_stream(device_index_, &stream);
    STD_TORCH_CHECK(error == AOTI_TORCH_SUCCESS, "torch gave no CUDA stream for device ",
                    device_index_);
    return stream;
  }

 private:
  int32_t device_index_;
  torch::stable::accelerator::DeviceGuard guard_;
};

// Calls the launcher and returns true if the tensor is on a GPU.
template <typename Params>
bool launched(const char* op, int (*launcher)(const Params*, void*),
              const torch::stable::Tensor& tensor, const Params& params) {
  if (!tensor.is_cuda()) return false;
  const LaunchScope scope(tensor);
  const int error = launcher(&params, scope.stream());
  STD_TORCH_CHECK(error == 0, op, " could not be launched: ", bapo_cuda_error_string(error));
  return true;
}

}  // namespace bapo

#endif  // BAPO_WITH_CUDA
