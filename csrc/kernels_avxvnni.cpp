// For CPUs with VNNI on 256 bits (Alder Lake and later client processors).
#define PL_FP32_ACTIVATIONS
#define PL_DOTS
#include "draw.h"
#include "recurrent.h"
#include "linear_avx.h"

namespace paceline {

const Kernels* avxvnni_kernels() {
  static const Kernels kernels = {"avx-vnni", true, 64, linear, quantise, rms_norm, rotate_and_write, attend, delta, embed, draw, likelihood, probabilities, logprobs};
  return &kernels;
}

}  // namespace paceline
