// Matrix products on AMX: tiles of up to 16 rows by half a panel, 16 columns. Rows are cut into tiles of one height.
// Integer sums are exact, and the rest is done in the order of AVX-512: the bits are the same: a few rows of bytes,
// which gain nothing from tiles, run there. Sums of bf16 are not exact: all rows go through tiles.
#pragma once

#include <type_traits>

#define PL_FAR_BYTES  // on processors with tiles the few misses that L1 allows limit even one row of bytes
#include "linear_avx512.h"
#include "tile.h"

namespace paceline {
namespace {

constexpr int kHalf = kPanel / 2;           // columns
constexpr int kFewByteRows = 4;             // up to these AVX-512 is faster
constexpr int kFewNibbleRows = 8;           // the same, where nibbles have to be unpacked: 5 rows take 1.7 times as long on tiles
constexpr int kBlockTiles = 4;              // tiles of rows that share a run of weights in the L1 cache
constexpr int kRun = 8 * kActivationGroup;  // inputs: 16 KB of weights as bytes; 4 or 16 groups, or 2 tiles, take as long

// Only the last tile may have fewer rows; padding follows them.
struct RowTiles {
  int rows, tiles, height;
  explicit RowTiles(int rows_) : rows(rows_), tiles((rows_ + kTileRows - 1) / kTileRows), height((rows_ + tiles - 1) / tiles) {}
  int start(int tile) const { return tile * height; }
  int rows_of(int tile) const { return rows - start(tile) < height ? rows - start(tile) : height; }
};

// Prefetches weights into the L2 cache, which allows more misses at once than L1. The only block of rows reads as far ahead
// as kFarAhead; of several blocks each fetches its share of the next panel.
class PanelPrefetch {
 public:
  PanelPrefetch(const uint8_t* w, size_t bytes, int block, int blocks, int steps) : per_step_(bytes / static_cast<size_t>(blocks * steps) + 1) {
    at_ = blocks == 1 ? w + kFarAhead : w + bytes + bytes / static_cast<size_t>(blocks) * static_cast<size_t>(block);
    done_ = at_;
  }
  void step() {
    for (at_ += per_step_; done_ < at_; done_ += kLine) __builtin_prefetch(done_, 0, 2);
  }

 private:
  size_t per_step_;  // bytes
  const uint8_t *at_, *done_;
};

// Tiles 0 and 1 are sums, 4 and 5 weights, 6 and 7 rows. A macro, because a tile's number is part of the instruction.
#define PL_MULTIPLY_GROUP(sums_, weights_, rows_)   \
  do {                                              \
    PL_TILE_ZERO(sums_);                            \
    PL_TILE_LOAD(weights_, w, line_stride);         \
    PL_TILE_LOAD(rows_, x, stride);                 \
    PL_TILE_MULTIPLY_BYTES(sums_, rows_, weights_); \
    PL_TILE_STORE(sums_, sums, sizeof sums[0]);     \
  } while (false)

// The exact sums of one group of inputs.
template <bool kOdd>
inline void multiply_group(const uint8_t* x, size_t stride, const uint8_t* w, size_t line_stride, int32_t (&sums)[kTileRows][kHalf]) {
  if constexpr (kOdd) PL_MULTIPLY_GROUP(1, 5, 7);
  else PL_MULTIPLY_GROUP(0, 4, 6);
}
#undef PL_MULTIPLY_GROUP

// int8 weights are multiplied where they are.
class Int8Run {
 public:
  static constexpr size_t kLineStride = kStepBytes;
  static int group(const Linear&) { return kActivationGroup; }
  Int8Run(const Linear&, const uint8_t* w, Range) : w_(w) {}
  const uint8_t* lines(int g, int half) const { return w_ + static_cast<size_t>(g) * kTileRows * kStepBytes + half * kTileBytes; }
  template <int R>
  void add(const LinearCall& call, int row, int g, int, const int32_t (&sums)[kTileRows][kHalf], F16 (&totals)[R]) const {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const I16 exact = load(sums[r]) + iset1(sum_of(call.input, row + r, g));
      totals[r] = fma(to_float(exact), scale_of(call.input, row + r, g * kActivationGroup), totals[r]);
    }
  }

 private:
  const uint8_t* w_;
};

// 4-bit weights are unpacked to bytes, once for the rows of a block.
class Int4Run {
 public:
  static constexpr size_t kLineStride = kTileBytes;
  static int group(const Linear& linear) { return linear.group; }
  Int4Run(const Linear& linear, const uint8_t* w, Range groups) : w_(w), group_(linear.group), first_(groups.first) {
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int g = groups.first; g < groups.last; ++g) {
      const uint8_t* packed = head(g) + 4 * kPanel;
      for (int half = 0; half < 2; ++half) {
        uint8_t* to = bytes_[half] + (g - first_) * group_ * kHalf;
        for (int k = 0; k < group_ / 8; ++k, to += 2 * kTileBytes) {
          const __m512i both = weight_line(packed + k * static_cast<int>(kStepBytes) + half * kTileBytes);
          _mm512_store_si512(to, _mm512_and_si512(both, nibble));
          _mm512_store_si512(to + kTileBytes, _mm512_and_si512(_mm512_srli_epi32(both, 4), nibble));
        }
      }
    }
  }
  const uint8_t* lines(int g, int half) const { return bytes_[half] + (g - first_) * group_ * kHalf; }
  template <int R>
  void add(const LinearCall& call, int row, int g, int half, const int32_t (&sums)[kTileRows][kHalf], F16 (&totals)[R]) const {
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(head(g)) + half * kHalf;
    const F16 scale = load_fp16(scales), low = load_fp16(scales + kPanel);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const F16 sum = to_float(iset1(sum_of(call.input, row + r, g)));
      totals[r] = fma(fma(to_float(load(sums[r])), scale, sum * low), scale_of(call.input, row + r, g * group_), totals[r]);
    }
  }

 private:
  const uint8_t* head(int g) const { return w_ + static_cast<size_t>(g) * static_cast<size_t>(4 * kPanel + group_ * kHalf); }
  const uint8_t* w_;
  int group_, first_;
  alignas(64) uint8_t bytes_[2][kRun * kHalf];
};

// Adds groups to the totals of R rows by half a panel, which stay in registers. Two tiles of sums take turns: one is
// multiplied while the other is added.
template <class Run, int R>
inline void add_groups(const Run& run, const LinearCall& call, int row, int half, Range groups, float (*totals)[kPanel], PanelPrefetch& prefetch) {
  alignas(64) int32_t even[kTileRows][kHalf], odd[kTileRows][kHalf];
  const int group = Run::group(*call.linear);
  const size_t stride = call.input.stride;
  const uint8_t* x = call.input.data + stride * static_cast<size_t>(row);
  F16 kept[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) kept[r] = load(totals[r] + half * kHalf);
  const auto multiply_even = [&](int g) { if (g < groups.last) multiply_group<false>(x + g * group, stride, run.lines(g, half), Run::kLineStride, even); };
  const auto multiply_odd = [&](int g) { if (g < groups.last) multiply_group<true>(x + g * group, stride, run.lines(g, half), Run::kLineStride, odd); };
  multiply_even(groups.first);
  for (int g = groups.first; g < groups.last; g += 2) {
    multiply_odd(g + 1);
    run.add(call, row, g, half, even, kept);
    prefetch.step();
    if (g + 1 == groups.last) break;
    multiply_even(g + 2);
    run.add(call, row, g + 1, half, odd, kept);
    prefetch.step();
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) store(totals[r] + half * kHalf, kept[r]);
}

template <class Run>
using Adder = void (*)(const Run&, const LinearCall&, int, int, Range, float (*)[kPanel], PanelPrefetch&);

template <class Run, int... kRowsLessOne>
inline Adder<Run> adder_for(int rows, std::integer_sequence<int, kRowsLessOne...>) {
  static constexpr Adder<Run> table[] = {add_groups<Run, kRowsLessOne + 1>...};
  return table[rows - 1];
}

// A block of row tiles by one panel, run after run of its inputs.
template <class Run>
inline void multiply_block(const LinearCall& call, const RowTiles& cut, Range tiles, int panel, const uint8_t* w, PanelPrefetch prefetch) {
  const int group = Run::group(*call.linear), groups = call.linear->inputs / group, in_run = kRun / group;
  const int first = cut.start(tiles.first), rows = cut.start(tiles.last - 1) + cut.rows_of(tiles.last - 1) - first;
  alignas(64) float totals[kBlockTiles * kTileRows][kPanel];
  for (int r = 0; r < rows; ++r) for (int v = 0; v < 2; ++v) store(totals[r] + v * kHalf, zero());
  for (int g = 0; g < groups; g += in_run) {
    const Range of_run = {g, g + in_run < groups ? g + in_run : groups};
    const Run run(*call.linear, w, of_run);
    for (int tile = tiles.first; tile < tiles.last; ++tile) {
      const auto add = adder_for<Run>(cut.rows_of(tile), std::make_integer_sequence<int, kTileRows>());
      for (int half = 0; half < 2; ++half) add(run, call, cut.start(tile), half, of_run, totals + cut.start(tile) - first, prefetch);
    }
  }
  for (int r = 0; r < rows; ++r) {
    F16 y[2] = {load(totals[r]), load(totals[r] + kHalf)};
    if constexpr (std::is_same_v<Run, Int8Run>) for (int v = 0; v < 2; ++v) y[v] = y[v] * load(call.linear->scales + panel * kPanel + v * kHalf);
    finish(call, panel, first + r, y[0], y[1]);
  }
}

// Tiles 0 to 3: the sums [row tile][half]; 4, 5: weights; 6, 7: rows.
template <bool kTwo>
inline void multiply_bf16_tiles(const LinearCall& call, const RowTiles& cut, int tile, int panel, const uint8_t* w, PanelPrefetch& prefetch) {
  const size_t stride = call.input.stride;
  const uint8_t* x = call.input.data + stride * static_cast<size_t>(cut.start(tile));
  const uint8_t* second = x + stride * static_cast<size_t>(cut.height);
  PL_TILE_ZERO(0);
  PL_TILE_ZERO(1);
  if (kTwo) {
    PL_TILE_ZERO(2);
    PL_TILE_ZERO(3);
  }
  for (int i = 0; i < call.linear->inputs; i += kTileBytes / 2, w += kTileRows * kStepBytes) {
    PL_TILE_LOAD(4, w, kStepBytes);
    PL_TILE_LOAD(6, x + 2 * i, stride);
    PL_TILE_MULTIPLY_BF16(0, 6, 4);
    PL_TILE_LOAD(5, w + kTileBytes, kStepBytes);
    PL_TILE_MULTIPLY_BF16(1, 6, 5);
    if (kTwo) {
      PL_TILE_LOAD(7, second + 2 * i, stride);
      PL_TILE_MULTIPLY_BF16(2, 7, 4);
      PL_TILE_MULTIPLY_BF16(3, 7, 5);
    }
    prefetch.step();
  }
  alignas(64) float sums[2 * kTileRows][kPanel];
  PL_TILE_STORE(0, sums[0], sizeof sums[0]);
  PL_TILE_STORE(1, sums[0] + kHalf, sizeof sums[0]);
  if (kTwo) {
    PL_TILE_STORE(2, sums[cut.height], sizeof sums[0]);
    PL_TILE_STORE(3, sums[cut.height] + kHalf, sizeof sums[0]);
  }
  const int rows = kTwo ? cut.height + cut.rows_of(tile + 1) : cut.rows_of(tile);
  for (int r = 0; r < rows; ++r) finish(call, panel, cut.start(tile) + r, load(sums[r]), load(sums[r] + kHalf));
}

inline void multiply_on_tiles(const LinearCall& call, int first_panel, int last_panel) {
  const Linear& linear = *call.linear;
  const bool bf16 = linear.format == kBf16;
  const RowTiles cut(call.rows);
  const int group = linear.format == kInt4 ? linear.group : kActivationGroup, in_block = bf16 ? 2 : kBlockTiles;
  const int blocks = (cut.tiles + in_block - 1) / in_block;
  const TileConfig config(cut.height, bf16 ? kTileBytes : group);
  PL_TILE_CONFIGURE(&config);
  const size_t bytes = panel_bytes(linear);
  for (int panel = first_panel; panel < last_panel; ++panel) {
    const uint8_t* w = linear.weights + bytes * static_cast<size_t>(panel);
    for (int b = 0; b < blocks; ++b) {
      const Range tiles = {b * in_block, (b + 1) * in_block < cut.tiles ? (b + 1) * in_block : cut.tiles};
      const int count = tiles.last - tiles.first;
      const int steps = bf16 ? linear.inputs / (kTileBytes / 2) : 2 * count * (linear.inputs / group);
      PanelPrefetch prefetch(w, bytes, b, blocks, steps);
      if (!bf16) (linear.format == kInt8 ? multiply_block<Int8Run> : multiply_block<Int4Run>)(call, cut, tiles, panel, w, prefetch);
      else (count == 2 ? multiply_bf16_tiles<true> : multiply_bf16_tiles<false>)(call, cut, tiles.first, panel, w, prefetch);
    }
  }
  PL_TILE_RELEASE();
}

inline bool on_tiles(const Linear& linear, int rows) {
  if (linear.format == kBf16) return true;
  if (linear.format == kInt8) return rows > kFewByteRows;
  const bool fits = linear.group == kTileBytes || linear.group == kTileBytes / 2;  // a whole or half a tile: all files' groups
  return fits && rows > kFewNibbleRows;
}

inline void linear_on_tiles(const LinearCall& call, int first_panel, int last_panel) {
  if (call.rows == 0) return;
  if (on_tiles(*call.linear, call.rows)) multiply_on_tiles(call, first_panel, last_panel);
  else linear(call, first_panel, last_panel);
}

}  // namespace
}  // namespace paceline
