// What this CPU and operating system can run.
#pragma once

#include <vector>

#include "kernels.h"

namespace paceline {

struct InstructionSet {
  const char* name;
  const char* obstacle;  // why its kernels cannot run here; empty: they can
  const Kernels* (*kernels)();
};

// All sets for this kind of CPU (sets_x86.cpp, sets_arm.cpp); tested once.
const std::vector<InstructionSet>& instruction_sets();

// The kernels of this name, or null if they cannot run here.
const Kernels* kernels_named(const char* name);

// Why the kernels of this name cannot run here; empty if they can.
const char* obstacle_to(const char* name);

// Whether the kernels' matrix products, in bytes and in bf16, equal those of plain loops.
bool multiplies_correctly(const Kernels& kernels);

}  // namespace paceline
