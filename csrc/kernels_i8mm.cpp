// For 64-bit Arm with usmmla and bfmmla (Neoverse V1 and N2, Cortex-X2, Apple M2 and later).
#define PL_MATRICES
#include "linear_neon.h"
#include "table.h"

namespace paceline {

const Kernels* i8mm_kernels() {
  static const Kernels kernels = table_of("neon-i8mm-bf16", linear);
  return &kernels;
}

}  // namespace paceline
