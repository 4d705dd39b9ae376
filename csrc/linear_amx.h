// Matrix products on AMX: up to 32 rows by one panel of 32 columns, two by two tiles. A tile of weights is 16 lines of
// the packed panel: 64 bytes or 32 bf16 of 16 columns. 4-bit weights run on AVX-512, and so do a few rows of bytes:
// their sums are exact, and the rest is done in the same order, so the bits are the same. Sums of bf16 are not exact:
// all rows go through tiles.
#pragma once

#include "linear_avx512.h"
#include "tile.h"

namespace paceline {
namespace {

constexpr int kTileBlock = 2 * kTileRows;             // rows
constexpr int kFewByteRows = 4;                       // up to these AVX-512 is faster: a tile takes as long for 1 row as for 16
constexpr size_t kTileStep = kTileRows * kStepBytes;  // bytes of a panel that two tiles hold: one group of bytes

// A panel's part of prefetching, per step: as far as the only pass reads, or half of the next panel.
struct TilePrefetch {
  const uint8_t* at;
  bool only_pass;
  void step() {
    const size_t bytes = only_pass ? kTileStep : kTileStep / 2;
    for (size_t i = 0; i < bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(at + i), _MM_HINT_T0);
    at += bytes;
  }
};

// Tiles 0 to 3: the sums [row tile][column tile]; 4, 5: weights; 6, 7: rows. Rows beyond the last are padding.
template <bool kTwo>
inline void clear_sums() {
  PL_TILE_ZERO(0);
  PL_TILE_ZERO(1);
  if (kTwo) {
    PL_TILE_ZERO(2);
    PL_TILE_ZERO(3);
  }
}
template <bool kTwo>
inline void load_step(const uint8_t* w, const uint8_t* x, size_t stride) {
  PL_TILE_LOAD(4, w, kStepBytes);
  PL_TILE_LOAD(5, w + kStepBytes / 2, kStepBytes);
  PL_TILE_LOAD(6, x, stride);
  if (kTwo) PL_TILE_LOAD(7, x + kTileRows * stride, stride);
}
template <bool kTwo, class Lane>
inline void store_sums(Lane (&sums)[kTileBlock][2][16]) {
  PL_TILE_STORE(0, sums[0][0], sizeof sums[0]);
  PL_TILE_STORE(1, sums[0][1], sizeof sums[0]);
  if (kTwo) {
    PL_TILE_STORE(2, sums[kTileRows][0], sizeof sums[0]);
    PL_TILE_STORE(3, sums[kTileRows][1], sizeof sums[0]);
  }
}

// Integer sums within a group are exact; groups are added in order, as on AVX-512.
template <bool kTwo>
struct Int8Tiles {
  static void run(const LinearCall& call, const uint8_t* w, int panel, int first, int rows, TilePrefetch prefetch) {
    const size_t stride = call.input.stride;
    const uint8_t* x = call.input.data + stride * static_cast<size_t>(first);
    alignas(64) int32_t sums[kTileBlock][2][16];
    alignas(64) float totals[kTileBlock][2][16];
    for (int r = 0; r < rows; ++r) for (int v = 0; v < 2; ++v) store(totals[r][v], zero());
    for (int g = 0; g < call.linear->inputs / kActivationGroup; ++g, w += kTileStep, x += kActivationGroup) {
      clear_sums<kTwo>();
      load_step<kTwo>(w, x, stride);
      PL_TILE_MULTIPLY_BYTES(0, 6, 4);
      PL_TILE_MULTIPLY_BYTES(1, 6, 5);
      if (kTwo) {
        PL_TILE_MULTIPLY_BYTES(2, 7, 4);
        PL_TILE_MULTIPLY_BYTES(3, 7, 5);
      }
      prefetch.step();
      store_sums<kTwo>(sums);
      for (int r = 0; r < rows; ++r) add_group(call, first + r, g, sums[r], totals[r]);
    }
    const float* scales = call.linear->scales + panel * kPanel;
    for (int r = 0; r < rows; ++r) {
      finish(call, panel, first + r, load(totals[r][0]) * load(scales), load(totals[r][1]) * load(scales + 16));
    }
  }
  static void add_group(const LinearCall& call, int row, int g, const int32_t (&sums)[2][16], float (&totals)[2][16]) {
    const I16 offset = iset1(sum_of(call.input, row, g));
    const F16 scale = scale_of(call.input, row, g * kActivationGroup);
    for (int v = 0; v < 2; ++v) {
      const I16 exact = I16{_mm512_load_si512(sums[v])} + offset;
      store(totals[v], fma(to_float(exact), scale, load(totals[v])));
    }
  }
};

template <bool kTwo>
struct Bf16Tiles {
  static void run(const LinearCall& call, const uint8_t* w, int panel, int first, int rows, TilePrefetch prefetch) {
    const size_t stride = call.input.stride;
    const uint8_t* x = call.input.data + stride * static_cast<size_t>(first);
    clear_sums<kTwo>();
    for (int i = 0; i < call.linear->inputs; i += kTileBytes / 2, w += kTileStep, x += kTileBytes) {
      load_step<kTwo>(w, x, stride);
      PL_TILE_MULTIPLY_BF16(0, 6, 4);
      PL_TILE_MULTIPLY_BF16(1, 6, 5);
      if (kTwo) {
        PL_TILE_MULTIPLY_BF16(2, 7, 4);
        PL_TILE_MULTIPLY_BF16(3, 7, 5);
      }
      prefetch.step();
    }
    alignas(64) float sums[kTileBlock][2][16];
    store_sums<kTwo>(sums);
    for (int r = 0; r < rows; ++r) finish(call, panel, first + r, load(sums[r][0]), load(sums[r][1]));
  }
};

// As on AVX-512, a panel comes from memory in the first pass and from the cache in the others, two of which prefetch
// the next.
template <template <bool> class B>
inline void multiply_tiles(const LinearCall& call, int first_panel, int last_panel) {
  const int blocks = (call.rows + kTileBlock - 1) / kTileBlock;  // whole tiles: rows are padded to those, not beyond
  const size_t bytes = panel_bytes(*call.linear);
  static constexpr TileConfig kConfig;
  PL_TILE_CONFIGURE(&kConfig);
  for (int panel = first_panel; panel < last_panel; ++panel) {
    const uint8_t* w = call.linear->weights + bytes * static_cast<size_t>(panel);
    for (int b = 0; b < blocks; ++b) {
      const int start = b * kTileBlock, rows = call.rows - start < kTileBlock ? call.rows - start : kTileBlock;
      const bool only = blocks == 1;
      const TilePrefetch prefetch = {w + (only ? 2 * kAhead : b == 0 ? bytes : b == 1 ? bytes + bytes / 2 : 0), only};
      (rows > kTileRows ? B<true>::run : B<false>::run)(call, w, panel, start, rows, prefetch);
    }
  }
  PL_TILE_RELEASE();
}

inline void linear_on_tiles(const LinearCall& call, int first_panel, int last_panel) {
  const bool bytes = call.linear->format == kInt8 && call.rows > kFewByteRows;
  if (call.rows > 0 && call.linear->format == kBf16) multiply_tiles<Bf16Tiles>(call, first_panel, last_panel);
  else if (bytes) multiply_tiles<Int8Tiles>(call, first_panel, last_panel);
  else linear(call, first_panel, last_panel);
}

}  // namespace
}  // namespace paceline
