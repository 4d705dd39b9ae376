#define PL_FP32_ACTIVATIONS
#include "draw.h"
#include "recurrent.h"
#include "linear_avx2.h"

namespace paceline {

const Kernels* avx2_kernels() {
  static const Kernels kernels = {"avx2", true, 64, linear, quantise, rms_norm, rotate_and_write, attend, delta, embed, draw, likelihood, probabilities, logprobs};
  return &kernels;
}

}  // namespace paceline
