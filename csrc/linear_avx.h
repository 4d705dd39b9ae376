// Matrix products on 256 bits (AVX2, AVX-VNNI) and on 512 bits without VNNI: a few rows by half a panel or a whole one in
// registers, one group of inputs at a time, so that every panel is read once and in order. Sums over groups are in
// memory: they are touched once in 16 steps.
//
// Without VNNI (no PL_DOTS) the byte instruction adds pairs in 16 bits and saturates. Two ways around that are exact:
// int8  bytes at even and at odd inputs are two vectors of 16-bit numbers: two products and two additions, like
//       maddubs(|w|, sign(a, w)), but half of those on ports that multiply. The rows are kept as 16 bits, too.
// int4  a nibble times a byte is at most 15 * 127: the sums of 32 inputs (8 pairs) fit into 16 bits.
#pragma once

#include "linear.h"

namespace paceline {
namespace {

// Sums are pinned to their registers (stay) or added to in place (add_to, add_product_to): GCC 12 otherwise copies every
// sum, every step, for the code after the loop.

#ifdef PL_WIDE_VECTORS

using Ints = __m512i;
using Floats = __m512;
#define PL_AVX(operation) _mm512_##operation

inline Ints line(const uint8_t* w) { return _mm512_loadu_si512(w); }
inline Ints both(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Floats as_floats(Ints a) { return _mm512_castsi512_ps(a); }
inline Floats from_fp16(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline void stay(Ints& x) { asm("" : "+v"(x)); }
inline void add_to(Ints& sum, Ints x) { asm("vpaddd %1, %0, %0" : "+v"(sum) : "v"(x)); }
inline void add_product_to(Floats& sum, Floats a, Floats b) { asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }

constexpr int kWholeRows = 8, kFewRows = 2, kMostByteRows = 8, kMostNibbleRows = 8, kMostRows = 8;

#else

using Ints = __m256i;
using Floats = __m256;
#define PL_AVX(operation) _mm256_##operation

inline Ints line(const uint8_t* w) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)); }
inline Ints both(Ints a, Ints b) { return _mm256_and_si256(a, b); }
inline Floats as_floats(Ints a) { return _mm256_castsi256_ps(a); }
inline Floats from_fp16(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline void stay(Ints& x) { asm("" : "+x"(x)); }
inline void add_to(Ints& sum, Ints x) { asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(x)); }
inline void add_product_to(Floats& sum, Floats a, Floats b) { asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b)); }

#ifdef PL_DOTS
constexpr int kWholeRows = 3, kFewRows = 3, kMostByteRows = 6, kMostNibbleRows = 6, kMostRows = 6;
#else
constexpr int kWholeRows = 2, kFewRows = 2, kMostByteRows = 6, kMostNibbleRows = 5, kMostRows = 6;
#endif

#endif

inline Ints all(int32_t x) { return PL_AVX(set1_epi32)(x); }
inline Ints add(Ints a, Ints b) { return PL_AVX(add_epi32)(a, b); }
inline Ints add_words(Ints a, Ints b) { return PL_AVX(add_epi16)(a, b); }
inline Ints multiply_words(Ints a, Ints b) { return PL_AVX(madd_epi16)(a, b); }
inline Ints multiply_bytes(Ints w, Ints a) { return PL_AVX(maddubs_epi16)(w, a); }
inline Ints upper_bytes(Ints a) { return PL_AVX(srli_epi16)(a, 8); }
inline Ints upper_nibbles(Ints a) { return PL_AVX(srli_epi16)(a, 4); }
inline Ints to_upper_half(Ints a) { return PL_AVX(slli_epi32)(a, 16); }
inline Floats to_floats(Ints a) { return PL_AVX(cvtepi32_ps)(a); }
inline Floats every(float x) { return PL_AVX(set1_ps)(x); }
inline Floats floats_at(const float* p) { return PL_AVX(loadu_ps)(p); }
inline void put(float* p, Floats x) { PL_AVX(storeu_ps)(p, x); }
inline Floats times(Floats a, Floats b) { return PL_AVX(mul_ps)(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return PL_AVX(fmadd_ps)(a, b, c); }

#undef PL_AVX

// Up to kWholeRows a block is as wide as a panel. Up to kFewRows the inputs of a step stay in registers while the weights
// pass by; beyond, the weights stay. The most rows of a block are those whose sums leave room for the rest.
constexpr int kLanes = sizeof(Ints) / 4;  // columns of a vector
constexpr int kNearRows = 4;              // up to these rows only memory limits, beyond them arithmetic does, too
constexpr int kWordSum = 32;              // inputs of nibbles that a 16-bit sum has room for

// Vectors that a block of these rows is wide.
constexpr int width_for(int rows) { return (rows <= kWholeRows ? kPanel : kPanel / 2) / kLanes; }

// Four inputs of a row.
inline Ints four_bytes(const uint8_t* x) {
  int32_t value;
  memcpy(&value, x, sizeof value);
  return all(value);
}

inline Ints line_of(const uint8_t* w, int c) { return line(w + sizeof(Ints) * static_cast<size_t>(c)); }

// Calls add(r, c, weights of vector c, inputs of row r) for all of a step.
template <int R, int C, class WeightsOf, class InputsOf, class Add>
inline __attribute__((always_inline)) void each_product(WeightsOf weights_of, InputsOf inputs_of, Add add) {
  if constexpr (R <= kFewRows) {
    decltype(inputs_of(0)) inputs[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) inputs[r] = inputs_of(r);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const auto weights = weights_of(c);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) add(r, c, weights, inputs[r]);
    }
  } else {
    decltype(weights_of(0)) weights[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) weights[c] = weights_of(c);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const auto inputs = inputs_of(r);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) add(r, c, weights[c], inputs);
    }
  }
}

// --- bytes -------------------------------------------------------------------------------------------------------------

#ifdef PL_DOTS

#ifdef PL_EMULATE_DOTS
inline void dot(Ints& sum, Ints w, Ints a) { stay(sum = _mm256_dpbusd_epi32(sum, w, a)); }
#else
inline void dot(Ints& sum, Ints w, Ints a) { stay(sum = _mm256_dpbusd_avx_epi32(sum, w, a)); }
#endif

constexpr size_t kInputBytes = 1;  // of a row's input
inline const uint8_t* inputs_of(const LinearCall& call, int row) {
  return call.input.data + call.input.stride * static_cast<size_t>(row);
}

#else

constexpr size_t kInputBytes = 2;
// Behind a row's bytes: the same inputs as 16 bits, of every four those at even places first.
inline const uint8_t* inputs_of(const LinearCall& call, int row) {
  return call.input.data + call.input.stride * static_cast<size_t>(row) + call.linear->inputs;
}

inline void widen_row(uint8_t* row, int inputs) {
  for (int i = 0; i < inputs; i += 16) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + i));
    const __m128i even = _mm_srai_epi16(_mm_slli_epi16(bytes, 8), 8), odd = _mm_srai_epi16(bytes, 8);
    uint8_t* to = row + inputs + 2 * i;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_unpacklo_epi32(even, odd));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16), _mm_unpackhi_epi32(even, odd));
  }
}

inline void quantise_and_widen(const float* x, const Norm* norm, const Linear& consumer, const Activations& to, Range rows) {
  quantise(x, norm, consumer, to, rows);
  if (consumer.format != kInt8) return;
  for (int row = rows.first; row < rows.last; ++row) widen_row(to.data + to.stride * static_cast<size_t>(row), consumer.inputs);
}

#endif

// Integer sums within a group are exact; groups are added in order.
template <int R, bool kOnlyPass>
struct Int8Block {
  static constexpr int kMost = kMostByteRows, kNear = kNearRows, C = width_for(R);
  static constexpr size_t kSteps = kActivationGroup / 4;
  using Ahead = GroupPrefetch<kPanel / (C * kLanes), R <= kNear, kOnlyPass>;

  static void add_group(const uint8_t* w, const uint8_t* x, size_t stride, Ints (&s)[R][C], Ahead prefetch) {
    for (size_t k = 0; k < kSteps; ++k, w += kStepBytes, x += 4 * kInputBytes) {
      prefetch.step();
#ifdef PL_DOTS
      each_product<R, C>([&](int c) { return line_of(w, c); }, [&](int r) { return four_bytes(x + stride * static_cast<size_t>(r)); },
                         [&](int r, int c, Ints weights, Ints inputs) { dot(s[r][c], weights, inputs); });
#else
      const auto add_words = [&](int r, int c, Ints weights, Ints inputs) { add_to(s[r][c], multiply_words(weights, inputs)); };
      each_product<R, C>([&](int c) { return both(line_of(w, c), all(0x00ff00ff)); }, [&](int r) { return four_bytes(x + stride * static_cast<size_t>(r)); }, add_words);
      each_product<R, C>([&](int c) { return upper_bytes(line_of(w, c)); }, [&](int r) { return four_bytes(x + stride * static_cast<size_t>(r) + 4); }, add_words);
#endif
    }
  }

  static void run(const LinearCall& call, const uint8_t* w, int panel, int first, Prefetch prefetch) {
    alignas(64) float totals[R][kPanel] = {};
    const uint8_t* x = inputs_of(call, first);
    for (int g = 0; g < call.linear->inputs / kActivationGroup; ++g, w += kSteps * kStepBytes, x += kActivationGroup * kInputBytes) {
      for (int column = 0; column < kPanel; column += C * kLanes) {
        Ints s[R][C];
        for (int r = 0; r < R; ++r) for (int c = 0; c < C; ++c) s[r][c] = all(sum_of(call.input, first + r, g));
        add_group(w + 4 * column, x, call.input.stride, s, Ahead(prefetch, column / (C * kLanes), kSteps));
        for (int r = 0; r < R; ++r) {
          const Floats scale = every(call.input.scales[call.input.scale_stride * static_cast<size_t>(first + r) + static_cast<size_t>(g)]);
          for (int c = 0; c < C; ++c) {
            float* total = totals[r] + column + c * kLanes;
            put(total, multiply_add(to_floats(s[r][c]), scale, floats_at(total)));
          }
        }
      }
      prefetch.advance<kOnlyPass>(kSteps);
    }
    const float* scales = call.linear->scales + panel * kPanel;
    for (int r = 0; r < R; ++r) finish(call, panel, first + r, load(totals[r]) * load(scales), load(totals[r] + 16) * load(scales + 16));
  }
};

// --- nibbles -----------------------------------------------------------------------------------------------------------

// Sums of the products of 32 inputs: exact in 32 bits, or without VNNI in pairs of 16 bits.
#ifdef PL_DOTS
inline void add_nibbles(Ints& sum, Ints w, Ints x) { dot(sum, w, x); }
inline Ints to_int32(Ints sum) { return sum; }
#else
inline void add_nibbles(Ints& sum, Ints w, Ints x) { stay(sum = add_words(sum, multiply_bytes(w, x))); }
inline Ints to_int32(Ints sum) { return multiply_words(sum, all(0x00010001)); }
#endif

template <int R, bool kOnlyPass>
struct Int4Block {
  static constexpr int kMost = kMostNibbleRows, kNear = kNearRows, C = width_for(R);
  static constexpr size_t kSteps = kWordSum / 8;
  using Ahead = GroupPrefetch<kPanel / (C * kLanes), R <= kNear, kOnlyPass>;

  // The low nibbles of a step belong to its first four inputs, the high ones to the next four.
  static void add_inputs(const uint8_t* w, const uint8_t* x, size_t stride, Ints (&s)[R][C], Ahead& prefetch) {
    const auto product = [&](int r, int c, Ints weights, Ints inputs) { add_nibbles(s[r][c], weights, inputs); };
#pragma GCC unroll 4
    for (size_t k = 0; k < kSteps; ++k, w += kStepBytes, x += 8) {
      prefetch.step();
      each_product<R, C>([&](int c) { return both(line_of(w, c), all(0x0f0f0f0f)); }, [&](int r) { return four_bytes(x + stride * static_cast<size_t>(r)); }, product);
      each_product<R, C>([&](int c) { return both(upper_nibbles(line_of(w, c)), all(0x0f0f0f0f)); },
                         [&](int r) { return four_bytes(x + stride * static_cast<size_t>(r) + 4); }, product);
    }
  }

  static void run(const LinearCall& call, const uint8_t* w, int panel, int first, Prefetch prefetch) {
    alignas(64) float totals[R][kPanel] = {};
    const int group = call.linear->group;
    const size_t steps = static_cast<size_t>(group) / 8, stride = call.input.stride;
    const uint8_t* x = call.input.data + stride * static_cast<size_t>(first);
    for (int g = 0; g < call.linear->inputs / group; ++g, x += group) {
      const uint8_t* head = w;
      w += 4 * kPanel;
      for (int column = 0; column < kPanel; column += C * kLanes) {
        Ahead ahead(prefetch, column / (C * kLanes), steps);
        Ints exact[R][C];
        for (size_t step = 0; step < steps; step += kSteps) {
          Ints s[R][C] = {};
          add_inputs(w + step * kStepBytes + 4 * column, x + 8 * step, stride, s, ahead);
          for (int r = 0; r < R; ++r) for (int c = 0; c < C; ++c) exact[r][c] = step ? add(exact[r][c], to_int32(s[r][c])) : to_int32(s[r][c]);
        }
        for (int r = 0; r < R; ++r) add_group(call, first + r, g, head + 2 * column, exact[r], totals[r] + column);
      }
      w += steps * kStepBytes;
      prefetch.advance<kOnlyPass>(steps, 4 * kPanel);
    }
    for (int r = 0; r < R; ++r) finish(call, panel, first + r, load(totals[r]), load(totals[r] + 16));
  }

  static void add_group(const LinearCall& call, int row, int g, const uint8_t* head, const Ints (&exact)[C], float* total) {
    const Floats sum = every(static_cast<float>(sum_of(call.input, row, g)));
    const Floats scale = every(call.input.scales[call.input.scale_stride * static_cast<size_t>(row) +
                                                 static_cast<size_t>(g * call.linear->group / kActivationGroup)]);
    for (int c = 0; c < C; ++c, total += kLanes) {
      const Floats weight_scale = from_fp16(head + 2 * c * kLanes), low = from_fp16(head + 2 * (kPanel + c * kLanes));
      put(total, multiply_add(multiply_add(to_floats(exact[c]), weight_scale, times(sum, low)), scale, floats_at(total)));
    }
  }
};

// --- bf16 --------------------------------------------------------------------------------------------------------------

template <int R, bool kOnlyPass>
struct Bf16Block {
  static constexpr int kMost = kMostRows, kNear = kNearRows, C = width_for(R);
  static constexpr size_t kSteps = kInputMultiple / 2;
  using Ahead = GroupPrefetch<kPanel / (C * kLanes), R <= kNear, kOnlyPass>;

  static void add_inputs(const uint8_t* w, const float* x, size_t stride, Floats (&s)[R][C], Ahead prefetch) {
    const auto product = [&](int r, int c, Floats weights, Floats inputs) { add_product_to(s[r][c], inputs, weights); };
    for (size_t k = 0; k < kSteps; ++k, w += kStepBytes, x += 2) {
      prefetch.step();
      each_product<R, C>([&](int c) { return as_floats(to_upper_half(line_of(w, c))); }, [&](int r) { return every(x[stride * static_cast<size_t>(r)]); }, product);
      each_product<R, C>([&](int c) { return as_floats(both(line_of(w, c), all(static_cast<int>(0xffff0000u)))); },
                         [&](int r) { return every(x[stride * static_cast<size_t>(r) + 1]); }, product);
    }
  }

  static void run(const LinearCall& call, const uint8_t* w, int panel, int first, Prefetch prefetch) {
    alignas(64) float totals[R][kPanel] = {};
    const size_t stride = call.input.stride / sizeof(float);
    const float* x = reinterpret_cast<const float*>(call.input.data) + stride * static_cast<size_t>(first);
    for (int i = 0; i < call.linear->inputs; i += kInputMultiple, w += kSteps * kStepBytes, x += kInputMultiple) {
      for (int column = 0; column < kPanel; column += C * kLanes) {
        Floats s[R][C];
        for (int r = 0; r < R; ++r) for (int c = 0; c < C; ++c) s[r][c] = floats_at(totals[r] + column + c * kLanes);
        add_inputs(w + 4 * column, x, stride, s, Ahead(prefetch, column / (C * kLanes), kSteps));
        for (int r = 0; r < R; ++r) for (int c = 0; c < C; ++c) put(totals[r] + column + c * kLanes, s[r][c]);
      }
      prefetch.advance<kOnlyPass>(kSteps);
    }
    for (int r = 0; r < R; ++r) finish(call, panel, first + r, load(totals[r]), load(totals[r] + 16));
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
