// What the bindings and the doctor ask of the CUDA runtime.
#include <cuda_runtime.h>

#include "cuda/launch.h"

extern "C" int bapo_cuda_runtime_version() {
  int version = 0;
  return cudaRuntimeGetVersion(&version) == cudaSuccess ? version : 0;
}

extern "C" int bapo_cuda_driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

extern "C" const char* bapo_cuda_error_string(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
