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
  size_t share;  // bytes per step of the next panel, in each of several passes

  template <bool kOnlyPass>
  size_t step_bytes() const {
    return kOnlyPass ? kStepBytes : share;
  }
  // Both lines of a step ahead in the panel, or a share of the next panel.
  template <bool kNear, bool kOnlyPass>
  void step(size_t step) const {
    constexpr int kInto = kOnlyPass && kNear ? 3 : 2;  // L1, L2
    const uint8_t* p = at + step * step_bytes<kOnlyPass>();
    __builtin_prefetch(p, 0, kInto);
    if (kOnlyPass) __builtin_prefetch(p + kLine, 0, kInto);
  }
  // head: bytes before the steps, which a share contains already.
  template <bool kOnlyPass>
  void advance(size_t steps, size_t head = 0) {
    at += steps * step_bytes<kOnlyPass>() + (kOnlyPass ? head : 0);
  }
};

// Prefetches the lines of one group of weights, which is read in kParts parts of a panel's width. Together they prefetch as
// much as the steps of a whole panel.
template <int kParts, bool kNear, bool kOnlyPass>
class GroupPrefetch {
 public:
  GroupPrefetch(const Prefetch& prefetch, int part, size_t steps)
      : bytes_(prefetch.step_bytes<kOnlyPass>() / kParts), at_(prefetch.at + static_cast<size_t>(part) * steps * bytes_) {}
  void step() {
    constexpr int kInto = kOnlyPass && kNear ? 3 : 2;  // L1, L2
    __builtin_prefetch(at_, 0, kInto);
    if (kOnlyPass && kParts == 1) __builtin_prefetch(at_ + kLine, 0, kInto);
    at_ += bytes_;
  }

 private:
  size_t bytes_;  // per step
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

// Bytes of the next panel that each step of each pass prefetches, rounded up to a multiple of 4: a group is read in at most
// 4 parts, which share them equally.
inline size_t prefetch_share(const Linear& linear, int passes) {
  const int inputs_of_step = linear.format == kInt8 ? 4 : linear.format == kBf16 ? 2 : 8;
  const size_t steps = static_cast<size_t>(passes) * static_cast<size_t>(linear.inputs / inputs_of_step);
  return (panel_bytes(linear) + 4 * steps - 1) / (4 * steps) * 4;
}

// A panel's weights come from memory in the first pass and from the cache in the others. Each of several passes prefetches
// its share of the next panel, so that neither memory nor arithmetic waits for the other. Where the first two passes fetched it
// all, products on a Cascade Lake took up to 1.2 times as long (docs/log.md).
template <template <int, bool> class B>
inline void multiply(const LinearCall& call, int first_panel, int last_panel) {
  const RowBlocks cut(call.rows, B<1, true>::kMost);
  const size_t bytes = panel_bytes(*call.linear), share = prefetch_share(*call.linear, cut.blocks);
  for (int panel = first_panel; panel < last_panel; ++panel) {
    const uint8_t* w = call.linear->weights + bytes * static_cast<size_t>(panel);
    for (int b = 0; b < cut.blocks; ++b) {
      const int start = cut.start(b), rows = cut.start(b + 1) - start;
      if (cut.blocks == 1) block_for<B, true>(rows)(call, w, panel, start, {w + (rows <= B<1, true>::kNear ? kAhead : kFarAhead), share});
      else block_for<B, false>(rows)(call, w, panel, start, {w + bytes + bytes * static_cast<size_t>(b) / static_cast<size_t>(cut.blocks), share});
    }
  }
}

}  // namespace
}  // namespace paceline
