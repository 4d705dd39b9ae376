// For CPUs with VNNI but without bf16 instructions (Cascade Lake, Ice Lake).
#define PL_FP32_ACTIVATIONS
#include "draw.h"
#include "recurrent.h"
#include "linear_avx512.h"

namespace paceline {

const Kernels* avx512_kernels() {
  static const Kernels kernels = {"avx512-vnni", true, 64, linear, quantise, rms_norm, rotate_and_write, attend, delta, embed, draw, likelihood, probabilities, logprobs};
  return &kernels;
}

}  // namespace paceline
