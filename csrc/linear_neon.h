// Matrix products on NEON: a few rows by a part of a panel in registers, one group of inputs at a time, as on AVX2
// (linear_avx.h). A vector of packed weights holds 4 columns of 4 bytes.
//
// sdot    (the default) 4 columns by 4 inputs of a row; bf16 by fmla on rows of fp32
// smmla   (PL_MATRICES) 2 columns by 2 rows by 8 bytes of each: usmmla for bytes and nibbles, bfmmla for bf16. Two vectors
//         of weights are zipped for it. A row without a partner is multiplied with itself.
#pragma once

#include "linear.h"

namespace paceline {
namespace {

constexpr int kLanes = 4;            // columns of a vector
constexpr int kNearRows = 4;         // up to these rows only memory limits, beyond them arithmetic does, too
constexpr size_t kChunk = 16;        // bytes of a row in one register
constexpr size_t kVectorBytes = 16;  // of weights

inline int8x16_t bytes_at(const uint8_t* p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
inline void put(float* to, float32x4_t x) { vst1q_f32(to, x); }

// int8: a group's exact sums times the row's scale, for 4 columns.
inline void add_bytes(float* total, int32x4_t sums, const LinearCall& call, int row, int g) {
  const float scale = call.input.scales[call.input.scale_stride * static_cast<size_t>(row) + static_cast<size_t>(g)];
  put(total, vfmaq_f32(vld1q_f32(total), vcvtq_f32_s32(sums), vdupq_n_f32(scale)));
}
// int4: the same with the weights' scales and lows of 4 columns.
inline void add_nibbles(float* total, int32x4_t sums, const uint8_t* head, const LinearCall& call, int row, int g) {
  const auto fp16 = [](const uint8_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p)))); };
  const size_t group = static_cast<size_t>(g * call.linear->group / kActivationGroup);
  const float scale = call.input.scales[call.input.scale_stride * static_cast<size_t>(row) + group];
  const float32x4_t low = vmulq_f32(vdupq_n_f32(static_cast<float>(sum_of(call.input, row, g))), fp16(head + 2 * kPanel));
  put(total, vfmaq_f32(vld1q_f32(total), vfmaq_f32(low, vcvtq_f32_s32(sums), fp16(head)), vdupq_n_f32(scale)));
}

template <int R>
inline void finish_rows(const LinearCall& call, int panel, int first, const float (&totals)[R][kPanel]) {
  for (int r = 0; r < R; ++r) finish(call, panel, first + r, load(totals[r]), load(totals[r] + 16));
}
template <int R>
inline void finish_bytes(const LinearCall& call, int panel, int first, const float (&totals)[R][kPanel]) {
  const float* scales = call.linear->scales + panel * kPanel;
  for (int r = 0; r < R; ++r) finish(call, panel, first + r, load(totals[r]) * load(scales), load(totals[r] + 16) * load(scales + 16));
}

#ifdef PL_MATRICES

constexpr int kMostRows = 8;
// Pairs of rows, and vectors of a block of these rows: 16 sums of 2 by 2, but 24 for 5 and 6 rows.
constexpr int pairs_of(int rows) { return (rows + 1) / 2; }
constexpr int width_for(int rows) { return rows <= 2 ? 8 : rows <= 6 ? 4 : 2; }

struct Columns {  // 8 bytes of each of 4 columns
  uint8x16_t low, high;
};
inline Columns zipped(uint8x16_t first, uint8x16_t second) {
  const uint32x4_t a = vreinterpretq_u32_u8(first), b = vreinterpretq_u32_u8(second);
  return {vreinterpretq_u8_u32(vzip1q_u32(a, b)), vreinterpretq_u8_u32(vzip2q_u32(a, b))};
}

struct Bytes {
  using Sums = int32x4_t;
  static constexpr int kLines = 4;  // of weights for a chunk of the rows
  static Sums add(Sums s, uint8x16_t w, uint8x16_t x) { return vusmmlaq_s32(s, w, vreinterpretq_s8_u8(x)); }
  static Columns columns(const uint8_t* w, int half) { return zipped(vld1q_u8(w + 2 * half * kStepBytes), vld1q_u8(w + (2 * half + 1) * kStepBytes)); }
};
struct Nibbles : Bytes {
  static constexpr int kLines = 2;
  static Columns columns(const uint8_t* w, int half) {
    const uint8x16_t line = vld1q_u8(w + half * kStepBytes);
    return zipped(vandq_u8(line, vdupq_n_u8(15)), vshrq_n_u8(line, 4));
  }
};
struct Halves {
  using Sums = float32x4_t;
  static constexpr int kLines = 4;
  static Sums add(Sums s, uint8x16_t w, uint8x16_t x) { return vbfmmlaq_f32(s, vreinterpretq_bf16_u8(w), vreinterpretq_bf16_u8(x)); }
  static Columns columns(const uint8_t* w, int half) { return Bytes::columns(w, half); }
};

// The inputs of a pair of rows: 8 bytes of one, 8 of the other.
template <int P>
struct Pairs {
  const uint8_t* rows[P][2];
  Pairs(const LinearCall& call, int first, int count) {
    for (int p = 0; p < P; ++p) {
      for (int i = 0; i < 2; ++i) {
        const int row = 2 * p + i < count ? 2 * p + i : count - 1;
        rows[p][i] = call.input.data + call.input.stride * static_cast<size_t>(first + row);
      }
    }
  }
  uint8x16_t at(int p, size_t chunk, int half) const {
    const uint64x2_t a = vreinterpretq_u64_u8(vld1q_u8(rows[p][0] + chunk)), b = vreinterpretq_u64_u8(vld1q_u8(rows[p][1] + chunk));
    return vreinterpretq_u8_u64(half ? vzip2q_u64(a, b) : vzip1q_u64(a, b));
  }
};

// s[p][c]: columns 4 c and 4 c + 1 in .low, the next two in .high, of each the pair's two rows.
template <class S>
struct Square {
  S low, high;
};
template <class T, int P, int C, class Ahead>
inline void add_chunks(const uint8_t* w, const Pairs<P>& x, size_t begin, size_t end, Square<typename T::Sums> (&s)[P][C], Ahead& ahead) {
  for (size_t chunk = begin; chunk < end; chunk += kChunk, w += T::kLines * kStepBytes) {
    for (int i = 0; i < T::kLines; ++i) ahead.step();
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      uint8x16_t inputs[P];
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) inputs[p] = x.at(p, chunk, half);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const Columns columns = T::columns(w + kVectorBytes * static_cast<size_t>(c), half);
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
          s[p][c].low = T::add(s[p][c].low, columns.low, inputs[p]);
          s[p][c].high = T::add(s[p][c].high, columns.high, inputs[p]);
        }
      }
    }
  }
}
inline int32x4_t row_of(const Square<int32x4_t>& s, int row) { return row ? vuzp2q_s32(s.low, s.high) : vuzp1q_s32(s.low, s.high); }
inline float32x4_t row_of(const Square<float32x4_t>& s, int row) { return row ? vuzp2q_f32(s.low, s.high) : vuzp1q_f32(s.low, s.high); }

template <int R, bool kOnlyPass>
struct Int8Block {
  static constexpr int kMost = kMostRows, kNear = kNearRows, P = pairs_of(R), C = width_for(R);
  static void run(const LinearCall& call, const uint8_t* w, int panel, int first, Prefetch prefetch) {
    constexpr size_t kSteps = kActivationGroup / 4;
    alignas(64) float totals[R][kPanel] = {};
    const Pairs<P> x(call, first, R);
    for (int g = 0; g < call.linear->inputs / kActivationGroup; ++g, w += kSteps * kStepBytes) {
      for (int column = 0; column < kPanel; column += C * kLanes) {
        GroupPrefetch<kPanel / (C * kLanes), R <= kNear, kOnlyPass> ahead(prefetch, column / (C * kLanes), kSteps);
        Square<int32x4_t> s[P][C];
        for (int p = 0; p < P; ++p) {
          const int32_t start[2] = {sum_of(call.input, first + 2 * p, g), 2 * p + 1 < R ? sum_of(call.input, first + 2 * p + 1, g) : 0};
          const int32x4_t both = vcombine_s32(vld1_s32(start), vld1_s32(start));
          for (int c = 0; c < C; ++c) s[p][c] = {both, both};
        }
        const size_t begin = static_cast<size_t>(g) * kActivationGroup;
        add_chunks<Bytes>(w + 4 * column, x, begin, begin + kActivationGroup, s, ahead);
        for (int r = 0; r < R; ++r) {
          for (int c = 0; c < C; ++c) add_bytes(totals[r] + column + c * kLanes, row_of(s[r / 2][c], r % 2), call, first + r, g);
        }
      }
      prefetch.advance<kOnlyPass>(kSteps);
    }
    finish_bytes<R>(call, panel, first, totals);
  }
};

template <int R, bool kOnlyPass>
struct Int4Block {
  static constexpr int kMost = kMostRows, kNear = kNearRows, P = pairs_of(R), C = width_for(R);
  static void run(const LinearCall& call, const uint8_t* w, int panel, int first, Prefetch prefetch) {
    const size_t group = static_cast<size_t>(call.linear->group), steps = group / 8;
    alignas(64) float totals[R][kPanel] = {};
    const Pairs<P> x(call, first, R);
    for (int g = 0; g < call.linear->inputs / call.linear->group; ++g, w += steps * kStepBytes) {
      const uint8_t* head = w;
      w += 4 * kPanel;
      for (int column = 0; column < kPanel; column += C * kLanes) {
        GroupPrefetch<kPanel / (C * kLanes), R <= kNear, kOnlyPass> ahead(prefetch, column / (C * kLanes), steps);
        Square<int32x4_t> s[P][C] = {};
        const size_t begin = static_cast<size_t>(g) * group;
        add_chunks<Nibbles>(w + 4 * column, x, begin, begin + group, s, ahead);
        for (int r = 0; r < R; ++r) {
          for (int c = 0; c < C; ++c) {
            const int at = column + c * kLanes;
            add_nibbles(totals[r] + at, row_of(s[r / 2][c], r % 2), head + 2 * at, call, first + r, g);
          }
        }
      }
      prefetch.advance<kOnlyPass>(steps, 4 * kPanel);
    }
    finish_rows<R>(call, panel, first, totals);
  }
};

template <int R, bool kOnlyPass>
struct Bf16Block {
  static constexpr int kMost = kMostRows, kNear = kNearRows, P = pairs_of(R), C = width_for(R);
  static void run(const LinearCall& call, const uint8_t* w, int panel, int first, Prefetch prefetch) {
    constexpr size_t kSteps = kInputMultiple / 2;
    alignas(64) float totals[R][kPanel];
    Square<float32x4_t> sums[P][kPanel / kLanes] = {};
    const Pairs<P> x(call, first, R);
    for (int i = 0; i < call.linear->inputs; i += kInputMultiple, w += kSteps * kStepBytes) {
      for (int part = 0; part < kPanel / kLanes / C; ++part) {
        GroupPrefetch<kPanel / (C * kLanes), R <= kNear, kOnlyPass> ahead(prefetch, part, kSteps);
        Square<float32x4_t> s[P][C];
        for (int p = 0; p < P; ++p) for (int c = 0; c < C; ++c) s[p][c] = sums[p][part * C + c];
        const size_t begin = 2 * static_cast<size_t>(i);
        add_chunks<Halves>(w + kVectorBytes * static_cast<size_t>(part * C), x, begin, begin + 2 * kInputMultiple, s, ahead);
        for (int p = 0; p < P; ++p) for (int c = 0; c < C; ++c) sums[p][part * C + c] = s[p][c];
      }
      prefetch.advance<kOnlyPass>(kSteps);
    }
    for (int r = 0; r < R; ++r) for (int c = 0; c < kPanel / kLanes; ++c) put(totals[r] + c * kLanes, row_of(sums[r / 2][c], r % 2));
    finish_rows<R>(call, panel, first, totals);
  }
};

#else

constexpr int kMostRows = 5;  // 20 sums, 5 inputs, a few weights
constexpr int width_for(int rows) { return rows <= 2 ? 8 : 4; }

// Weights less 128: the instruction multiplies signed by signed, and the sums need no offset.
inline int8x16_t signed_bytes(const uint8_t* w) { return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(w), vdupq_n_u8(kInt8Zero))); }

// s[r][c] += weights of vector c times the four inputs of row r in a lane of x[r].
template <int kLane, int R, int C, class WeightsOf>
inline void add_lane(WeightsOf weights_of, const int8x16_t (&x)[R], int32x4_t (&s)[R][C]) {
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) {
    const int8x16_t weights = weights_of(c);
#pragma GCC unroll 5
    for (int r = 0; r < R; ++r) s[r][c] = vdotq_laneq_s32(s[r][c], weights, x[r], kLane);
  }
}
template <int R>
struct Inputs {
  int8x16_t x[R];
  Inputs(const uint8_t* from, size_t stride) {
#pragma GCC unroll 5
    for (int r = 0; r < R; ++r) x[r] = bytes_at(from + stride * static_cast<size_t>(r));
  }
};

template <int R, bool kOnlyPass>
struct Int8Block {
  static constexpr int kMost = kMostRows, kNear = kNearRows, C = width_for(R);
  static constexpr size_t kSteps = kActivationGroup / 4;
  using Ahead = GroupPrefetch<kPanel / (C * kLanes), R <= kNear, kOnlyPass>;

  static void add_group(const uint8_t* w, const uint8_t* x, size_t stride, int32x4_t (&s)[R][C], Ahead ahead) {
    for (size_t k = 0; k < kSteps; k += 4, w += 4 * kStepBytes, x += kChunk) {
      const Inputs<R> inputs(x, stride);
      const auto weights = [&](int step) {
        ahead.step();
        return [=](int c) { return signed_bytes(w + kStepBytes * static_cast<size_t>(step) + kVectorBytes * static_cast<size_t>(c)); };
      };
      add_lane<0, R, C>(weights(0), inputs.x, s);
      add_lane<1, R, C>(weights(1), inputs.x, s);
      add_lane<2, R, C>(weights(2), inputs.x, s);
      add_lane<3, R, C>(weights(3), inputs.x, s);
    }
  }
  static void run(const LinearCall& call, const uint8_t* w, int panel, int first, Prefetch prefetch) {
    alignas(64) float totals[R][kPanel] = {};
    const uint8_t* x = call.input.data + call.input.stride * static_cast<size_t>(first);
    for (int g = 0; g < call.linear->inputs / kActivationGroup; ++g, w += kSteps * kStepBytes, x += kActivationGroup) {
      for (int column = 0; column < kPanel; column += C * kLanes) {
        int32x4_t s[R][C] = {};
        add_group(w + 4 * column, x, call.input.stride, s, Ahead(prefetch, column / (C * kLanes), kSteps));
        for (int r = 0; r < R; ++r) for (int c = 0; c < C; ++c) add_bytes(totals[r] + column + c * kLanes, s[r][c], call, first + r, g);
      }
      prefetch.advance<kOnlyPass>(kSteps);
    }
    finish_bytes<R>(call, panel, first, totals);
  }
};

template <int R, bool kOnlyPass>
struct Int4Block {
  static constexpr int kMost = kMostRows, kNear = kNearRows, C = width_for(R);
  using Ahead = GroupPrefetch<kPanel / (C * kLanes), R <= kNear, kOnlyPass>;

  // The low nibbles of a step belong to its first four inputs, the high ones to the next four.
  template <int kStep>
  static void add_step(const uint8_t* w, const Inputs<R>& inputs, int32x4_t (&s)[R][C], Ahead& ahead) {
    ahead.step();
    w += kStep * kStepBytes;
    const auto line = [=](int c) { return vld1q_u8(w + kVectorBytes * static_cast<size_t>(c)); };
    add_lane<2 * kStep, R, C>([&](int c) { return vreinterpretq_s8_u8(vandq_u8(line(c), vdupq_n_u8(15))); }, inputs.x, s);
    add_lane<2 * kStep + 1, R, C>([&](int c) { return vreinterpretq_s8_u8(vshrq_n_u8(line(c), 4)); }, inputs.x, s);
  }
  static void run(const LinearCall& call, const uint8_t* w, int panel, int first, Prefetch prefetch) {
    const size_t steps = static_cast<size_t>(call.linear->group) / 8, stride = call.input.stride;
    alignas(64) float totals[R][kPanel] = {};
    const uint8_t* x = call.input.data + stride * static_cast<size_t>(first);
    for (int g = 0; g < call.linear->inputs / call.linear->group; ++g, w += steps * kStepBytes, x += call.linear->group) {
      const uint8_t* head = w;
      w += 4 * kPanel;
      for (int column = 0; column < kPanel; column += C * kLanes) {
        Ahead ahead(prefetch, column / (C * kLanes), steps);
        int32x4_t s[R][C] = {};
        for (size_t k = 0; k < steps; k += 2) {
          const Inputs<R> inputs(x + 8 * k, stride);
          const uint8_t* lines = w + k * kStepBytes + 4 * static_cast<size_t>(column);
          add_step<0>(lines, inputs, s, ahead);
          add_step<1>(lines, inputs, s, ahead);
        }
        for (int r = 0; r < R; ++r) {
          for (int c = 0; c < C; ++c) {
            const int at = column + c * kLanes;
            add_nibbles(totals[r] + at, s[r][c], head + 2 * at, call, first + r, g);
          }
        }
      }
      prefetch.advance<kOnlyPass>(steps, 4 * kPanel);
    }
    finish_rows<R>(call, panel, first, totals);
  }
};

// Rows of fp32; even and odd inputs in turn, as on AVX2: the same bits.
template <int R, bool kOnlyPass>
struct Bf16Block {
  static constexpr int kMost = kMostRows, kNear = kNearRows, C = width_for(R);
  static constexpr size_t kSteps = kInputMultiple / 2;
  using Ahead = GroupPrefetch<kPanel / (C * kLanes), R <= kNear, kOnlyPass>;

  template <int kLane, class WeightsOf>
  static void add_lane(WeightsOf weights_of, const float32x4_t (&x)[R], float32x4_t (&s)[R][C]) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const float32x4_t weights = weights_of(c);
#pragma GCC unroll 5
      for (int r = 0; r < R; ++r) s[r][c] = vfmaq_laneq_f32(s[r][c], weights, x[r], kLane);
    }
  }
  template <int kStep>
  static void add_step(const uint8_t* w, const float32x4_t (&x)[R], float32x4_t (&s)[R][C], Ahead& ahead) {
    ahead.step();
    w += kStep * kStepBytes;
    const auto line = [=](int c) { return vreinterpretq_u32_u8(vld1q_u8(w + kVectorBytes * static_cast<size_t>(c))); };
    add_lane<2 * kStep>([&](int c) { return vreinterpretq_f32_u32(vshlq_n_u32(line(c), 16)); }, x, s);
    add_lane<2 * kStep + 1>([&](int c) { return vreinterpretq_f32_u32(vandq_u32(line(c), vdupq_n_u32(0xffff0000u))); }, x, s);
  }
  static void run(const LinearCall& call, const uint8_t* w, int panel, int first, Prefetch prefetch) {
    alignas(64) float totals[R][kPanel] = {};
    const size_t stride = call.input.stride / sizeof(float);
    const float* x = reinterpret_cast<const float*>(call.input.data) + stride * static_cast<size_t>(first);
    for (int i = 0; i < call.linear->inputs; i += kInputMultiple, w += kSteps * kStepBytes, x += kInputMultiple) {
      for (int column = 0; column < kPanel; column += C * kLanes) {
        Ahead ahead(prefetch, column / (C * kLanes), kSteps);
        float32x4_t s[R][C];
        for (int r = 0; r < R; ++r) for (int c = 0; c < C; ++c) s[r][c] = vld1q_f32(totals[r] + column + c * kLanes);
        for (size_t k = 0; k < kSteps; k += 2) {
          float32x4_t inputs[R];
          for (int r = 0; r < R; ++r) inputs[r] = vld1q_f32(x + stride * static_cast<size_t>(r) + 2 * k);
          const uint8_t* lines = w + k * kStepBytes + 4 * static_cast<size_t>(column);
          add_step<0>(lines, inputs, s, ahead);
          add_step<1>(lines, inputs, s, ahead);
        }
        for (int r = 0; r < R; ++r) for (int c = 0; c < C; ++c) put(totals[r] + column + c * kLanes, s[r][c]);
      }
      prefetch.advance<kOnlyPass>(kSteps);
    }
    finish_rows<R>(call, panel, first, totals);
  }
};

#endif

inline void linear(const LinearCall& call, int first_panel, int last_panel) {
  if (call.rows == 0) return;
  if (call.linear->format == kInt8) multiply<Int8Block>(call, first_panel, last_panel);
  else if (call.linear->format == kBf16) multiply<Bf16Block>(call, first_panel, last_panel);
  else multiply<Int4Block>(call, first_panel, last_panel);
}

}  // namespace
}  // namespace paceline
