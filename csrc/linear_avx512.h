// Matrix products on AVX-512: a few rows by one panel of 32 columns in registers, over all of K.
#pragma once

#include "linear.h"

namespace paceline {
namespace {

constexpr int kMostRows = 12;        // of bf16: 24 sums, 2 weights, 1 activation: 27 of the 32 registers
constexpr int kMostByteRows = 6;     // half of the registers are the sums over groups: in memory they cost 10 % of the time
constexpr int kNearRows = 8;         // of bf16: up to these only memory limits, beyond them arithmetic does, too
constexpr int kNearNibbleRows = 4;   // the same for nibbles
#ifdef PL_FAR_BYTES
constexpr int kNearByteRows = 0;
#else
constexpr int kNearByteRows = 4;
#endif

inline __m512i weight_line(const uint8_t* w) { return _mm512_loadu_si512(w); }
inline __m512i four_bytes(const uint8_t* x) {
  int32_t value;
  memcpy(&value, x, sizeof value);
  return _mm512_set1_epi32(value);
}

// Pins two sums to their registers: GCC 12 otherwise copies every sum, every step, for the code after the loop.
inline void stay(__m512i (&pair)[2]) { asm("" : "+v"(pair[0]), "+v"(pair[1])); }

// Integer sums within a group are exact; groups are added in order.
template <int R, bool kOnlyPass>
struct Int8Block {
  static constexpr int kMost = kMostByteRows, kNear = kNearByteRows;
  static void run(const LinearCall& call, const uint8_t* w, int panel, int first, Prefetch prefetch) {
    constexpr size_t kSteps = kActivationGroup / 4;
    const size_t stride = call.input.stride;
    const uint8_t* x = call.input.data + stride * static_cast<size_t>(first);
    const int groups = call.linear->inputs / kActivationGroup;
    F16 totals[R][2];
    for (int r = 0; r < R; ++r) totals[r][0] = totals[r][1] = zero();
    for (int g = 0; g < groups; ++g) {
      __m512i s[R][2];
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) s[r][0] = s[r][1] = _mm512_set1_epi32(sum_of(call.input, first + r, g));
#pragma GCC unroll 2
      for (size_t k = 0; k < kSteps; ++k, w += kStepBytes, x += 4) {
        prefetch.step<R <= kNear, kOnlyPass>(k);
        const __m512i w0 = weight_line(w), w1 = weight_line(w + 64);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const __m512i a = four_bytes(x + stride * static_cast<size_t>(r));
          s[r][0] = _mm512_dpbusd_epi32(s[r][0], w0, a);
          s[r][1] = _mm512_dpbusd_epi32(s[r][1], w1, a);
          stay(s[r]);
        }
      }
      prefetch.advance<kOnlyPass>(kSteps);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const F16 scale = scale_of(call.input, first + r, g * kActivationGroup);
        totals[r][0] = fma(to_float(I16{s[r][0]}), scale, totals[r][0]);
        totals[r][1] = fma(to_float(I16{s[r][1]}), scale, totals[r][1]);
      }
    }
    const F16 scale0 = load(call.linear->scales + panel * kPanel), scale1 = load(call.linear->scales + panel * kPanel + 16);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) finish(call, panel, first + r, totals[r][0] * scale0, totals[r][1] * scale1);
  }
};

template <int R, bool kOnlyPass>
struct Bf16Block {
  static constexpr int kMost = kMostRows, kNear = kNearRows;
  static void run(const LinearCall& call, const uint8_t* w, int panel, int first, Prefetch prefetch) {
    const size_t stride = call.input.stride;
    const uint8_t* x = call.input.data + stride * static_cast<size_t>(first);
    const size_t steps = static_cast<size_t>(call.linear->inputs) / 2;
    __m512 s[R][2];
    for (int r = 0; r < R; ++r) s[r][0] = s[r][1] = _mm512_setzero_ps();
    for (size_t k = 0; k < steps; ++k) {
      prefetch.step<R <= kNear, kOnlyPass>(k);
      const __m512i w0 = weight_line(w + k * kStepBytes), w1 = weight_line(w + k * kStepBytes + 64);
#ifdef PL_FP32_ACTIVATIONS
      const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
      const __m512 even0 = _mm512_castsi512_ps(_mm512_slli_epi32(w0, 16)), even1 = _mm512_castsi512_ps(_mm512_slli_epi32(w1, 16));
      const __m512 odd0 = _mm512_castsi512_ps(_mm512_and_si512(w0, high)), odd1 = _mm512_castsi512_ps(_mm512_and_si512(w1, high));
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const float* a = reinterpret_cast<const float*>(x + stride * static_cast<size_t>(r)) + 2 * k;
        const __m512 even = _mm512_set1_ps(a[0]), odd = _mm512_set1_ps(a[1]);
        s[r][0] = _mm512_fmadd_ps(odd, odd0, _mm512_fmadd_ps(even, even0, s[r][0]));
        s[r][1] = _mm512_fmadd_ps(odd, odd1, _mm512_fmadd_ps(even, even1, s[r][1]));
      }
#else
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const __m512bh a = reinterpret_cast<__m512bh>(four_bytes(x + stride * static_cast<size_t>(r) + 4 * k));
        s[r][0] = _mm512_dpbf16_ps(s[r][0], reinterpret_cast<__m512bh>(w0), a);
        s[r][1] = _mm512_dpbf16_ps(s[r][1], reinterpret_cast<__m512bh>(w1), a);
      }
#endif
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) finish(call, panel, first + r, F16{s[r][0]}, F16{s[r][1]});
  }
};

template <int R, bool kOnlyPass>
struct Int4Block {
  static constexpr int kMost = kMostByteRows, kNear = kNearNibbleRows;
  static void run(const LinearCall& call, const uint8_t* w, int panel, int first, Prefetch prefetch) {
    const size_t stride = call.input.stride;
    const uint8_t* x = call.input.data + stride * static_cast<size_t>(first);
    const size_t steps = static_cast<size_t>(call.linear->group) / 8;
    const int groups = call.linear->inputs / call.linear->group;
    const __m512i nibble = _mm512_set1_epi8(15);
    F16 totals[R][2];
    for (int r = 0; r < R; ++r) totals[r][0] = totals[r][1] = zero();
    for (int g = 0; g < groups; ++g) {
      const uint8_t* head = w;
      w += 4 * kPanel;
      __m512i s[R][2];
      for (int r = 0; r < R; ++r) s[r][0] = s[r][1] = _mm512_setzero_si512();
      for (size_t k = 0; k < steps; ++k, w += kStepBytes, x += 8) {
        prefetch.step<R <= kNear, kOnlyPass>(k);
        const __m512i w0 = weight_line(w), w1 = weight_line(w + 64);
        const __m512i even0 = _mm512_and_si512(w0, nibble), even1 = _mm512_and_si512(w1, nibble);
        const __m512i odd0 = _mm512_and_si512(_mm512_srli_epi32(w0, 4), nibble), odd1 = _mm512_and_si512(_mm512_srli_epi32(w1, 4), nibble);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const __m512i a = four_bytes(x + stride * static_cast<size_t>(r)), b = four_bytes(x + stride * static_cast<size_t>(r) + 4);
          s[r][0] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(s[r][0], even0, a), odd0, b);
          s[r][1] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(s[r][1], even1, a), odd1, b);
          stay(s[r]);
        }
      }
      prefetch.advance<kOnlyPass>(steps, 4 * kPanel);
      const F16 scale0 = load_fp16(reinterpret_cast<const uint16_t*>(head)), scale1 = load_fp16(reinterpret_cast<const uint16_t*>(head) + 16);
      const F16 low0 = load_fp16(reinterpret_cast<const uint16_t*>(head) + 32), low1 = load_fp16(reinterpret_cast<const uint16_t*>(head) + 48);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const F16 sum = set1(static_cast<float>(sum_of(call.input, first + r, g)));
        const F16 scale = scale_of(call.input, first + r, g * call.linear->group);
        totals[r][0] = fma(fma(to_float(I16{s[r][0]}), scale0, sum * low0), scale, totals[r][0]);
        totals[r][1] = fma(fma(to_float(I16{s[r][1]}), scale1, sum * low1), scale, totals[r][1]);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) finish(call, panel, first + r, totals[r][0], totals[r][1]);
  }
};

inline void linear(const LinearCall& call, int first_panel, int last_panel) {
  if (call.rows == 0) return;
  if (call.linear->format == kInt8) multiply<Int8Block>(call, first_panel, last_panel);
  else if (call.linear->format == kBf16) multiply<Bf16Block>(call, first_panel, last_panel);
  else multiply<Int4Block>(call, first_panel, last_panel);
}

}  // namespace
}  // namespace paceline
