// What this CPU and operating system can run.
#pragma once

#include "kernels.h"

namespace paceline {

// The kernels of this name, or null if they cannot run here.
const Kernels* kernels_named(const char* name);

// Why a CPU with AMX does not use it; empty if it does, or has none.
const char* amx_obstacle();

// Whether the kernels' matrix products, in bytes and in bf16, equal those of plain loops.
bool multiplies_correctly(const Kernels& kernels);

}  // namespace paceline
