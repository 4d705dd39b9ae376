// For CPUs with AVX-512 but without VNNI (Skylake-X, Cannon Lake).
#define PL_FP32_ACTIVATIONS
#define PL_WIDE_VECTORS
#include "linear_avx.h"
#include "table.h"

namespace paceline {

const Kernels* avx512bw_kernels() {
  static const Kernels kernels = table_of("avx512-bw", linear, quantise_and_widen);
  return &kernels;
}

}  // namespace paceline
