// Ranges of items, and how threads divide them.
#pragma once

#include <cstdint>

namespace paceline {

struct Range {
  int first, last;  // last is exclusive
};

// The part of `count` items that `thread` handles.
struct Share : Range {
  Share(int count, int thread, int threads)
      : Range{static_cast<int>(static_cast<int64_t>(count) * thread / threads),
              static_cast<int>(static_cast<int64_t>(count) * (thread + 1) / threads)} {}
};

// Cuts items into chunks: in each round every thread gets half of an equal share of what is left. A thread that is slow, or
// whose core is busy, takes fewer chunks, and all threads end within the time of one item.
class Chunks {
 public:
  Chunks(Range items, int threads) : items_(items), threads_(threads) {}
  // The chunk of this number; empty, at the end of the items, beyond the last one.
  Range at(int number) const {
    int first = items_.first, size = size_from(first);
    for (; number >= threads_ && first < items_.last; number -= threads_) {
      first += threads_ * size;
      size = size_from(first);
    }
    first = first + number * size < items_.last ? first + number * size : items_.last;
    return {first, first + size < items_.last ? first + size : items_.last};
  }
  bool one_each() const { return items_.last - items_.first <= threads_; }  // whether no thread has a second chunk

 private:
  int size_from(int first) const { return (items_.last - first + 2 * threads_ - 1) / (2 * threads_); }

  Range items_;
  int threads_;
};

}  // namespace paceline
