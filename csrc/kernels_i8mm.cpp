// For 64-bit Arm with usmmla and bfmmla (Neoverse V1 and N2, Cortex-X2, Apple M2 and later).
#define PL_MATRICES
#include "draw.h"
#include "recurrent.h"
#include "linear_neon.h"

namespace paceline {

const Kernels* i8mm_kernels() {
  static const Kernels kernels = {"neon-i8mm-bf16", false, 64, linear, quantise, rms_norm, rotate_and_write, attend, delta, embed, draw, likelihood, probabilities, logprobs};
  return &kernels;
}

}  // namespace paceline
