// For CPUs with VNNI on 256 bits (Alder Lake and later client processors).
#define PL_FP32_ACTIVATIONS
#define PL_DOTS
#include "linear_avx.h"
#include "table.h"

namespace paceline {

const Kernels* avxvnni_kernels() {
  static const Kernels kernels = table_of("avx-vnni", linear);
  return &kernels;
}

}  // namespace paceline
