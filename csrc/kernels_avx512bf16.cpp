#include "linear_avx512.h"
#include "table.h"

namespace paceline {

const Kernels* avx512bf16_kernels() {
  static const Kernels kernels = table_of("avx512-vnni-bf16", linear);
  return &kernels;
}

}  // namespace paceline
