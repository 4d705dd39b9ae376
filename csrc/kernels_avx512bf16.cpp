#include "draw.h"
#include "recurrent.h"
#include "linear_avx512.h"

namespace paceline {

const Kernels* avx512bf16_kernels() {
  static const Kernels kernels = {"avx512-vnni-bf16", false, 64, linear, quantise, rms_norm, rotate_and_write, attend, delta, embed, draw, likelihood, probabilities, logprobs};
  return &kernels;
}

}  // namespace paceline
