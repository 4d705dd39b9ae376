// For CPUs with AVX2 and no more (Haswell to Comet Lake, Zen 1 to 3).
#define PL_FP32_ACTIVATIONS
#include "linear_avx.h"
#include "table.h"

namespace paceline {

const Kernels* avx2_kernels() {
  static const Kernels kernels = table_of("avx2", linear, quantise_and_widen);
  return &kernels;
}

}  // namespace paceline
