#include "cpu/isa.h"

#include <atomic>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace bapo {
namespace {

#if defined(__x86_64__)
// __builtin_cpu_supports knows "f16c" only from GCC 11 on.
bool supports_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

std::atomic<Isa>& active() {
  static std::atomic<Isa> isa{best_isa()};
  return isa;
}

}  // namespace

std::vector<Isa> available_isas() {
  std::vector<Isa> isas{Isa::kPortable};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && supports_f16c()) {
    isas.push_back(Isa::kAvx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      isas.push_back(Isa::kAvx512);
    }
  }
#endif
  return isas;
}

Isa best_isa() {
  static const Isa best = available_isas().back();
  return best;
}

std::string isa_name(Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return "portable";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  throw std::logic_error("unknown instruction set");
}

Isa parse_isa(const std::string& name) {
  if (name == "auto") return best_isa();
  std::string choices;
  for (const Isa isa : available_isas()) {
    if (isa_name(isa) == name) return isa;
    choices += ", " + isa_name(isa);
  }
  throw std::invalid_argument("isa must be one of auto" + choices + " on this machine, got '" +
                              name + "'");
}

Isa active_isa() { return active().load(std::memory_order_relaxed); }

void set_active_isa(Isa isa) { active().store(isa, std::memory_order_relaxed); }

}  // namespace bapo
