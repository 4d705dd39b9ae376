// Sixteen floats (F16) and sixteen int32 (I16) as four NEON registers: the same operations in the same order as on x86
// (vec.h), with its maxima, minima and conversions of NaN and of numbers beyond int32.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace paceline {
namespace {

constexpr int kQueryBlock = 3;   // queries whose scores of 32 keys stay in registers
constexpr int kVectorBlock = 1;  // times 16 dimensions of the values are weighed together
constexpr int kStateBlock = 2;  // times 16 columns of a recurrent state

struct F16 { float32x4_t v[4]; };
struct I16 { int32x4_t v[4]; };
struct Mask { uint32x4_t v[4]; };

// The vector whose four parts are part(0) to part(3).
template <class V, class Part>
inline V four(Part part) {
  return {{part(0), part(1), part(2), part(3)}};
}

inline F16 set1(float x) { return four<F16>([=](int) { return vdupq_n_f32(x); }); }
inline F16 zero() { return set1(0.0f); }
inline F16 load(const float* p) { return four<F16>([=](int i) { return vld1q_f32(p + 4 * i); }); }
inline void store(float* p, F16 x) { for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.v[i]); }
inline void store_first(float* p, F16 x, int n) {
  float all[16];
  store(all, x);
  memcpy(p, all, static_cast<size_t>(n) * sizeof(float));
}
inline F16 operator+(F16 x, F16 y) { return four<F16>([&](int i) { return vaddq_f32(x.v[i], y.v[i]); }); }
inline F16 operator-(F16 x, F16 y) { return four<F16>([&](int i) { return vsubq_f32(x.v[i], y.v[i]); }); }
inline F16 operator*(F16 x, F16 y) { return four<F16>([&](int i) { return vmulq_f32(x.v[i], y.v[i]); }); }
inline F16 operator/(F16 x, F16 y) { return four<F16>([&](int i) { return vdivq_f32(x.v[i], y.v[i]); }); }
inline F16 fma(F16 x, F16 y, F16 z) { return four<F16>([&](int i) { return vfmaq_f32(z.v[i], x.v[i], y.v[i]); }); }
inline F16 max(F16 x, F16 y) { return four<F16>([&](int i) { return vbslq_f32(vcgtq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]); }); }
inline F16 min(F16 x, F16 y) { return four<F16>([&](int i) { return vbslq_f32(vcltq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]); }); }
inline F16 abs(F16 x) { return four<F16>([&](int i) { return vabsq_f32(x.v[i]); }); }
inline I16 size_bits(F16 x) { return four<I16>([&](int i) { return vandq_s32(vreinterpretq_s32_f32(x.v[i]), vdupq_n_s32(INT32_MAX)); }); }
inline I16 max(I16 x, I16 y) { return four<I16>([&](int i) { return vmaxq_s32(x.v[i], y.v[i]); }); }
inline I16 round_to_int(F16 x) {
  return four<I16>([&](int i) {
    return vbslq_s32(vcltq_f32(x.v[i], vdupq_n_f32(0x1p31f)), vcvtnq_s32_f32(x.v[i]), vdupq_n_s32(INT32_MIN));
  });
}
inline F16 to_float(I16 x) { return four<F16>([&](int i) { return vcvtq_f32_s32(x.v[i]); }); }
inline I16 iset1(int32_t x) { return four<I16>([=](int) { return vdupq_n_s32(x); }); }
inline I16 izero() { return iset1(0); }
inline I16 load(const int32_t* p) { return four<I16>([=](int i) { return vld1q_s32(p + 4 * i); }); }
inline void store(int32_t* p, I16 x) { for (int i = 0; i < 4; ++i) vst1q_s32(p + 4 * i, x.v[i]); }
inline I16 operator+(I16 x, I16 y) { return four<I16>([&](int i) { return vaddq_s32(x.v[i], y.v[i]); }); }
inline I16 operator-(I16 x, I16 y) { return four<I16>([&](int i) { return vsubq_s32(x.v[i], y.v[i]); }); }
inline I16 operator*(I16 x, I16 y) { return four<I16>([&](int i) { return vmulq_s32(x.v[i], y.v[i]); }); }
inline I16 operator^(I16 x, I16 y) { return four<I16>([&](int i) { return veorq_s32(x.v[i], y.v[i]); }); }
inline I16 operator&(I16 x, I16 y) { return four<I16>([&](int i) { return vandq_s32(x.v[i], y.v[i]); }); }
inline uint32x4_t bits_of(int32x4_t x) { return vreinterpretq_u32_s32(x); }
inline uint32x4_t bits_of(float32x4_t x) { return vreinterpretq_u32_f32(x); }
template <int N> inline I16 shift_right(I16 x) {
  return four<I16>([&](int i) { return vreinterpretq_s32_u32(vshrq_n_u32(bits_of(x.v[i]), N)); });
}
inline I16 sixteen_from(int32_t start) {
  int32_t all[16];
  for (int i = 0; i < 16; ++i) all[i] = start + i;
  return load(all);
}
inline F16 bits_as_float(I16 x) { return four<F16>([&](int i) { return vreinterpretq_f32_s32(x.v[i]); }); }
inline Mask below(F16 x, F16 y) { return four<Mask>([&](int i) { return vcltq_f32(x.v[i], y.v[i]); }); }
inline Mask at_most(F16 x, F16 y) { return four<Mask>([&](int i) { return vcleq_f32(x.v[i], y.v[i]); }); }
inline uint32_t lanes_of(Mask m) {
  const uint32_t weights[4] = {1, 2, 4, 8};
  uint32_t lanes = 0;
  for (int i = 0; i < 4; ++i) lanes |= vaddvq_u32(vandq_u32(m.v[i], vld1q_u32(weights))) << (4 * i);
  return lanes;
}
inline uint32_t lanes_at_least(F16 x, F16 y) { return lanes_of(at_most(y, x)); }
inline F16 select(Mask m, F16 yes, F16 no) { return four<F16>([&](int i) { return vbslq_f32(m.v[i], yes.v[i], no.v[i]); }); }
inline F16 only(Mask m, F16 x) { return select(m, x, zero()); }
inline I16 only(Mask m, I16 x) { return four<I16>([&](int i) { return vbslq_s32(m.v[i], x.v[i], vdupq_n_s32(0)); }); }
// Lanes whose index + start lies in [low, high).
inline Mask lanes_within(int start, int low, int high) {
  const I16 at = sixteen_from(start);
  return four<Mask>([&](int i) { return vandq_u32(vcgeq_s32(at.v[i], vdupq_n_s32(low)), vcltq_s32(at.v[i], vdupq_n_s32(high))); });
}
// Stores the elements whose lanes are set, one behind the other; up to sixteen elements are overwritten.
template <class V, class T>
inline void compress_lanes(T* p, V x, uint32_t lanes) {
  T all[16];
  store(all, x);
  for (; lanes; lanes &= lanes - 1) *p++ = all[__builtin_ctz(lanes)];
}
inline void compress(float* p, F16 x, uint32_t lanes) { compress_lanes(p, x, lanes & 0xffff); }
inline void compress(int32_t* p, I16 x, uint32_t lanes) { compress_lanes(p, x, lanes & 0xffff); }
inline F16 scale_by_power_of_two(F16 x, I16 n) {
  return four<F16>([&](int i) { return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x.v[i]), vshlq_n_s32(n.v[i], 23))); });
}
inline void store_int8(int8_t* p, I16 x) {
  const int16x8_t low = vcombine_s16(vmovn_s32(x.v[0]), vmovn_s32(x.v[1])), high = vcombine_s16(vmovn_s32(x.v[2]), vmovn_s32(x.v[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

inline uint32x4_t round_bf16_bits(float32x4_t x) {  // to nearest even, in the upper half of every lane
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits_of(x), 16), vdupq_n_u32(1));
  return vaddq_u32(bits_of(x), vaddq_u32(odd, vdupq_n_u32(0x7fff)));
}
inline F16 load_bf16(const uint16_t* p) {
  return four<F16>([=](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
}
inline void store_bf16(uint16_t* p, F16 x) { for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vshrn_n_u32(round_bf16_bits(x.v[i]), 16)); }
inline F16 through_bf16(F16 x) {
  return four<F16>([&](int i) { return vreinterpretq_f32_u32(vandq_u32(round_bf16_bits(x.v[i]), vdupq_n_u32(0xffff0000u))); });
}
inline F16 load_fp16(const uint16_t* p) {
  return four<F16>([=](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
inline I16 load_bytes(const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
  return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(low))),
           vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(high)))}};
}
inline I16 load_int8(const int8_t* p) {
  const int8x16_t bytes = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
  return {{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)), vmovl_s16(vget_high_s16(high))}};
}

// Four lines of four numbers become columns.
inline void transpose4(float32x4_t (&r)[4]) {
  const float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(r[0], r[1])), b = vreinterpretq_f64_f32(vtrn2q_f32(r[0], r[1]));
  const float64x2_t c = vreinterpretq_f64_f32(vtrn1q_f32(r[2], r[3])), d = vreinterpretq_f64_f32(vtrn2q_f32(r[2], r[3]));
  r[0] = vreinterpretq_f32_f64(vtrn1q_f64(a, c));
  r[1] = vreinterpretq_f32_f64(vtrn1q_f64(b, d));
  r[2] = vreinterpretq_f32_f64(vtrn2q_f64(a, c));
  r[3] = vreinterpretq_f32_f64(vtrn2q_f64(b, d));
}
// put(d, i, column): numbers d of the rows i to i + 3, for 16 rows of 16 numbers of 32 bits.
template <class T, class Put>
inline void transpose16(const T* const* rows, size_t offset, Put put) {
  for (int i = 0; i < 16; i += 4) {
    for (int d = 0; d < 16; d += 4) {
      float32x4_t r[4];
      for (int j = 0; j < 4; ++j) r[j] = vld1q_f32(reinterpret_cast<const float*>(rows[i + j] + offset) + d);
      transpose4(r);
      for (int j = 0; j < 4; ++j) put(static_cast<size_t>(d + j), i, r[j]);
    }
  }
}
// rows[i] points to 16 floats; out[out_stride * d + i] = rows[i][d].
inline void transpose_floats(const float* const* rows, size_t offset, float* out, size_t out_stride) {
  transpose16(rows, offset, [=](size_t d, int i, float32x4_t column) { vst1q_f32(out + d * out_stride + i, column); });
}
// 32 bf16 of 16 rows: pairs are transposed as one word, then split.
inline void transpose_bf16_pairs(const uint16_t* const* rows, size_t offset, float* out, size_t out_stride) {
  transpose16(rows, offset, [=](size_t d, int i, float32x4_t column) {
    float* even = out + 2 * d * out_stride + i;
    vst1q_f32(even, vreinterpretq_f32_u32(vshlq_n_u32(bits_of(column), 16)));
    vst1q_f32(even + out_stride, vreinterpretq_f32_u32(vandq_u32(bits_of(column), vdupq_n_u32(0xffff0000u))));
  });
}
// 64 int8 of 16 rows: quads are transposed as one word, then split.
inline void transpose_int8_quads(const int8_t* const* rows, size_t offset, float* out, size_t out_stride) {
  transpose16(rows, offset, [=](size_t d, int i, float32x4_t column) {
    const int32x4_t quad = vreinterpretq_s32_f32(column);
    float* to = out + 4 * d * out_stride + i;
    vst1q_f32(to, vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(quad, 24), 24)));
    vst1q_f32(to + out_stride, vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(quad, 16), 24)));
    vst1q_f32(to + 2 * out_stride, vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(quad, 8), 24)));
    vst1q_f32(to + 3 * out_stride, vcvtq_f32_s32(vshrq_n_s32(quad, 24)));
  });
}

// In the order of x86: halves, quarters, then elements 0 + 2 and 1 + 3.
template <class V, class Join>
inline V join_parts(const V (&v)[4], Join join) {
  return join(join(v[0], v[2]), join(v[1], v[3]));
}
inline float sum(F16 x) {
  const float32x4_t q = join_parts(x.v, [](float32x4_t a, float32x4_t b) { return vaddq_f32(a, b); });
  const float32x2_t two = vadd_f32(vget_low_f32(q), vget_high_f32(q));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float largest(F16 x) {
  const auto larger = [](float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); };
  float32x4_t q = join_parts(x.v, larger);
  q = larger(q, vextq_f32(q, q, 2));
  const float a = vgetq_lane_f32(q, 0), b = vgetq_lane_f32(q, 1);
  return a > b ? a : b;
}
inline int32_t largest(I16 x) {
  return vmaxvq_s32(join_parts(x.v, [](int32x4_t a, int32x4_t b) { return vmaxq_s32(a, b); }));
}
inline int32_t sum(I16 x) {
  return vaddvq_s32(join_parts(x.v, [](int32x4_t a, int32x4_t b) { return vaddq_s32(a, b); }));
}

}  // namespace
}  // namespace paceline
