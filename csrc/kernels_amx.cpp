// For CPUs with tiles of bytes and bf16 (Sapphire Rapids and later).
#include "draw.h"
#include "recurrent.h"
#include "linear_amx.h"

namespace paceline {

const Kernels* amx_kernels() {
  static const Kernels kernels = {"amx", false, 64, linear_on_tiles, quantise, rms_norm, rotate_and_write, attend, delta, embed, draw, likelihood, probabilities, logprobs};
  return &kernels;
}

}  // namespace paceline
