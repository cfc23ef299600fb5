// Instruction sets that CPU kernels are compiled for, chosen at run time.
#pragma once

#include <string>
#include <vector>

namespace bapo {

// kAvx2 includes FMA and F16C; kAvx512 is F, BW, DQ and VL.
enum class Isa { kPortable, kAvx2, kAvx512 };

// The instruction sets that this machine can run, the best one last.
std::vector<Isa> available_isas();

Isa best_isa();

std::string isa_name(Isa isa);

// "auto" is the best one. Throws std::invalid_argument for a name that this machine cannot run.
Isa parse_isa(const std::string& name);

// The instruction set of the CPU ops: the best one until set_active_isa chooses another.
Isa active_isa();
void set_active_isa(Isa isa);

}  // namespace bapo
