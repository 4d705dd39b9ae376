// What the matrix products of all instruction sets share: how rows are cut into blocks, and what is prefetched. A set's
// own header (linear_avx512.h, linear_avx.h, linear_neon.h) brings Int8Block, Bf16Block and Int4Block.
#pragma once

#include <utility>

#include "body.h"

namespace paceline {
namespace {

constexpr size_t kAhead = 4096;      // bytes that the only pass over a panel prefetches ahead for few rows
constexpr size_t kFarAhead = 16384;  // and for more rows
constexpr size_t kLine = 64;         // bytes of a cache line
constexpr size_t kStepBytes = 128;   // of weights: 32 columns of 4 bytes

// A few rows prefetch into the L1 cache. More rows take so long per line that the L1 cache's few outstanding misses
// would limit them: they prefetch into L2, which allows many.
struct Prefetch {
  const uint8_t* at;
  // Both lines of a step ahead in the panel, or one line of the next panel.
  template <bool kNear, bool kOnlyPass>
  void step(size_t step) const {
    constexpr int kInto = kOnlyPass && kNear ? 3 : 2;  // L1, L2
    const uint8_t* p = at + step * (kOnlyPass ? kStepBytes : kStepBytes / 2);
    __builtin_prefetch(p, 0, kInto);
    if (kOnlyPass) __builtin_prefetch(p + kLine, 0, kInto);
  }
};

// Prefetches the lines of one group of weights, which is read in kParts parts of a panel's width. Together they prefetch as
// much as the steps of a whole panel.
template <int kParts, bool kNear, bool kOnlyPass>
class GroupPrefetch {
 public:
  GroupPrefetch(const Prefetch& prefetch, int part, size_t steps) : at_(prefetch.at + static_cast<size_t>(part) * steps * kBytes) {}
  void step() {
    constexpr int kInto = kOnlyPass && kNear ? 3 : 2;  // L1, L2
    __builtin_prefetch(at_, 0, kInto);
    if constexpr (kBytes > kLine) __builtin_prefetch(at_ + kLine, 0, kInto);
    at_ += kBytes;
  }

 private:
  static constexpr size_t kBytes = (kOnlyPass ? kStepBytes : kStepBytes / 2) / kParts;  // per step
  const uint8_t* at_;
};

using Block = void (*)(const LinearCall&, const uint8_t*, int, int, Prefetch);

// B<1>, B<2> ... B<kMost>.
template <template <int, bool> class B, bool kOnlyPass, int... kRowsLessOne>
inline Block block_among(int rows, std::integer_sequence<int, kRowsLessOne...>) {
  static constexpr Block table[] = {B<kRowsLessOne + 1, kOnlyPass>::run...};
  return table[rows - 1];
}

template <template <int, bool> class B, bool kOnlyPass>
inline Block block_for(int rows) {
  return block_among<B, kOnlyPass>(rows, std::make_integer_sequence<int, B<1, true>::kMost>());
}

// A panel's weights come from memory in the first pass and from the cache in the others. Two of several passes prefetch
// the next panel meanwhile, so that neither memory nor arithmetic waits for the other.
template <template <int, bool> class B>
inline void multiply(const LinearCall& call, int first_panel, int last_panel) {
  const RowBlocks cut(call.rows, B<1, true>::kMost);
  const size_t bytes = panel_bytes(*call.linear);
  for (int panel = first_panel; panel < last_panel; ++panel) {
    const uint8_t* w = call.linear->weights + bytes * static_cast<size_t>(panel);
    for (int b = 0; b < cut.blocks; ++b) {
      const int start = cut.start(b), rows = cut.start(b + 1) - start;
      if (cut.blocks == 1) block_for<B, true>(rows)(call, w, panel, start, Prefetch{w + (rows <= B<1, true>::kNear ? kAhead : kFarAhead)});
      else block_for<B, false>(rows)(call, w, panel, start, Prefetch{w + (b == 0 ? bytes : b == 1 ? bytes + bytes / 2 : 0)});
    }
  }
}

}  // namespace
}  // namespace paceline
