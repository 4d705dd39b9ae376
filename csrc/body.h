// All operations except the matrix products: written once over F16, compiled once per instruction set.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace paceline {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();
constexpr float kNaN = __builtin_nanf("");
constexpr float kSmallestAmplitude = 1e-30f;  // rows below it count as zero: 127 / amplitude must stay finite

// Inputs to quantise: values as they are, or after a norm, which is never written out. one() has the bits of at().
struct Plain {
  const float* x;
  F16 at(int i) const { return load(x + i); }
  float one(int i) const { return x[i]; }
};
struct Normed {
  const float* x;
  const float* weight;
  float inverse;
  F16 at(int i) const { return load(x + i) * set1(inverse) * load(weight + i); }
  float one(int i) const { return x[i] * inverse * weight[i]; }
};
struct Centred {
  const float *x, *weight, *bias;
  float mean, inverse;
  F16 at(int i) const { return fma((load(x + i) - set1(mean)) * set1(inverse), load(weight + i), load(bias + i)); }
  float one(int i) const { return __builtin_fmaf((x[i] - mean) * inverse, weight[i], bias[i]); }
};

// The same in the order of a consumer's inputs.
template <class Values>
struct Ordered {
  Values values;
  const int32_t* order;
  F16 at(int i) const {
    alignas(64) float taken[16];
    for (int j = 0; j < 16; ++j) taken[j] = values.one(order[i + j]);
    return load(taken);
  }
};

inline bool finite(float x) { return x - x == 0.0f; }

// The largest |x| of a group. Read as integers, sizes are in the same order, and NaN and infinity come last.
template <int kVectors>
inline float amplitude_of(const F16 (&v)[kVectors]) {
  I16 top = izero();
  for (int i = 0; i < kVectors; ++i) top = max(top, size_bits(v[i]));
  const int32_t bits = largest(top);
  float amplitude;
  memcpy(&amplitude, &bits, sizeof amplitude);
  return amplitude;
}

// Quantises one group of 64 and returns its scale: NaN if a value is NaN or infinite, so that the row's outputs are NaN. Sums
// are written per `span` values (32 or 64), times `factor`.
template <class Values>
inline float quantise_group(const Values& values, int start, int8_t* out, int32_t* sums, int span, int factor) {
  constexpr int kVectors = kActivationGroup / 16;
  F16 v[kVectors];
  for (int i = 0; i < kVectors; ++i) v[i] = values.at(start + 16 * i);
  const float amplitude = amplitude_of(v);
  if (!finite(amplitude)) {
    memset(out, 0, kActivationGroup);
    memset(sums, 0, sizeof(int32_t) * static_cast<size_t>(kActivationGroup / span));
    return kNaN;
  }
  const bool silent = !(amplitude > kSmallestAmplitude);
  const F16 inverse = set1(silent ? 0.0f : 127.0f / amplitude);
  for (int first = 0; first < kVectors; first += span / 16) {
    I16 total = izero();
    for (int i = first; i < first + span / 16; ++i) {
      const I16 q = round_to_int(v[i] * inverse);
      store_int8(out + 16 * i, q);
      total = total + q;
    }
    *sums++ = factor * sum(total);
  }
  return silent ? 0.0f : amplitude / 127.0f;
}

template <class Values>
inline void quantise_int8(const Values& values, const Linear& consumer, const Activations& to, int row) {
  int8_t* out = reinterpret_cast<int8_t*>(to.data + to.stride * static_cast<size_t>(row));
  int32_t* sums = to.sums + to.sum_stride * static_cast<size_t>(row);
  float* scales = to.scales + to.scale_stride * static_cast<size_t>(row);
  const bool int4 = consumer.format == kInt4;
  const int span = int4 ? consumer.group : kActivationGroup;
  for (int i = 0; i < consumer.inputs; i += kActivationGroup) {
    *scales++ = quantise_group(values, i, out + i, sums + i / span, span, int4 ? 1 : -kInt8Zero);
  }
}

template <class Values>
inline void quantise_bf16(const Values& values, int inputs, const Activations& to, int row) {
  uint8_t* out = to.data + to.stride * static_cast<size_t>(row);
  for (int i = 0; i < inputs; i += 16) {
#ifdef PL_FP32_ACTIVATIONS
    store(reinterpret_cast<float*>(out) + i, through_bf16(values.at(i)));
#else
    store_bf16(reinterpret_cast<uint16_t*>(out) + i, values.at(i));
#endif
  }
}

template <class Values>
inline void quantise_row(const Values& values, const Linear& consumer, const Activations& to, int row) {
  if (consumer.format == kBf16) quantise_bf16(values, consumer.inputs, to, row);
  else if (consumer.order) quantise_int8(Ordered<Values>{values, consumer.order}, consumer, to, row);
  else quantise_int8(values, consumer, to, row);
}

// What a norm does to a row: (x - mean) * inverse. An RMS norm has no mean.
struct Level {
  float mean, inverse;
};

inline Level level_of(const float* x, int padded_width, const Norm& norm) {
  F16 squares = zero(), total = zero();
  const float width = static_cast<float>(norm.width);
  float mean = 0.0f;
  if (norm.bias) {
    for (int i = 0; i < padded_width; i += 16) total = total + load(x + i);
    mean = sum(total) / width;
    for (int i = 0; i < norm.width; i += 16) {
      const F16 off = select(lanes_within(i, 0, norm.width), load(x + i) - set1(mean), zero());
      squares = fma(off, off, squares);
    }
  } else {
    for (int i = 0; i < padded_width; i += 16) squares = fma(load(x + i), load(x + i), squares);
  }
  return {mean, 1.0f / __builtin_sqrtf(sum(squares) / width + norm.epsilon)};
}

inline void quantise(const float* x, const Norm* norm, const Linear& consumer, const Activations& to, Range rows) {
  constexpr int kTogether = 8;  // rows whose sums of squares, each one chain of additions, overlap in the CPU
  const size_t inputs = static_cast<size_t>(consumer.inputs);
  if (!norm) {
    for (int row = rows.first; row < rows.last; ++row) quantise_row(Plain{x + inputs * static_cast<size_t>(row)}, consumer, to, row);
    return;
  }
  for (int start = rows.first; start < rows.last; start += kTogether) {
    const int end = start + kTogether < rows.last ? start + kTogether : rows.last;
    Level levels[kTogether];
    for (int row = start; row < end; ++row) levels[row - start] = level_of(x + inputs * static_cast<size_t>(row), consumer.inputs, *norm);
    for (int row = start; row < end; ++row) {
      const float* from = x + inputs * static_cast<size_t>(row);
      const Level level = levels[row - start];
      if (norm->bias) quantise_row(Centred{from, norm->weight, norm->bias, level.mean, level.inverse}, consumer, to, row);
      else quantise_row(Normed{from, norm->weight, level.inverse}, consumer, to, row);
    }
  }
}

inline void apply_norm(const float* x, const Norm& norm, int padded_width, float* out) {
  const Level level = level_of(x, padded_width, norm);
  const auto write = [&](const auto& values) {
    for (int i = 0; i < padded_width; i += 16) store(out + i, values.at(i));
  };
  if (norm.bias) write(Centred{x, norm.weight, norm.bias, level.mean, level.inverse});
  else write(Normed{x, norm.weight, level.inverse});
}

inline void rotate(float* x, const float* cosine, const float* sine, int half) {
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    const F16 a = load(x + i), b = load(x + half + i), c = load(cosine + i), s = load(sine + i);
    store(x + i, a * c - b * s);
    store(x + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cosine[i] - b * sine[i];
    x[half + i] = b * cosine[i] + a * sine[i];
  }
}

// Keys or values of one row and head. The positions of a page lie side by side, `stride` elements apart; a run of positions
// that begins at a multiple of 16 and has 16 at most is in one page.
template <class T>
struct PagedVectors {
  const T* first;  // the head's vectors in page 0
  const int32_t* pages;
  size_t page_stride, stride;
  const T* at(int64_t position) const {
    const size_t i = static_cast<size_t>(position), page = static_cast<size_t>(pages[i / kPagePositions]);
    return first + page * page_stride + i % kPagePositions * stride;
  }
};

template <class T>
inline PagedVectors<T> vectors_of(const Attention& a, const CacheVectors& v, RowHead of) {
  return {reinterpret_cast<const T*>(v.data) + of.kv_head * v.head_stride, v.pages + static_cast<size_t>(of.row) * a.blocks,
          static_cast<size_t>(v.page_stride), static_cast<size_t>(v.position_stride)};
}

// Rounds a vector to int8 by its own scale alone, so that no other token changes its bits, and stores both. A vector that
// is not finite gets the scale NaN.
inline void store_scaled(const float* x, int dim, int8_t* out) {
  I16 top = izero();
  for (int i = 0; i < dim; i += 16) top = max(top, size_bits(load(x + i)));
  const int32_t bits = largest(top);
  float amplitude;
  memcpy(&amplitude, &bits, sizeof amplitude);
  const bool loud = finite(amplitude) && amplitude > kSmallestAmplitude;
  const F16 inverse = set1(loud ? 127.0f / amplitude : 0.0f);
  for (int i = 0; i < dim; i += 16) store_int8(out + i, loud ? round_to_int(load(x + i) * inverse) : izero());
  const float scale = loud ? amplitude / 127.0f : finite(amplitude) ? 0.0f : kNaN;
  memcpy(out + dim, &scale, sizeof scale);
}

// Where a token's vector lies in the cache.
struct CachePlace {
  int64_t row, slot;
  int head;
};

inline void write_cache(const Attention& a, const CacheVectors& v, const CachePlace& to, const float* x, int dim) {
  const int64_t page = v.pages[static_cast<size_t>(to.row) * a.blocks + static_cast<size_t>(to.slot / kPagePositions)];
  const int64_t offset = page * v.page_stride + to.head * v.head_stride + to.slot % kPagePositions * v.position_stride;
  if (a.element == kCacheInt8) return store_scaled(x, dim, reinterpret_cast<int8_t*>(v.data) + offset);
  for (int i = 0; i < dim; i += 16) {
    if (a.element == kCacheBf16) store_bf16(reinterpret_cast<uint16_t*>(v.data) + offset + i, load(x + i));
    else store(reinterpret_cast<float*>(v.data) + offset + i, load(x + i));
  }
}

inline void multiply(float* x, const float* by, int dim) {
  for (int i = 0; i < dim; i += 16) store(x + i, load(x + i) * load(by + i));
}
inline void divide(float* x, const float* by, int dim) {
  for (int i = 0; i < dim; i += 16) store(x + i, load(x + i) / load(by + i));
}

inline void rotate_and_write(const Attention& a, const Rotary& rotary, int token, int64_t row) {
  float* q = a.qkv + a.qkv_stride * static_cast<size_t>(token);
  float* k = q + static_cast<size_t>(a.heads) * static_cast<size_t>(a.dim);
  float* v = k + static_cast<size_t>(a.kv_heads) * static_cast<size_t>(a.dim);
  const int64_t position = a.positions[token];
  const int64_t angle = position < rotary.positions ? position : rotary.positions - 1;  // padding: its result is not used
  const float* cosine = rotary.cosine + angle * rotary.half;
  const float* sine = rotary.sine + angle * rotary.half;
  const F16 scale = set1(a.scale);
  const bool each = !a.norm_all;
  if (a.norm_all && a.q_norm) apply_norm(q, Norm{a.q_norm, a.heads * a.dim, a.epsilon}, a.heads * a.dim, q);
  if (a.norm_all && a.k_norm) apply_norm(k, Norm{a.k_norm, a.kv_heads * a.dim, a.epsilon}, a.kv_heads * a.dim, k);
  const auto turn = [&](float* x, const float* weight) {
    if (weight && each && !a.norm_after) apply_norm(x, Norm{weight, a.dim, a.epsilon}, a.dim, x);
    rotate(x, cosine, sine, rotary.half);
    if (weight && each && a.norm_after) apply_norm(x, Norm{weight, a.dim, a.epsilon}, a.dim, x);
  };
  for (int head = 0; head < a.heads; ++head, q += a.dim) {
    turn(q, a.q_norm);
    for (int i = 0; i < a.dim; i += 16) store(q + i, load(q + i) * scale);
    if (a.balance) multiply(q, a.balance + head / (a.heads / a.kv_heads) * a.dim, a.dim);
  }
  const int64_t wanted = a.slots ? a.slots[token] : position;
  const int64_t slot = wanted < a.capacity ? wanted : a.capacity;
  for (int head = 0; head < a.kv_heads; ++head, k += a.dim, v += a.value_dim) {
    turn(k, a.k_norm);
    if (a.balance) divide(k, a.balance + head * a.dim, a.dim);
    if (a.v_norm) apply_norm(v, Norm{a.v_norm, a.value_dim, a.epsilon}, a.value_dim, v);
    write_cache(a, a.keys, {row, slot, head}, k, a.dim);
    if (a.values.data) write_cache(a, a.values, {row, slot, head}, v, a.value_dim);
  }
}

// --- attention
// ---------------------------------------------------------------------------------------------------------
// Per query and block of 256 keys: scores, their maximum, exponentials, weighted values, all from zero; then the block
// is merged into the query's running result. Blocks are aligned to absolute positions and merged in order, so neither
// the number of queries nor the division of the work changes a bit. A hidden key has weight exactly zero, and adding
// zero changes no bit. The cache is read from memory in many short pieces: values are prefetched while keys are scored,
// the next keys while values are weighed.

struct Partial {  // running result of one query
  float top, total;
};

struct Query {
  const float* q;
  float* out;
  int low, high;      // visible keys
  const float* gate;  // of the output, or null
  Partial start;      // the head's sink
};

template <int Q, int V>
inline void score_tile(const Query* queries, const float* keys, int dim, float* scores) {
  F16 s[Q][V];
  for (int i = 0; i < Q; ++i) for (int v = 0; v < V; ++v) s[i][v] = zero();
  for (int d = 0; d < dim; ++d) {
    F16 k[V];
    for (int v = 0; v < V; ++v) k[v] = load(keys + static_cast<size_t>(d) * 32 + 16 * v);
    for (int i = 0; i < Q; ++i) {
      const F16 q = set1(queries[i].q[d]);
      for (int v = 0; v < V; ++v) s[i][v] = fma(q, k[v], s[i][v]);
    }
  }
  for (int i = 0; i < Q; ++i) for (int v = 0; v < V; ++v) store(scores + i * kKeyBlock + 16 * v, s[i][v]);
}

using ScoreTile = void (*)(const Query*, const float*, int, float*);

template <int V>
inline ScoreTile score_function(int queries) {
  static constexpr ScoreTile table[] = {score_tile<1, V>, score_tile<2, V>, score_tile<3, V>,
                                        score_tile<4, V>, score_tile<5, V>, score_tile<6, V>};
  return table[queries - 1];
}

template <class T> inline F16 load_cached(const T* p);
template <> inline F16 load_cached<float>(const float* p) { return load(p); }
template <> inline F16 load_cached<uint16_t>(const uint16_t* p) { return load_bf16(p); }
template <> inline F16 load_cached<int8_t>(const int8_t* p) { return to_float(load_int8(p)); }

template <class T> constexpr bool kScaled = false;  // whether a vector's scale lies behind it
template <> constexpr bool kScaled<int8_t> = true;

inline float scale_behind(const int8_t* vector, int dim) {
  float scale;
  memcpy(&scale, vector + dim, sizeof scale);
  return scale;
}

inline void transpose_keys(const float* const* rows, int dim, float* out) {
  for (int d = 0; d < dim; d += 16) transpose_floats(rows, d, out + static_cast<size_t>(d) * 32, 32);
}
template <class T>
inline void transpose_rest(const T* const* rows, int first, int dim, float* out) {
  float wide[16][16];
  const float* wide_rows[16];
  for (int d = first; d < dim; d += 16) {
    for (int i = 0; i < 16; ++i) {
      store(wide[i], load_cached<T>(rows[i] + d));
      wide_rows[i] = wide[i];
    }
    transpose_floats(wide_rows, 0, out + static_cast<size_t>(d) * 32, 32);
  }
}
inline void transpose_keys(const uint16_t* const* rows, int dim, float* out) {
  int d = 0;
  for (; d + 32 <= dim; d += 32) transpose_bf16_pairs(rows, d, out + static_cast<size_t>(d) * 32, 32);
  transpose_rest(rows, d, dim, out);
}
// Elements without their scales, which the scores are multiplied by.
inline void transpose_keys(const int8_t* const* rows, int dim, float* out) {
  int d = 0;
  for (; d + 64 <= dim; d += 64) transpose_int8_quads(rows, d, out + static_cast<size_t>(d) * 32, 32);
  transpose_rest(rows, d, dim, out);
}

inline void prefetch(const void* from, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i);
}

// The slot of a key on a tree token's path; the key itself or any slot of the path for keys beyond what the token sees.
inline int64_t slot_of(const Path& path, int64_t key) {
  return key < path.from ? key : path.slots[(key < path.last ? key : path.last) - path.from];
}

// Rare cases are separate functions, so that the common loops stay fast.
template <class T>
__attribute__((noinline)) void transpose_along(const PagedVectors<T>& keys, int dim, const Path& path, int first, float* out) {
  const T* rows[16];
  for (int i = 0; i < 16; ++i) rows[i] = keys.at(slot_of(path, first + i));
  transpose_keys(rows, dim, out);
}

// Multiplies the numbers of the keys [begin, end), a row of kKeyBlock for each of `count` queries, by the keys' scales.
// Where x is the first query's number of key `begin`, which is a multiple of 16.
__attribute__((always_inline)) inline void multiply_by_scales(const PagedVectors<int8_t>& vectors, int dim, const Path* path, int begin, int end,
                                                              int count, float* x) {
  for (int key = begin; key < end; key += 16, x += 16) {
    float scales[16];
    for (int i = 0; i < 16; ++i) scales[i] = scale_behind(vectors.at(path ? slot_of(*path, key + i) : key + i), dim);
    const F16 s = load(scales);
    for (int i = 0; i < count; ++i) store(x + static_cast<size_t>(i) * kKeyBlock, load(x + static_cast<size_t>(i) * kKeyBlock) * s);
  }
}

// Scores of all queries against the keys [begin, end) of one block; begin and the block's start are multiples of 16.
// path: the path of the one token whose queries these are; null: keys lie at their positions.
template <class T>
inline void score_block(const PagedVectors<T>& keys, int dim, const Query* queries, int count, int start, int begin, int end,
                        float* scores, float* tile, const PagedVectors<T>& values, const Path* path) {
  for (int key = begin; key < end; key += 32) {
    const int vectors = end - key > 16 ? 2 : 1;
    for (int first = key; first < key + 16 * vectors; first += 16) {
      float* to = tile + (first - key);
      prefetch(values.at(first), 16 * values.stride * sizeof(T));
      if (path) {
        transpose_along(keys, dim, *path, first, to);
        continue;
      }
      const T *rows[16], *at = keys.at(first);
      for (size_t i = 0; i < 16; ++i) rows[i] = at + i * keys.stride;
      transpose_keys(rows, dim, to);
    }
    for (int i = 0; i < count; i += kQueryBlock) {
      const int n = count - i < kQueryBlock ? count - i : kQueryBlock;
      float* to = scores + static_cast<size_t>(i) * kKeyBlock + (key - start);
      (vectors == 2 ? score_function<2>(n) : score_function<1>(n))(queries + i, tile, dim, to);
    }
    if constexpr (kScaled<T>) multiply_by_scales(keys, dim, path, key, key + 16 * vectors, count, scores + (key - start));
  }
}

// Replaces scores by weights e^(score - top); hidden keys get zero. Returns top and the sum of the weights.
template <bool kSomeHidden>
inline Partial soften(float* scores, int start, int begin, int end, int low, int high) {
  F16 top = set1(kMinusInfinity);
  for (int key = begin; key < end; key += 16) {
    float* s = scores + (key - start);
    F16 visible = load(s);
    if constexpr (kSomeHidden) {
      visible = select(lanes_within(key, low, high), visible, set1(kMinusInfinity));
      store(s, visible);
    }
    top = max(top, visible);
  }
  const float highest = largest(top);
  F16 total = zero();
  for (int key = begin; key < end; key += 16) {
    float* s = scores + (key - start);
    F16 weight = exponential(load(s) - set1(highest));
    if constexpr (kSomeHidden) weight = select(lanes_within(key, low, high), weight, zero());
    store(s, weight);
    total = total + weight;
  }
  return {highest, sum(total)};
}

struct Merge {  // running = running * old + block * fresh
  float old, fresh;
};

// Adds weighted values to the sums of Q queries over 16 V dimensions; `begin` starts these from zero. Values are `stride`
// apart. GCC 12 keeps the sums in memory unless the loops over them are unrolled first.
template <class T, int Q, int V>
inline void weigh_values(const float* weights, const T* values, size_t stride, int keys, bool begin, float* sums, int dim,
                         const T* upcoming) {
  F16 s[Q][V];
#pragma GCC unroll 8
  for (int i = 0; i < Q; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) s[i][v] = begin ? zero() : load(sums + i * dim + 16 * v);
  }
  for (int key = 0; key < keys; ++key) {
    if (upcoming) prefetch(upcoming + static_cast<size_t>(key) * stride, stride * sizeof(T));
    F16 x[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) x[v] = load_cached<T>(values + static_cast<size_t>(key) * stride + 16 * v);
#pragma GCC unroll 8
    for (int i = 0; i < Q; ++i) {
      const F16 w = set1(weights[i * kKeyBlock + key]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) s[i][v] = fma(w, x[v], s[i][v]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Q; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(sums + i * dim + 16 * v, s[i][v]);
  }
}

template <class T> using WeighValues = void (*)(const float*, const T*, size_t, int, bool, float*, int, const T*);

template <class T, int V>
inline WeighValues<T> weigh_for(int queries) {
  static constexpr WeighValues<T> table[] = {weigh_values<T, 1, V>, weigh_values<T, 2, V>, weigh_values<T, 3, V>,
                                             weigh_values<T, 4, V>, weigh_values<T, 5, V>, weigh_values<T, 6, V>};
  return table[queries - 1];
}

template <class T>
inline WeighValues<T> weigh_function(int queries, int vectors) {
  if constexpr (kVectorBlock > 1) {
    if (vectors == 2) return weigh_for<T, 2>(queries);
    if (vectors == 3) return weigh_for<T, 3>(queries);
    if (vectors == 4) return weigh_for<T, 4>(queries);
  }
  return weigh_for<T, 1>(queries);
}

constexpr int kWeighBlock = 6;  // queries whose sums, of 16 * kVectorBlock dimensions, stay in registers

template <class T>
inline void weigh_keys(const float* weights, int count, const T* values, size_t stride, int keys, bool begin, float* sums, int dim,
                       const T* upcoming) {
  for (int i = 0; i < count; i += kWeighBlock) {
    const int n = count - i < kWeighBlock ? count - i : kWeighBlock;
    for (int d = 0; d < dim; d += 16 * kVectorBlock) {
      const int left = (dim - d) / 16;
      weigh_function<T>(n, left < kVectorBlock ? left : kVectorBlock)(
          weights + static_cast<size_t>(i) * kKeyBlock, values + d, stride, keys, begin,
          sums + static_cast<size_t>(i) * static_cast<size_t>(dim) + d, dim, i + d == 0 ? upcoming : nullptr);
    }
  }
}

// Where the keys of a row are that are read next, to be prefetched: position `from` of a row that has `last` as its last one.
template <class T>
struct Upcoming {
  PagedVectors<T> keys;
  int64_t from, last;
  const T* at(int64_t offset) const { return from + offset <= last ? keys.at(from + offset) : nullptr; }
};

// Weighs the values of the keys [begin, end), page by page. Where several groups of queries read them, or they are not at
// their positions, 32 at a time are widened first, into `tile`.
template <class T>
inline void weigh_block(const PagedVectors<T>& values, int dim, int count, int begin, int end, const Path* path, float* weights,
                        const Merge* merge, float* running, float* sums, float* tile, const Upcoming<T>& upcoming) {
  const bool moved = path && path->from < end;
  const bool widened = moved || count > kWeighBlock;
  if constexpr (kScaled<T>) multiply_by_scales(values, dim, moved ? path : nullptr, begin, end, count, weights);
  const int step = widened ? 32 : kPagePositions;
  for (int first = begin, next; first < end; first = next) {
    next = first / step * step + step < end ? first / step * step + step : end;
    const float* of_keys = weights + (first - begin);
    const T* ahead = upcoming.at(first - begin);
    if (!widened) {
      const T* from = values.at(first);  // pages that follow each other in memory are one run
      while (next < end && values.at(next) == from + static_cast<size_t>(next - first) * values.stride) {
        next = next + kPagePositions < end ? next + kPagePositions : end;
      }
      weigh_keys(of_keys, count, values.at(first), values.stride, next - first, first == begin, sums, dim, ahead);
      continue;
    }
    if (ahead) prefetch(ahead, static_cast<size_t>(next - first) * values.stride * sizeof(T));
    for (int key = first; key < next; ++key) {
      const T* value = values.at(moved ? slot_of(*path, key) : key);
      float* to = tile + static_cast<size_t>(key - first) * static_cast<size_t>(dim);
      for (int d = 0; d < dim; d += 16) store(to + d, load_cached<T>(value + d));
    }
    weigh_keys<float>(of_keys, count, tile, static_cast<size_t>(dim), next - first, first == begin, sums, dim, nullptr);
  }
  for (int i = 0; i < count; ++i) {
    const F16 fresh = set1(merge[i].fresh), old = set1(merge[i].old);
    for (int d = i * dim; d < (i + 1) * dim; d += 16) store(running + d, fma(load(sums + d), fresh, load(running + d) * old));
  }
}

// limit * tanh(x / limit).
inline F16 cap(F16 x, float limit) {
  return (set1(2.0f) * sigmoid(x * set1(2.0f / limit)) - set1(1.0f)) * set1(limit);
}

// A query that sees no key of the block keeps its result: old = 1, fresh = 0, weights zero.
inline Merge merge_block(Partial& running, float* scores, const Query& query, int start, int begin, int end, float limit) {
  if (query.high <= begin || query.low >= end) {
    memset(scores + (begin - start), 0, static_cast<size_t>((end - begin + 15) / 16 * 16) * sizeof(float));
    return {1.0f, 0.0f};
  }
  const int last = begin + (end - begin + 15) / 16 * 16;  // scores come in whole vectors
  if (limit > 0.0f) for (int i = begin - start; i < last - start; i += 16) store(scores + i, cap(load(scores + i), limit));
  const bool some_hidden = query.low > begin || query.high < last;
  const Partial block = (some_hidden ? soften<true> : soften<false>)(scores, start, begin, end, query.low, query.high);
  const float top = block.top > running.top ? block.top : running.top;
  float scales[16];
  F16 distance = select(lanes_within(0, 0, 1), set1(running.top - top), set1(block.top - top));
  store(scales, exponential(distance));
  running = {top, running.total * scales[0] + block.total * scales[1]};
  return {scales[0], scales[1]};
}

// Tokens that attend in one call: blocks of keys that lie at their positions for all of them are shared.
struct TokenGroup {
  const Path* paths;   // of these tokens, or null
  int heads;           // queries per token
  int64_t contiguous;  // keys from this position on may lie at other slots
};

template <class T>
inline void attend_over(const Attention& a, RowHead of, const Query* queries, int count, const TokenGroup& group,
                        float* scratch, const RowHead* then) {
  float* scores = scratch;
  float* running = scores + static_cast<size_t>(count) * kKeyBlock;
  float* sums = running + static_cast<size_t>(count) * static_cast<size_t>(a.value_dim);
  float* tile = sums + static_cast<size_t>(count) * static_cast<size_t>(a.value_dim);
  Partial partial[kMaxQueries];
  Merge merge[kMaxQueries];
  int low = queries[0].low, high = 0;
  for (int i = 0; i < count; ++i) {
    partial[i] = queries[i].start;
    low = queries[i].low < low ? queries[i].low : low;
    high = queries[i].high > high ? queries[i].high : high;
  }
  memset(running, 0, static_cast<size_t>(count) * static_cast<size_t>(a.value_dim) * sizeof(float));
  const auto keys = vectors_of<T>(a, a.keys, of), values = vectors_of<T>(a, a.values, of);
  const Upcoming<T> next_row = {vectors_of<T>(a, a.keys, then ? *then : of), 0, then ? a.capacity : -1};
  for (int start = low / kKeyBlock * kKeyBlock; start < high; start += kKeyBlock) {
    const int begin = start > low ? start : low / 16 * 16;
    const int end = start + kKeyBlock < high ? start + kKeyBlock : high;
    const bool shared = end <= group.contiguous;
    const int step = shared ? count : group.heads;
    for (int first = 0; first < count; first += step) {
      const Path* path = shared ? nullptr : group.paths + first / step;
      const int stop = shared || queries[first].high > end ? end : queries[first].high;
      if (stop <= begin) continue;
      float* s = scores + static_cast<size_t>(first) * kKeyBlock;
      score_block(keys, a.dim, queries + first, step, start, begin, stop, s, tile, values, path);
      for (int i = first; i < first + step; ++i) {
        merge[i] = merge_block(partial[i], scores + static_cast<size_t>(i) * kKeyBlock, queries[i], start, begin, stop, a.cap);
      }
      const Upcoming<T> upcoming = stop < high ? Upcoming<T>{keys, stop, high - 1} : next_row;
      weigh_block(values, a.value_dim, step, begin, stop, path, s + (begin - start), merge + first,
                  running + static_cast<size_t>(first) * static_cast<size_t>(a.value_dim), sums, tile, upcoming);
    }
  }
  for (int i = 0; i < count; ++i) {
    const F16 inverse = set1(1.0f / partial[i].total);
    const float* from = running + static_cast<size_t>(i) * static_cast<size_t>(a.value_dim);
    if (const float* gate = queries[i].gate) {
      for (int d = 0; d < a.value_dim; d += 16) store(queries[i].out + d, load(from + d) * inverse * sigmoid(load(gate + d)));
      continue;
    }
    for (int d = 0; d < a.value_dim; d += 16) store(queries[i].out + d, load(from + d) * inverse);
  }
}

inline void attend(const Attention& a, RowHead of, int first, int count, float* scratch, const RowHead* then) {
  Query queries[kMaxQueries];
  const int shared = a.heads / a.kv_heads;
  TokenGroup group = {a.paths ? a.paths + first : nullptr, shared, INT64_MAX};
  int n = 0;
  for (int token = first; token < first + count; ++token) {
    if (a.paths && a.paths[token].from < group.contiguous) group.contiguous = a.paths[token].from;
    const int64_t position = a.positions[token];
    const int64_t own = position + 1 < a.capacity ? position + 1 : a.capacity;
    const int64_t low = a.window > 0 && own > a.window ? own - a.window : 0;
    const int64_t last = a.ends ? a.ends[token] : position;
    const int64_t high = last + 1 < a.capacity ? last + 1 : a.capacity;
    for (int i = 0; i < shared; ++i) {
      const size_t head = static_cast<size_t>(of.kv_head * shared + i), to = head * static_cast<size_t>(a.value_dim);
      const float* row = a.qkv + a.qkv_stride * static_cast<size_t>(token);
      queries[n++] = {row + head * static_cast<size_t>(a.dim), a.out + a.out_stride * static_cast<size_t>(token) + to,
                      static_cast<int>(low), static_cast<int>(high), a.gates ? row + a.gates + to : nullptr,
                      a.sinks ? Partial{a.sinks[of.kv_head * shared + i], 1.0f} : Partial{kMinusInfinity, 0.0f}};
    }
  }
  if (a.element == kCacheInt8) attend_over<int8_t>(a, of, queries, n, group, scratch, then);
  else if (a.element == kCacheBf16) attend_over<uint16_t>(a, of, queries, n, group, scratch, then);
  else attend_over<float>(a, of, queries, n, group, scratch, then);
}

// --- embedding, read from the packed head
// ------------------------------------------------------------------------------

inline void embed(const Linear& table, int64_t token, float* out) {
  const size_t column = static_cast<size_t>(token) % kPanel;
  const uint8_t* panel = table.weights + panel_bytes(table) * (static_cast<size_t>(token) / kPanel);
  for (int i = 0; i < table.inputs; i += 4) {
    for (int j = 0; j < 4; ++j) {
      const size_t at = static_cast<size_t>(i + j);
      if (table.format == kInt8) {
        const int value = panel[at / 4 * (kPanel * 4) + column * 4 + at % 4] - kInt8Zero;
        out[at] = static_cast<float>(value) * table.scales[token];
      } else {
        const uint16_t half = reinterpret_cast<const uint16_t*>(panel)[at / 2 * (kPanel * 2) + column * 2 + at % 2];
        const uint32_t bits = static_cast<uint32_t>(half) << 16;
        memcpy(out + at, &bits, sizeof bits);
      }
    }
  }
}

// --- mixtures of experts
// ------------------------------------------------------------------------------

template <int Q>
inline void route_rows(const Router& router, const float* x, size_t stride, int panel, float* out, size_t out_stride) {
  const float* w = router.weights + static_cast<size_t>(panel) * static_cast<size_t>(router.inputs) * kRouterPanel;
  F16 s[Q];
  for (int i = 0; i < Q; ++i) s[i] = zero();
  for (int k = 0; k < router.inputs; ++k) {
    const F16 of_input = load(w + static_cast<size_t>(k) * kRouterPanel);
    for (int i = 0; i < Q; ++i) s[i] = fma(set1(x[stride * static_cast<size_t>(i) + static_cast<size_t>(k)]), of_input, s[i]);
  }
  const int first = panel * kRouterPanel;
  for (int i = 0; i < Q; ++i) {
    store(out + out_stride * static_cast<size_t>(i) + first, router.bias ? s[i] + load(router.bias + first) : s[i]);
  }
}

inline void route(const Router& router, const float* x, int rows, size_t stride, int panel, float* out) {
  using RouteRows = void (*)(const Router&, const float*, size_t, int, float*, size_t);
  static constexpr RouteRows table[] = {route_rows<1>, route_rows<2>, route_rows<3>, route_rows<4>, route_rows<5>, route_rows<6>};
  const size_t out_stride = static_cast<size_t>(padded(router.outputs, kRouterPanel));
  for (int i = 0; i < rows; i += kQueryBlock) {
    const size_t row = static_cast<size_t>(i);
    const int n = rows - i < kQueryBlock ? rows - i : kQueryBlock;
    table[n - 1](router, x + stride * row, stride, panel, out + out_stride * row, out_stride);
  }
}

inline void accumulate(const float* x, float weight, int padded_width, float* out) {
  const F16 w = set1(weight);
  for (int i = 0; i < padded_width; i += 16) store(out + i, fma(w, load(x + i), load(out + i)));
}

// --- end of a matrix product
// -------------------------------------------------------------------------------------------

// The tanh form of GELU: x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x^3)).
inline F16 gelu_tanh(F16 x) {
  const F16 cubic = fma(x * x * x, set1(0.044715f), x);
  return x / (set1(1.0f) + exponential(cubic * set1(-1.5957691216057308f)));
}

// gpt-oss's gate: both parts are limited to 7, the gate only from above; gate * sigmoid(1.702 gate) * (up + 1). NaN stays
// NaN, as in exponential.
inline F16 clamped_swiglu(F16 gate, F16 up) {
  const F16 limit = set1(7.0f), low = set1(-7.0f);
  const F16 g = min(limit, gate), u = max(low, min(limit, up));
  return g * sigmoid(g * set1(1.702f)) * (u + set1(1.0f));
}

// GELU by the error function of Abramowitz and Stegun's formula 7.1.26, which is off by at most 1.5e-7.
inline F16 exact_gelu(F16 x) {
  const F16 z = abs(x) * set1(0.70710678f), t = set1(1.0f) / fma(z, set1(0.3275911f), set1(1.0f));
  F16 p = fma(set1(1.061405429f), t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  const F16 tail = p * t * exponential(zero() - z * z);  // 1 - erf(|x| / sqrt(2))
  const F16 both = select(below(x, zero()), tail, set1(2.0f) - tail);
  return x * set1(0.5f) * both;
}

inline F16 relu(F16 x) { return max(zero(), x); }  // NaN stays NaN, as in exponential

// xIELU (arXiv 2411.13010). shape: alpha_p, alpha_n, beta and the largest argument of the exponential.
inline F16 xielu(F16 x, const float* shape) {
  const F16 linear = x * set1(shape[2]);
  const F16 low = exponential(min(set1(shape[3]), x)) - set1(1.0f) - x;
  return select(below(zero(), x), fma(x * x, set1(shape[0]), linear), fma(low, set1(shape[1]), linear));
}

inline F16 activate(Epilogue by, F16 x, const float* shape) {
  if (by == Epilogue::kSilu) return silu(x);
  if (by == Epilogue::kGelu) return gelu_tanh(x);
  if (by == Epilogue::kExactGelu) return exact_gelu(x);
  if (by == Epilogue::kXielu) return xielu(x, shape);
  return by == Epilogue::kRelu ? relu(x) : relu(x) * relu(x);
}

// y: the 32 sums of one row and panel.
inline void finish(const LinearCall& call, int panel, int row, F16 y0, F16 y1) {
  const Linear& linear = *call.linear;
  const int column = panel * kPanel;
  float* out = call.out + call.out_stride * static_cast<size_t>(row);
  if (linear.bias) {
    y0 = y0 + load(linear.bias + column);
    y1 = y1 + load(linear.bias + column + 16);
  }
  if (const float* change = call.changes ? call.changes[row] : nullptr) {
    y0 = y0 + load(change + column);
    y1 = y1 + load(change + column + 16);
  }
  if (call.epilogue == Epilogue::kSwiglu) return store(out + column / 2, silu(y0) * y1);
  if (call.epilogue == Epilogue::kGeglu) return store(out + column / 2, gelu_tanh(y0) * y1);
  if (call.epilogue == Epilogue::kClampedSwiglu) return store(out + column / 2, clamped_swiglu(y0, y1));
  if (call.epilogue >= Epilogue::kSilu && call.epilogue <= Epilogue::kXielu) {
    y0 = activate(call.epilogue, y0, call.shape);
    y1 = activate(call.epilogue, y1, call.shape);
  }
  if (call.epilogue == Epilogue::kCap) y0 = cap(y0, call.limit), y1 = cap(y1, call.limit);
  if (call.epilogue == Epilogue::kAdd) {
    y0 = load(out + column) + y0;
    y1 = load(out + column + 16) + y1;
  }
  const int left = linear.outputs - column;  // the caller's rows may end within the panel
  if (left >= kPanel) {
    store(out + column, y0);
    store(out + column + 16, y1);
    return;
  }
  store_first(out + column, y0, left < 16 ? left : 16);
  if (left > 16) store_first(out + column + 16, y1, left - 16);
}

// The scale of a row's group of 64 that input i belongs to.
inline F16 scale_of(const Activations& a, int row, int i) {
  return set1(a.scales[static_cast<size_t>(row) * a.scale_stride + static_cast<size_t>(i / kActivationGroup)]);
}
inline int32_t sum_of(const Activations& a, int row, int group) {
  return a.sums[static_cast<size_t>(row) * a.sum_stride + static_cast<size_t>(group)];
}

// Rows are cut into equal blocks of at most `most`, so that blocks of a single row are rare.
struct RowBlocks {
  int rows, blocks;
  RowBlocks(int rows_, int most) : rows(rows_), blocks((rows_ + most - 1) / most) {}
  int start(int block) const { return static_cast<int>(static_cast<int64_t>(rows) * block / blocks); }
};

}  // namespace
}  // namespace paceline
