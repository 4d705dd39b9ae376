// For CPUs with tiles of bytes and bf16 (Sapphire Rapids and later).
#include "linear_amx.h"
#include "table.h"

namespace paceline {

const Kernels* amx_kernels() {
  static const Kernels kernels = table_of("amx", linear_on_tiles);
  return &kernels;
}

}  // namespace paceline
