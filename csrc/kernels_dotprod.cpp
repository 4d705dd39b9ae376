// For 64-bit Arm with sdot (Cortex-A75 and A76, Neoverse N1, Apple M1 and later).
#define PL_FP32_ACTIVATIONS
#include "draw.h"
#include "recurrent.h"
#include "linear_neon.h"

namespace paceline {

const Kernels* dotprod_kernels() {
  static const Kernels kernels = {"neon-dotprod", true, 64, linear, quantise, rms_norm, rotate_and_write, attend, delta, embed, draw, likelihood, probabilities, logprobs};
  return &kernels;
}

}  // namespace paceline
