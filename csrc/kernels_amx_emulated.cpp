// The kernels for AMX with tiles in memory: slow, for tests on CPUs without AMX.
#define PL_EMULATE_TILES
#include "linear_amx.h"
#include "table.h"

namespace paceline {

const Kernels* emulated_amx_kernels() {
  static const Kernels kernels = table_of("amx-emulated", linear_on_tiles);
  return &kernels;
}

}  // namespace paceline
