// For CPUs with AVX-512 but without VNNI (Skylake-X, Cannon Lake).
#define PL_FP32_ACTIVATIONS
#define PL_WIDE_VECTORS
#include "draw.h"
#include "recurrent.h"
#include "linear_avx.h"

namespace paceline {

const Kernels* avx512bw_kernels() {
  static const Kernels kernels = {"avx512-bw", true, 64, linear, quantise_and_widen, rms_norm, rotate_and_write, attend, delta, embed, draw, likelihood, probabilities, logprobs};
  return &kernels;
}

}  // namespace paceline
