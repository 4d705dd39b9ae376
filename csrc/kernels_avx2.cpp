// For CPUs with AVX2 and no more (Haswell to Comet Lake, Zen 1 to 3).
#define PL_FP32_ACTIVATIONS
#include "draw.h"
#include "linear_avx.h"
#include "recurrent.h"

namespace paceline {

const Kernels* avx2_kernels() {
  static const Kernels kernels = {"avx2", true, 64, linear, quantise_and_widen, rms_norm, rotate_and_write, attend, delta, embed, draw, likelihood, probabilities, logprobs};
  return &kernels;
}

}  // namespace paceline
