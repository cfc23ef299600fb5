// Instruction sets that CPU kernels are compiled for, chosen at run time.
#pragma once

#include <string>
#include <vector>

namespace bapo {

enum class Isa { kPortable, kAvx2, kAvx512 };

// Those that this machine can run, the best one last.
std::vector<Isa> available_isas();

Isa best_isa();

std::string isa_name(Isa isa);

// "auto" is the best one. Throws std::invalid_argument for a name that this machine cannot run.
Isa parse_isa(const std::string& name);

}  // namespace bapo
