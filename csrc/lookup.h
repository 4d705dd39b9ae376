// What prompt lookup is told of the rows.
#pragma once

#include <cstdint>

namespace paceline {

class Texts;

// Further sources of a row beside its own text and the documents. Among `answers` its own has the index `number`, and
// begins at the row's position `first`.
struct RowSources {
  const Texts* references;
  Texts* answers;
  int64_t number;
  int64_t first;
};

}  // namespace paceline
