// Copies columns of a packed linear layer into another one: output heads over some of a vocabulary's tokens.
#include <cstring>

#include "exports.h"
#include "kernels.h"
#include "pool.h"

namespace paceline {
namespace {

constexpr size_t kWord = 4;  // bytes of a column that lie together in a panel: see Linear in kernels.h

// The first word of a column; the next ones follow at distances of a panel's width.
size_t first_word(const Linear& linear, int64_t column) {
  return static_cast<size_t>(column / kPanel) * panel_bytes(linear) + static_cast<size_t>(column % kPanel) * kWord;
}

void copy_column(const Linear& from, int64_t source, const Linear& to, int64_t place) {
  const size_t words = panel_bytes(from) / (kPanel * kWord);
  const uint8_t* read = from.weights + first_word(from, source);
  uint8_t* write = const_cast<uint8_t*>(to.weights) + first_word(to, place);
  for (size_t word = 0; word < words; ++word, read += kPanel * kWord, write += kPanel * kWord) std::memcpy(write, read, kWord);
  if (from.scales) const_cast<float*>(to.scales)[place] = from.scales[source];
  if (from.bias) const_cast<float*>(to.bias)[place] = from.bias[source];
}

}  // namespace
}  // namespace paceline

using namespace paceline;

// Copies columns [count] of `from` to `places` [count] of `to`, a layer of the same inputs, format and kind of bias.
// Returns an error message, or null.
PL_EXPORT Problem pl_copy_columns(Pool* pool, const Linear* from, const int64_t* columns, const Linear* to, const int64_t* places,
                                  int64_t count) {
  if (from->format == kInt4) return "int4 columns are not stored word by word";
  if (from->inputs != to->inputs || from->format != to->format || !from->scales != !to->scales || !from->bias != !to->bias) {
    return "the layers differ in inputs, format or bias";
  }
  for (int64_t i = 0; i < count; ++i) {
    if (columns[i] < 0 || columns[i] >= from->outputs || places[i] < 0 || places[i] >= to->outputs) return "a column is outside its layer";
  }
  in_parallel(*pool, [&](int thread) {
    const int64_t first = count * thread / pool->threads(), last = count * (thread + 1) / pool->threads();
    for (int64_t i = first; i < last; ++i) copy_column(*from, columns[i], *to, places[i]);
  });
  return nullptr;
}
