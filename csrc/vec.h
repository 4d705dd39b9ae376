// Sixteen floats (F16) and sixteen int32 (I16), as one AVX-512 register, two AVX2 ones or four of NEON (vec_neon.h): the
// same operations in the same order, so that all kernels but the matrix products give the same bits on all. Everything is
// in an unnamed namespace: if the linker merged an inline function across files compiled for different instruction sets,
// the older CPU would crash.
#pragma once

#if defined(__aarch64__)
#include "vec_neon.h"
#else
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace paceline {
namespace {

#if defined(__AVX512F__) && !defined(PL_HALF_VECTORS)

constexpr int kQueryBlock = 6;   // queries whose scores of 32 keys stay in registers
constexpr int kVectorBlock = 4;  // times 16 dimensions of the values are weighed together
constexpr int kStateBlock = 4;  // times 16 columns of a recurrent state

struct F16 { __m512 v; };
struct I16 { __m512i v; };
struct Mask { __mmask16 v; };

inline F16 zero() { return {_mm512_setzero_ps()}; }
inline F16 set1(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F16 x) { _mm512_storeu_ps(p, x.v); }
inline void store_first(float* p, F16 x, int n) { _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), x.v); }
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F16 abs(F16 a) { return {_mm512_abs_ps(a.v)}; }
inline I16 size_bits(F16 a) { return {_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(INT32_MAX))}; }
inline I16 max(I16 a, I16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline I16 round_to_int(F16 a) { return {_mm512_cvtps_epi32(a.v)}; }
inline F16 to_float(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I16 operator+(I16 a, I16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I16 operator-(I16 a, I16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline I16 operator*(I16 a, I16 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline I16 operator^(I16 a, I16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline I16 operator&(I16 a, I16 b) { return {_mm512_and_si512(a.v, b.v)}; }
inline I16 load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store(int32_t* p, I16 x) { _mm512_storeu_si512(p, x.v); }
template <int N> inline I16 shift_right(I16 a) { return {_mm512_srli_epi32(a.v, N)}; }
inline I16 sixteen_from(int32_t start) {
  return {_mm512_add_epi32(_mm512_set1_epi32(start), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15))};
}
inline F16 bits_as_float(I16 a) { return {_mm512_castsi512_ps(a.v)}; }
inline uint32_t lanes_at_least(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
inline Mask below(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
inline Mask at_most(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
inline uint32_t lanes_of(Mask m) { return m.v; }
inline F16 only(Mask m, F16 x) { return {_mm512_maskz_mov_ps(m.v, x.v)}; }
inline I16 only(Mask m, I16 x) { return {_mm512_maskz_mov_epi32(m.v, x.v)}; }
// Stores the elements whose lanes are set, one behind the other; up to sixteen elements are overwritten.
inline void compress(float* p, F16 x, uint32_t lanes) { _mm512_storeu_ps(p, _mm512_maskz_compress_ps(static_cast<__mmask16>(lanes), x.v)); }
inline void compress(int32_t* p, I16 x, uint32_t lanes) {
  _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(static_cast<__mmask16>(lanes), x.v));
}
inline I16 izero() { return {_mm512_setzero_si512()}; }
inline I16 iset1(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline F16 scale_by_power_of_two(F16 x, I16 n) {
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x.v), _mm512_slli_epi32(n.v, 23)))};
}
inline void store_int8(int8_t* p, I16 x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x.v)); }
// Lanes whose index + start lies in [low, high).
inline Mask lanes_within(int start, int low, int high) {
  const __m512i at = sixteen_from(start).v;
  return {_kand_mask16(_mm512_cmpge_epi32_mask(at, _mm512_set1_epi32(low)), _mm512_cmplt_epi32_mask(at, _mm512_set1_epi32(high)))};
}
inline F16 select(Mask m, F16 yes, F16 no) { return {_mm512_mask_blend_ps(m.v, no.v, yes.v)}; }

inline __m512i round_bf16_bits(__m512 x) {  // to nearest even, in the upper half of every lane
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
}
inline F16 load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16))};
}
inline void store_bf16(uint16_t* p, F16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_bf16_bits(x.v), 16)));
}
inline F16 through_bf16(F16 x) {
  return {_mm512_castsi512_ps(_mm512_and_si512(round_bf16_bits(x.v), _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
inline F16 load_fp16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline I16 load_bytes(const uint8_t* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
inline I16 load_int8(const int8_t* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }

inline __m256 lower(F16 x) { return _mm512_castps512_ps256(x.v); }
inline __m256 upper(F16 x) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x.v), 1)); }
inline __m256i lower(I16 x) { return _mm512_castsi512_si256(x.v); }
inline __m256i upper(I16 x) { return _mm512_extracti64x4_epi64(x.v, 1); }

// rows[i] points to 16 floats; out[16 * d + i] = rows[i][d].
inline void transpose16(__m512* r) {
  __m512 t[16];
  for (int i = 0; i < 16; i += 4) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    t[i + 2] = _mm512_unpacklo_ps(r[i + 2], r[i + 3]);
    t[i + 3] = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
  }
}
inline void transpose_floats(const float* const* rows, size_t offset, float* out, size_t out_stride) {
  __m512 r[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(rows[i] + offset);
  transpose16(r);
  for (int d = 0; d < 16; ++d) _mm512_storeu_ps(out + static_cast<size_t>(d) * out_stride, r[d]);
}
// 32 bf16 of 16 rows: pairs are transposed as one word, then split.
inline void transpose_bf16_pairs(const uint16_t* const* rows, size_t offset, float* out, size_t out_stride) {
  __m512 r[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(reinterpret_cast<const float*>(rows[i] + offset));
  transpose16(r);
  for (int d = 0; d < 16; ++d) {
    const __m512i pair = _mm512_castps_si512(r[d]);
    float* even = out + static_cast<size_t>(2 * d) * out_stride;
    _mm512_storeu_ps(even, _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)));
    _mm512_storeu_ps(even + out_stride, _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))));
  }
}

// 64 int8 of 16 rows: quads are transposed as one word, then split.
inline void transpose_int8_quads(const int8_t* const* rows, size_t offset, float* out, size_t out_stride) {
  __m512 r[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(reinterpret_cast<const float*>(rows[i] + offset));
  transpose16(r);
  for (int d = 0; d < 16; ++d) {
    const __m512i quad = _mm512_castps_si512(r[d]);
    float* to = out + static_cast<size_t>(4 * d) * out_stride;
    _mm512_storeu_ps(to, _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(quad, 24), 24)));
    _mm512_storeu_ps(to + out_stride, _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(quad, 16), 24)));
    _mm512_storeu_ps(to + 2 * out_stride, _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(quad, 8), 24)));
    _mm512_storeu_ps(to + 3 * out_stride, _mm512_cvtepi32_ps(_mm512_srai_epi32(quad, 24)));
  }
}

#else  // AVX2

constexpr int kQueryBlock = 3;  // a fourth query's scores of 32 keys would not stay in registers
constexpr int kVectorBlock = 1;
constexpr int kStateBlock = 2;

struct F16 { __m256 a, b; };
struct I16 { __m256i a, b; };
struct Mask { __m256 a, b; };

inline F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F16 x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
inline void store_first(float* p, F16 x, int n) {
  float all[16];
  store(all, x);
  memcpy(p, all, static_cast<size_t>(n) * sizeof(float));
}
inline F16 operator+(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F16 operator-(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F16 operator*(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F16 operator/(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F16 fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F16 max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F16 min(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F16 abs(F16 x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline I16 size_bits(F16 x) {
  const __m256i all = _mm256_set1_epi32(INT32_MAX);
  return {_mm256_and_si256(_mm256_castps_si256(x.a), all), _mm256_and_si256(_mm256_castps_si256(x.b), all)};
}
inline I16 max(I16 x, I16 y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
inline I16 round_to_int(F16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F16 to_float(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I16 operator+(I16 x, I16 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I16 operator-(I16 x, I16 y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline I16 operator*(I16 x, I16 y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
inline I16 operator^(I16 x, I16 y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
inline I16 operator&(I16 x, I16 y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline I16 load(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline void store(int32_t* p, I16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
}
template <int N> inline I16 shift_right(I16 x) { return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)}; }
inline __m256i eight_from(int32_t start) { return _mm256_add_epi32(_mm256_set1_epi32(start), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }
inline I16 sixteen_from(int32_t start) { return {eight_from(start), eight_from(start + 8)}; }
inline F16 bits_as_float(I16 x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline uint32_t lanes_at_least(F16 x, F16 y) {
  const int a = _mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ)), b = _mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ));
  return static_cast<uint32_t>(a | b << 8);
}
inline Mask below(F16 x, F16 y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)}; }
inline Mask at_most(F16 x, F16 y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_LE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LE_OQ)}; }
inline uint32_t lanes_of(Mask m) { return static_cast<uint32_t>(_mm256_movemask_ps(m.a) | _mm256_movemask_ps(m.b) << 8); }
inline F16 only(Mask m, F16 x) { return {_mm256_and_ps(m.a, x.a), _mm256_and_ps(m.b, x.b)}; }
inline I16 only(Mask m, I16 x) {
  return {_mm256_and_si256(_mm256_castps_si256(m.a), x.a), _mm256_and_si256(_mm256_castps_si256(m.b), x.b)};
}
struct Compressions {  // for eight lanes: per set of lanes, the indices of the set ones first
  int32_t order[256][8];
  constexpr Compressions() : order() {
    for (int lanes = 0; lanes < 256; ++lanes) {
      for (int lane = 0, next = 0; lane < 8; ++lane) {
        if (lanes >> lane & 1) order[lanes][next++] = lane;
      }
    }
  }
};
constexpr Compressions kCompressions;
inline __m256i order_of(uint32_t lanes) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kCompressions.order[lanes & 0xff])); }
inline void compress(float* p, F16 x, uint32_t lanes) {
  _mm256_storeu_ps(p, _mm256_permutevar8x32_ps(x.a, order_of(lanes)));
  _mm256_storeu_ps(p + __builtin_popcount(lanes & 0xff), _mm256_permutevar8x32_ps(x.b, order_of(lanes >> 8)));
}
inline void compress(int32_t* p, I16 x, uint32_t lanes) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(x.a, order_of(lanes)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + __builtin_popcount(lanes & 0xff)), _mm256_permutevar8x32_epi32(x.b, order_of(lanes >> 8)));
}
inline I16 izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I16 iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline __m256 scale_half(__m256 x, __m256i n) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(n, 23)));
}
inline F16 scale_by_power_of_two(F16 x, I16 n) { return {scale_half(x.a, n.a), scale_half(x.b, n.b)}; }
inline void store_int8(int8_t* p, I16 x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
inline __m256 within_half(int start, int low, int high) {
  const __m256i at = eight_from(start);
  const __m256i yes = _mm256_and_si256(_mm256_cmpgt_epi32(at, _mm256_set1_epi32(low - 1)), _mm256_cmpgt_epi32(_mm256_set1_epi32(high), at));
  return _mm256_castsi256_ps(yes);
}
inline Mask lanes_within(int start, int low, int high) { return {within_half(start, low, high), within_half(start + 8, low, high)}; }
inline F16 select(Mask m, F16 yes, F16 no) { return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)}; }

inline __m256i round_bf16_bits(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}
inline __m256 load_bf16_half(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
inline F16 load_bf16(const uint16_t* p) { return {load_bf16_half(p), load_bf16_half(p + 8)}; }
inline void store_bf16(uint16_t* p, F16 x) {
  const __m256i a = _mm256_srli_epi32(round_bf16_bits(x.a), 16), b = _mm256_srli_epi32(round_bf16_bits(x.b), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8));
}
inline __m256 through_bf16_half(__m256 x) {
  return _mm256_castsi256_ps(_mm256_and_si256(round_bf16_bits(x), _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline F16 through_bf16(F16 x) { return {through_bf16_half(x.a), through_bf16_half(x.b)}; }
inline F16 load_fp16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline I16 load_bytes(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
inline I16 load_int8(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}

inline __m256 lower(F16 x) { return x.a; }
inline __m256 upper(F16 x) { return x.b; }
inline __m256i lower(I16 x) { return x.a; }
inline __m256i upper(I16 x) { return x.b; }

// Eight lines of eight numbers become columns.
inline void transpose8(__m256 (&r)[8]) {
  __m256 t[8];
  for (int i = 0; i < 8; i += 4) {
    const __m256 a = _mm256_unpacklo_ps(r[i], r[i + 1]), b = _mm256_unpackhi_ps(r[i], r[i + 1]);
    const __m256 c = _mm256_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
    t[i] = _mm256_shuffle_ps(a, c, 0x44);
    t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
    t[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
    t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
  }
}
// put(d, i, column): numbers d of the rows i to i + 7, for 16 rows of 16 numbers of 32 bits.
template <class T, class Put>
inline void transpose16(const T* const* rows, size_t offset, Put put) {
  for (int i = 0; i < 16; i += 8) {
    for (size_t d = 0; d < 16; d += 8) {
      __m256 r[8];
      for (int j = 0; j < 8; ++j) r[j] = _mm256_loadu_ps(reinterpret_cast<const float*>(rows[i + j] + offset) + d);
      transpose8(r);
      for (size_t j = 0; j < 8; ++j) put(d + j, i, r[j]);
    }
  }
}
inline void transpose_floats(const float* const* rows, size_t offset, float* out, size_t out_stride) {
  transpose16(rows, offset, [=](size_t d, int i, __m256 column) { _mm256_storeu_ps(out + d * out_stride + i, column); });
}
// 32 bf16 of 16 rows: pairs are transposed as one word, then split.
inline void transpose_bf16_pairs(const uint16_t* const* rows, size_t offset, float* out, size_t out_stride) {
  transpose16(rows, offset, [=](size_t d, int i, __m256 column) {
    const __m256i pair = _mm256_castps_si256(column);
    float* even = out + 2 * d * out_stride + i;
    _mm256_storeu_ps(even, _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16)));
    _mm256_storeu_ps(even + out_stride, _mm256_castsi256_ps(_mm256_and_si256(pair, _mm256_set1_epi32(static_cast<int>(0xffff0000u)))));
  });
}

// 64 int8 of 16 rows: quads are transposed as one word, then split.
inline void transpose_int8_quads(const int8_t* const* rows, size_t offset, float* out, size_t out_stride) {
  transpose16(rows, offset, [=](size_t d, int i, __m256 column) {
    const __m256i quad = _mm256_castps_si256(column);
    float* to = out + 4 * d * out_stride + i;
    _mm256_storeu_ps(to, _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(quad, 24), 24)));
    _mm256_storeu_ps(to + out_stride, _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(quad, 16), 24)));
    _mm256_storeu_ps(to + 2 * out_stride, _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(quad, 8), 24)));
    _mm256_storeu_ps(to + 3 * out_stride, _mm256_cvtepi32_ps(_mm256_srai_epi32(quad, 24)));
  });
}

#endif

inline float sum(F16 x) {
  const __m256 eight = _mm256_add_ps(lower(x), upper(x));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float largest(F16 x) {
  const __m256 eight = _mm256_max_ps(lower(x), upper(x));
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
inline int32_t largest(I16 x) {
  const __m256i eight = _mm256_max_epi32(lower(x), upper(x));
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
inline int32_t sum(I16 x) {
  const __m256i eight = _mm256_add_epi32(lower(x), upper(x));
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

}  // namespace
}  // namespace paceline
#endif

namespace paceline {
namespace {

// e^x to about 2 ulp (Cephes); exactly 1 at 0; x is clamped to where the result is a normal number. NaN stays NaN: max and
// min give their second argument where one is NaN.
inline F16 exponential(F16 x) {
  x = min(set1(88.0f), max(set1(-87.33654f), x));
  const I16 n = round_to_int(x * set1(1.44269504088896341f));
  const F16 whole = to_float(n);
  F16 r = fma(whole, set1(-0.693359375f), x);
  r = fma(whole, set1(2.12194440e-4f), r);
  F16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  return scale_by_power_of_two(fma(p, r * r, r) + set1(1.0f), n);
}

inline F16 sigmoid(F16 x) { return set1(1.0f) / (set1(1.0f) + exponential(zero() - x)); }
inline F16 silu(F16 x) { return x / (set1(1.0f) + exponential(zero() - x)); }

}  // namespace
}  // namespace paceline
