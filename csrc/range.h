// Ranges of items, and how threads divide them.
#pragma once

#include <cstdint>

namespace paceline {

struct Range {
  int first, last;  // last is exclusive
  bool empty() const { return first == last; }
};

// The part of `count` items that `thread` handles.
struct Share : Range {
  Share(int count, int thread, int threads)
      : Range{static_cast<int>(static_cast<int64_t>(count) * thread / threads),
              static_cast<int>(static_cast<int64_t>(count) * (thread + 1) / threads)} {}
};

}  // namespace paceline
