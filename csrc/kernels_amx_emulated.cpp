// The kernels for AMX with tiles in memory: slow, for tests on CPUs without AMX.
#define PL_EMULATE_TILES
#include "draw.h"
#include "recurrent.h"
#include "linear_amx.h"

namespace paceline {

const Kernels* emulated_amx_kernels() {
  static const Kernels kernels = {"amx-emulated", false, 64, linear_on_tiles, quantise, rms_norm, rotate_and_write, attend, delta, embed, draw, likelihood, probabilities, logprobs};
  return &kernels;
}

}  // namespace paceline
