// For 64-bit Arm with sdot (Cortex-A75 and A76, Neoverse N1, Apple M1 and later).
#define PL_FP32_ACTIVATIONS
#include "linear_neon.h"
#include "table.h"

namespace paceline {

const Kernels* dotprod_kernels() {
  static const Kernels kernels = table_of("neon-dotprod", linear);
  return &kernels;
}

}  // namespace paceline
