// Launchers of the CUDA kernels: no torch types, nothing waits for the device.
//
// Each returns a cudaError_t as int; 0 is success. Pointers are device pointers, stream is a
// cudaStream_t of the current device. With no tokens (and, in logits_backward, no rows) nothing is
// launched.
#pragma once

#include <cstdint>

#include "common/params.h"

extern "C" {
int bapo_launch_logprob_partials(const bapo::LogprobPartialsParams* params, void* stream);
int bapo_launch_logprob_combine(const bapo::LogprobCombineParams* params, void* stream);
int bapo_launch_logits_backward(const bapo::LogitsBackwardParams* params, void* stream);
int bapo_launch_kl_partials(const bapo::KlPartialsParams* params, void* stream);
int bapo_launch_kl_combine(const bapo::KlCombineParams* params, void* stream);
int bapo_launch_kl_backward(const bapo::KlBackwardParams* params, void* stream);
// Adds into params->table.
int bapo_launch_contributions(const bapo::ContributionsParams* params, void* stream);
int bapo_launch_search_bounds(const bapo::SearchBoundsParams* params, void* stream);
int bapo_launch_importance_ratio(const bapo::ImportanceRatioParams* params, void* stream);
// The CUDA runtime that was linked, as 1000 * major + 10 * minor.
int bapo_cuda_runtime_version();
// The newest CUDA that the installed driver supports, in the same form; 0 without a driver.
int bapo_cuda_driver_version();
const char* bapo_cuda_error_string(int error);
}
