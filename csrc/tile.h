// Eight tile registers of 16 lines of 64 bytes: the CPU's own (AMX), or, with PL_EMULATE_TILES, memory that follows
// their documentation to the bit, so that the same kernels can be tested on any machine.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace paceline {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;  // per line

// Tiles 0 to 3 are sums, rows by 16 columns; 4 and 5 are weights, lines of 16 columns; 6 and 7 are the rows' inputs. The
// time of a product grows with its rows.
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t line_bytes[16] = {};
  uint8_t rows[16] = {};
  TileConfig() = default;
  TileConfig(int height, int depth) {
    for (int i = 0; i < 8; ++i) {
      line_bytes[i] = static_cast<uint16_t>(i < 6 ? kTileBytes : depth);
      rows[i] = static_cast<uint8_t>(i == 4 || i == 5 ? depth / 4 : height);
    }
  }
};

#ifdef PL_EMULATE_TILES

struct Tile {
  uint8_t line[kTileRows][kTileBytes];
};
thread_local Tile tiles[8];
thread_local TileConfig configured;

inline float fp32(uint16_t bf16) {  // denormals count as zero
  const uint32_t bits = (bf16 & 0x7f80) ? static_cast<uint32_t>(bf16) << 16 : static_cast<uint32_t>(bf16 & 0x8000) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
inline float flushed(float x) {
  const float size = __builtin_fabsf(x);
  return size > 0.0f && size < 1.17549435e-38f ? __builtin_copysignf(0.0f, x) : x;
}

inline void load_tile(int to, const void* from, size_t stride) {
  for (size_t m = 0; m < configured.rows[to]; ++m) {
    memcpy(tiles[to].line[m], static_cast<const uint8_t*>(from) + m * stride, configured.line_bytes[to]);
  }
}
inline void store_tile(int from, void* to, size_t stride) {
  for (size_t m = 0; m < configured.rows[from]; ++m) {
    memcpy(static_cast<uint8_t*>(to) + m * stride, tiles[from].line[m], configured.line_bytes[from]);
  }
}
// to[m][n] += x[m][4 k + j] * w[k][4 n + j] over k and j, x signed, w unsigned.
inline void multiply_bytes(int to, int x, int w) {
  for (int m = 0; m < configured.rows[to]; ++m) {
    int32_t sums[16];
    memcpy(sums, tiles[to].line[m], sizeof sums);
    for (int k = 0; k < configured.rows[w]; ++k) {
      for (int n = 0; n < 16; ++n) {
        for (int j = 0; j < 4; ++j) sums[n] += static_cast<int8_t>(tiles[x].line[m][4 * k + j]) * tiles[w].line[k][4 * n + j];
      }
    }
    memcpy(tiles[to].line[m], sums, sizeof sums);
  }
}
// Even and odd inputs are summed separately, fused, from zero; their sum is added to the tile.
inline void multiply_bf16(int to, int x, int w) {
  for (int m = 0; m < configured.rows[to]; ++m) {
    float even[16] = {}, odd[16] = {}, sums[16];
    uint16_t a[32], b[32];
    memcpy(a, tiles[x].line[m], sizeof a);
    for (int k = 0; k < configured.rows[w]; ++k) {
      memcpy(b, tiles[w].line[k], sizeof b);
      for (int n = 0; n < 16; ++n) {
        even[n] = flushed(__builtin_fmaf(fp32(a[2 * k]), fp32(b[2 * n]), even[n]));
        odd[n] = flushed(__builtin_fmaf(fp32(a[2 * k + 1]), fp32(b[2 * n + 1]), odd[n]));
      }
    }
    memcpy(sums, tiles[to].line[m], sizeof sums);
    for (int n = 0; n < 16; ++n) sums[n] = flushed(sums[n] + flushed(even[n] + odd[n]));
    memcpy(tiles[to].line[m], sums, sizeof sums);
  }
}

#define PL_TILE_CONFIGURE(config) static_cast<void>(configured = *(config))
#define PL_TILE_RELEASE() static_cast<void>(0)
#define PL_TILE_ZERO(tile) memset(&tiles[tile], 0, sizeof(Tile))
#define PL_TILE_LOAD(tile, from, stride) load_tile(tile, from, stride)
#define PL_TILE_STORE(tile, to, stride) store_tile(tile, to, stride)
#define PL_TILE_MULTIPLY_BYTES(to, x, w) multiply_bytes(to, x, w)
#define PL_TILE_MULTIPLY_BF16(to, x, w) multiply_bf16(to, x, w)

#else

// Macros, because the number of a tile is part of the instruction.
#define PL_TILE_CONFIGURE(config) _tile_loadconfig(config)
#define PL_TILE_RELEASE() _tile_release()
#define PL_TILE_ZERO(tile) _tile_zero(tile)
#define PL_TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define PL_TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define PL_TILE_MULTIPLY_BYTES(to, x, w) _tile_dpbsud(to, x, w)
#define PL_TILE_MULTIPLY_BF16(to, x, w) _tile_dpbf16ps(to, x, w)

#endif

}  // namespace
}  // namespace paceline
