// The kernels for AVX-VNNI with the same instruction of AVX-512: for tests on CPUs that have only that one.
#define PL_FP32_ACTIVATIONS
#define PL_DOTS
#define PL_EMULATE_DOTS
#define PL_HALF_VECTORS
#include "linear_avx.h"
#include "table.h"

namespace paceline {

const Kernels* emulated_avxvnni_kernels() {
  static const Kernels kernels = table_of("avx-vnni-emulated", linear);
  return &kernels;
}

}  // namespace paceline
