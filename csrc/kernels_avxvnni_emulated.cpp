// The kernels for AVX-VNNI with the same instruction of AVX-512: for tests on CPUs that have only that one.
#define PL_FP32_ACTIVATIONS
#define PL_DOTS
#define PL_EMULATE_DOTS
#define PL_HALF_VECTORS
#include "draw.h"
#include "recurrent.h"
#include "linear_avx.h"

namespace paceline {

const Kernels* emulated_avxvnni_kernels() {
  static const Kernels kernels = {"avx-vnni-emulated", true, 64, linear, quantise, rms_norm, rotate_and_write, attend, delta, embed, draw, likelihood, probabilities, logprobs};
  return &kernels;
}

}  // namespace paceline
