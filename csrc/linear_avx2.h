// Matrix products on AVX2: up to 2 rows by half a panel. Bytes are widened to 16 bits first, because the byte instruction
// saturates; sums are exact, so the bits equal those of AVX-512.
#pragma once

#include "body.h"

namespace paceline {
namespace {

constexpr int kMostRows = 2;
constexpr size_t kStepBytes = 128;

inline __m256i widen(const uint8_t* four_columns) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(four_columns)));
}
inline __m256i four_inputs(const uint8_t* x) {
  int32_t value;
  memcpy(&value, x, sizeof value);
  return _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(value)));
}
// s[c]: for 4 columns, two partial sums each.
inline I16 join(const __m256i* s) {
  return {_mm256_permute4x64_epi64(_mm256_hadd_epi32(s[0], s[1]), 0xd8), _mm256_permute4x64_epi64(_mm256_hadd_epi32(s[2], s[3]), 0xd8)};
}

template <int R>
inline void add_step(const __m256i* w, const uint8_t* x, size_t stride, __m256i (&s)[R][4]) {
  for (int r = 0; r < R; ++r) {
    const __m256i a = four_inputs(x + stride * static_cast<size_t>(r));
    for (int c = 0; c < 4; ++c) s[r][c] = _mm256_add_epi32(s[r][c], _mm256_madd_epi16(w[c], a));
  }
}

template <int R>
struct Int8Block {
  static void half(const LinearCall& call, const uint8_t* w, int first, F16 (&total)[R]) {
    const size_t stride = call.input.stride;
    const uint8_t* x = call.input.data + stride * static_cast<size_t>(first);
    for (int r = 0; r < R; ++r) total[r] = zero();
    for (int g = 0; g < call.linear->inputs / kActivationGroup; ++g) {
      __m256i s[R][4] = {};
      for (int k = 0; k < kActivationGroup / 4; ++k, w += kStepBytes, x += 4) {
        const __m256i columns[4] = {widen(w), widen(w + 16), widen(w + 32), widen(w + 48)};
        add_step<R>(columns, x, stride, s);
      }
      for (int r = 0; r < R; ++r) {
        const I16 exact = join(s[r]) + iset1(sum_of(call.input, first + r, g));
        total[r] = fma(to_float(exact), scale_of(call.input, first + r, g * kActivationGroup), total[r]);
      }
    }
  }
  static void run(const LinearCall& call, const uint8_t* w, int panel, int first) {
    F16 total[2][R];
    half(call, w, first, total[0]);
    half(call, w + 64, first, total[1]);
    const float* scales = call.linear->scales + panel * kPanel;
    for (int r = 0; r < R; ++r) finish(call, panel, first + r, total[0][r] * load(scales), total[1][r] * load(scales + 16));
  }
};

template <int R>
struct Int4Block {
  static void half(const LinearCall& call, const uint8_t* w, int which, int first, F16 (&total)[R]) {
    const size_t stride = call.input.stride;
    const uint8_t* x = call.input.data + stride * static_cast<size_t>(first);
    const __m256i low = _mm256_set1_epi16(15);
    for (int r = 0; r < R; ++r) total[r] = zero();
    for (int g = 0; g < call.linear->inputs / call.linear->group; ++g) {
      const F16 scale = load_fp16(reinterpret_cast<const uint16_t*>(w) + 16 * which);
      const F16 start = load_fp16(reinterpret_cast<const uint16_t*>(w) + 32 + 16 * which);
      w += 4 * kPanel;
      __m256i s[R][4] = {};
      for (int k = 0; k < call.linear->group / 8; ++k, w += kStepBytes, x += 8) {
        __m256i lows[4], highs[4];
        for (int c = 0; c < 4; ++c) {
          const __m256i both = widen(w + 64 * which + 16 * c);
          lows[c] = _mm256_and_si256(both, low);
          highs[c] = _mm256_srli_epi16(both, 4);
        }
        add_step<R>(lows, x, stride, s);
        add_step<R>(highs, x + 4, stride, s);
      }
      for (int r = 0; r < R; ++r) {
        const F16 sum = set1(static_cast<float>(sum_of(call.input, first + r, g)));
        const F16 exact = fma(to_float(join(s[r])), scale, sum * start);
        total[r] = fma(exact, scale_of(call.input, first + r, g * call.linear->group), total[r]);
      }
    }
  }
  static void run(const LinearCall& call, const uint8_t* w, int panel, int first) {
    F16 total[2][R];
    half(call, w, 0, first, total[0]);
    half(call, w, 1, first, total[1]);
    for (int r = 0; r < R; ++r) finish(call, panel, first + r, total[0][r], total[1][r]);
  }
};

template <int R>
struct Bf16Block {
  static void half(const LinearCall& call, const uint8_t* w, int first, F16 (&s)[R]) {
    const size_t stride = call.input.stride;
    const uint8_t* x = call.input.data + stride * static_cast<size_t>(first);
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    for (int r = 0; r < R; ++r) s[r] = zero();
    for (int k = 0; k < call.linear->inputs / 2; ++k, w += kStepBytes, x += 8) {
      const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)), b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 32));
      const F16 even = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
      const F16 odd = {_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high))};
      for (int r = 0; r < R; ++r) {
        const float* pair = reinterpret_cast<const float*>(x + stride * static_cast<size_t>(r));
        s[r] = fma(set1(pair[1]), odd, fma(set1(pair[0]), even, s[r]));
      }
    }
  }
  static void run(const LinearCall& call, const uint8_t* w, int panel, int first) {
    F16 s[2][R];
    half(call, w, first, s[0]);
    half(call, w + 64, first, s[1]);
    for (int r = 0; r < R; ++r) finish(call, panel, first + r, s[0][r], s[1][r]);
  }
};

template <template <int> class B>
inline void multiply(const LinearCall& call, int first_panel, int last_panel) {
  const size_t bytes = panel_bytes(*call.linear);
  for (int panel = first_panel; panel < last_panel; ++panel) {
    const uint8_t* w = call.linear->weights + bytes * static_cast<size_t>(panel);
    int row = 0;
    for (; row + kMostRows <= call.rows; row += kMostRows) B<kMostRows>::run(call, w, panel, row);
    if (row < call.rows) B<1>::run(call, w, panel, row);
  }
}

inline void linear(const LinearCall& call, int first_panel, int last_panel) {
  if (call.linear->format == kInt8) multiply<Int8Block>(call, first_panel, last_panel);
  else if (call.linear->format == kBf16) multiply<Bf16Block>(call, first_panel, last_panel);
  else multiply<Int4Block>(call, first_panel, last_panel);
}

}  // namespace
}  // namespace paceline
