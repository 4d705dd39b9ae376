// Commit: append a round's tokens to the rows. Reference implementation: RowState.gain in src/paceline/core/rows.py.
#pragma once

#include <algorithm>
#include <cstdint>

namespace paceline {

// The rows' text and limits: stops [row][stop_count], -1 for none; limit: the length at which a row ends.
struct TextRows {
  int64_t* text;
  int64_t* length;
  const int64_t* prompt_length;
  const int64_t* limit;
  const int64_t* stops;
  int64_t stop_count;
  int64_t text_stride;

  bool stops_at(int64_t row, int64_t token) const {
    const int64_t* first = stops + row * stop_count;
    return token >= 0 && std::find(first, first + stop_count, token) != first + stop_count;
  }

  bool ended(int64_t row) const {
    const int64_t before = length[row];
    return before >= limit[row] || (before > prompt_length[row] && stops_at(row, text[row * text_stride + before - 1]));
  }

  // Appends up to `count` tokens to a row, cut behind the first stop token, at its limit and before a place where no
  // token could be drawn (Undrawn in src/paceline/core/draft.py); returns the number appended.
  int64_t gain(int64_t row, const int64_t* tokens, int64_t count) const {
    if (ended(row)) return 0;
    const int64_t most = std::min(count, limit[row] - length[row]);
    int64_t gained = 0;
    while (gained < most && tokens[gained] >= 0 && !stops_at(row, tokens[gained])) ++gained;
    if (gained < most && tokens[gained] >= 0) ++gained;  // the stop token is the answer's last
    std::copy(tokens, tokens + gained, text + row * text_stride + length[row]);
    length[row] += gained;
    return gained;
  }
};

}  // namespace paceline
