// For CPUs with VNNI but without bf16 instructions (Cascade Lake, Ice Lake).
#define PL_FP32_ACTIVATIONS
#include "linear_avx512.h"
#include "table.h"

namespace paceline {

const Kernels* avx512_kernels() {
  static const Kernels kernels = table_of("avx512-vnni", linear);
  return &kernels;
}

}  // namespace paceline
