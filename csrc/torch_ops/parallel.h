// torch's threads for code that does not know torch.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <functional>

namespace bapo {

// A ForEachPart on torch's intra-op threads.
inline void for_each_part(int64_t num_parts, const std::function<void(int64_t)>& task) {
  torch::stable::parallel_for(0, num_parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) task(part);
  });
}

}  // namespace bapo
