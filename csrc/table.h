// The table of an instruction set's functions. Included last, after the set's matrix products.
#pragma once

#include "draw.h"
#include "recurrent.h"

namespace paceline {
namespace {

using Multiply = decltype(Kernels::linear);
using Quantise = decltype(Kernels::quantise);

// What a set brings of its own; the rest is the same source for all.
inline Kernels table_of(const char* name, Multiply multiply, Quantise quantise_rows = quantise) {
  return {name,  multiply, quantise_rows, apply_norm, rotate_and_write, attend,  recurrent, keep_inputs, gate_output, embed,
          route, accumulate, draw,        likelihood, probabilities,    logprobs};
}

}  // namespace
}  // namespace paceline
