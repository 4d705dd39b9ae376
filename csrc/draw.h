// A token from a row of logits: the largest, or the largest after temperature, cuts and Gumbel noise
// (src/paceline/core/sampling.py defines the noise and the cuts). Without cuts there are two passes over the row: one
// finds the largest logit, one tests every token whether its noise could carry it past the best so far; the few
// candidates are computed exactly, in the reference implementation's arithmetic. Cuts are found by selection, without
// sorting, and only where they may matter: top-k makes a short list first, top-p tests whether the drawn token may
// stay. A token's mass is an integer, so sums of masses do not depend on order.
#pragma once

#include <cmath>

#include "body.h"
#include "old_glibc.h"

namespace paceline {
namespace {

constexpr int64_t kStride = 16;
constexpr int64_t kColumns = 1024;  // columns whose largest logits bound a top-k from below
constexpr int64_t kFew = 256;       // a top-k of more columns is bounded badly
constexpr float kTwoTo23 = 8388608.0f;
constexpr float kInfinity = __builtin_inff();
constexpr float kLargest = 3.40282347e38f;
constexpr float kLog2E = 0x1.715476p0f;
constexpr float kTwoTo[] = {0x1.5bba06p-10f, 0x1.3cea8ap-7f, 0x1.c6b754p-5f, 0x1.ebf9bcp-3f, 0x1.62e42ap-1f, 1.0f};  // 2^x near 0
constexpr float kWeightless = 22.0f;  // deeper tokens have no mass: e^-22 2^30 < 1/2

inline I16 mix_lanes(I16 x) {  // mix of kernels.h
  x = (x ^ shift_right<16>(x)) * iset1(0x7feb352d);
  x = (x ^ shift_right<15>(x)) * iset1(static_cast<int32_t>(0x846ca68bu));
  return x ^ shift_right<16>(x);
}

// Sixteen logits from `at` on; -infinity beyond the end.
inline F16 logits_at(const Draw& draw, int64_t at) {
  if (at + kStride <= draw.vocabulary) return load(draw.logits + at);
  float rest[kStride];
  for (int64_t i = 0; i < kStride; ++i) rest[i] = at + i < draw.vocabulary ? draw.logits[at + i] : kMinusInfinity;
  return load(rest);
}

struct Leader {
  int64_t token;  // the first of equal ones
  float logit;
};

inline int64_t first_with(const Draw& draw, float value, int64_t from) {
  for (int64_t at = from; at < draw.vocabulary; at += kStride) {
    const uint32_t equal = lanes_at_least(logits_at(draw, at), set1(value));
    if (equal && at + __builtin_ctz(equal) < draw.vocabulary) return at + __builtin_ctz(equal);
  }
  return 0;  // every logit is NaN
}

// One pass that remembers the first block holding the largest logit; only that block is searched again.
inline Leader find_leader(const Draw& draw) {
  constexpr int64_t kBlock = 8 * kStride;
  constexpr uint32_t kAll = 0xffff;
  F16 top = set1(kMinusInfinity);
  int64_t best = 0;
  for (int64_t start = 0; start < draw.vocabulary; start += kBlock) {
    F16 tops[2] = {top, top};
    const int64_t whole = start + kBlock <= draw.vocabulary ? start + kBlock : start;
    for (int64_t at = start; at < whole; at += 2 * kStride) {
      tops[0] = max(load(draw.logits + at), tops[0]);
      tops[1] = max(load(draw.logits + at + kStride), tops[1]);
    }
    for (int64_t at = whole; at < start + kBlock && at < draw.vocabulary; at += kStride) tops[0] = max(logits_at(draw, at), tops[0]);
    const F16 here = max(tops[0], tops[1]);
    if (lanes_at_least(top, here) == kAll) continue;
    top = set1(largest(here));
    best = start;
  }
  const float logit = largest(top);
  return {first_with(draw, logit, best), logit};
}

// Depth of logits: their distance below the largest one, after temperature (sampling.scaled with the sign flipped).
class Depths {
 public:
  Depths(float top, float temperature) : top_(set1(top)), temperature_(set1(temperature)), as_they_are_(temperature == 1.0f) {}
  F16 of(F16 logits) const {
    const F16 distance = top_ - logits;
    return as_they_are_ ? distance : distance / temperature_;
  }
  float of(float logit) const {
    float all[kStride];
    store(all, of(set1(logit)));
    return all[0];
  }
  // A distance that no token of at most this depth exceeds: it saves divisions.
  F16 reach(float depth) const { return set1(depth) * temperature_ * set1(1.000001f) + set1(1e-36f); }
  bool any_within(F16 logits, F16 reach) const { return lanes_of(at_most(top_ - logits, reach)) != 0; }

 private:
  const F16 top_, temperature_;
  const bool as_they_are_;
};

// --- noise ---------------------------------------------------------------------------------------------------------------

// The best token so far, and the bound that another one must reach.
class NoisyBest {
 public:
  // Distances below the largest logit times `slope` are differences of depth in units of float bits. Until a token has
  // entered any within 50 of the largest may win; deeper ones never do.
  NoisyBest(const Draw& draw, float temperature) : draw_(draw), slope_(steepness(temperature)) {}

  void enter(int64_t token, float depth) {
    const uint32_t hash = mix(mix(draw_.key[0] ^ static_cast<uint32_t>(token)) ^ draw_.key[1]) >> 8;
    const double uniform = (static_cast<double>(hash) + 0.5) * 0x1p-24;
    const double value = -static_cast<double>(depth) - std::log(-std::log(uniform));
    if (value > best_) {
      best_ = value;
      winner_ = token;
      depth_ = depth;
      offset_ = static_cast<float>((127.002 - value * 1.4426950408889634) * kTwoTo23);
    } else if (value == best_ && token < winner_) {
      winner_ = token;
      depth_ = depth;
    }
  }

  // Lanes that may win, of tokens so far above the largest logit (below: negative). Winning takes 1 - uniform <=
  // e^(score - best); its right side is bounded from above by the float whose bits grow linearly with the exponent, a
  // chord of the exponential.
  uint32_t may_win(F16 distance, I16 tokens) const {
    const F16 bits = max(fma(distance, set1(slope_), set1(offset_)), zero());
    if (!lanes_at_least(bits, set1(kLeastBits))) return 0;
    const I16 hash = shift_right<8>(mix_lanes(mix_lanes(iset1(static_cast<int32_t>(draw_.key[0])) ^ tokens) ^
                                              iset1(static_cast<int32_t>(draw_.key[1]))));
    const F16 least = to_float(iset1(0xffffff) - hash) * set1(0x1p-24f);  // 1 - uniform, rounded down
    return lanes_at_least(bits_as_float(round_to_int(bits)), least);
  }

  int64_t winner() const { return winner_; }
  float depth() const { return depth_; }

 private:
  static constexpr float kLeastBits = 101.9f * kTwoTo23;  // of 2^-25, the least that 1 - uniform can be
  static float steepness(float temperature) {
    const float slope = 1.4426950408889634f * kTwoTo23 / temperature;
    return slope < 1e30f ? slope : 1e30f;  // an infinite slope would make tokens equal to the largest NaN
  }

  const Draw& draw_;
  const float slope_;
  float offset_ = 200.0f * kTwoTo23;
  double best_ = -__builtin_inf();
  int64_t winner_ = 0;
  float depth_ = 0.0f;
};

// --- cuts ----------------------------------------------------------------------------------------------------------------

// e^-depth in units of 2^-30, rounded (sampling.masses). Nothing is fused, so that torch computes the same bits.
inline I16 mass(F16 depth) {
  const F16 exponent = max(depth * set1(-kLog2E), set1(-64.0f));
  const I16 whole = round_to_int(exponent);
  const F16 part = exponent - to_float(whole);
  F16 p = set1(kTwoTo[0]);
  for (int i = 1; i < 6; ++i) p = p * part + set1(kTwoTo[i]);
  return round_to_int(scale_by_power_of_two(p, whole + iset1(30)));
}

// A sum of up to 2^21 numbers from 0 to 2^30: lanes hold their halves.
class Total {
 public:
  void add(I16 x) {
    high_ = high_ + shift_right<15>(x);
    low_ = low_ + (x & iset1(0x7fff));
  }
  int64_t sum() const { return (sum_of(high_) << 15) + sum_of(low_); }

 private:
  static int64_t sum_of(I16 x) {
    int32_t lanes[kStride];
    store(lanes, x);
    int64_t sum = 0;
    for (const int32_t lane : lanes) sum += static_cast<uint32_t>(lane);
    return sum;
  }
  I16 high_ = izero(), low_ = izero();
};

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// Bisects alternately by depth and by float bits: the first needs few steps where depths are spread evenly, the second
// never more than 31.
inline uint32_t between(uint32_t near, uint32_t far, int step) {
  const uint32_t half = near + (far - near) / 2;
  if (step % 2 == 0 || far == bits_of(kInfinity)) return half;
  const uint32_t middle = bits_of(0.5f * float_of(near) + 0.5f * float_of(far));
  return middle <= near ? near + 1 : middle >= far ? far - 1 : middle;
}

// Keeps the entries of `rest` and `weights` at `middle` or deeper, or else those less deep; returns their number.
inline int64_t keep_side(const DrawScratch& list, int64_t count, float middle, bool deeper) {
  int64_t kept = 0;
  for (int64_t i = 0; i < count; i += kStride) {
    const F16 depths = load(list.rest + i);
    const I16 weights = load(list.weights + i);
    const uint32_t inside = count - i < kStride ? (1u << (count - i)) - 1 : 0xffff, less = lanes_of(below(depths, set1(middle)));
    const uint32_t lanes = inside & (deeper ? ~less : less);
    compress(list.rest + kept, depths, lanes);
    compress(list.weights + kept, weights, lanes);
    kept += __builtin_popcount(lanes);
  }
  store(list.rest + kept, set1(kInfinity));
  return kept;
}

// The largest depth before which less than `limit` of the weight lies; infinity if the total is less. Searches the
// first `count` of `rest` and `weights`, which it uses up; depths beyond them are infinite.
inline float deepest_within(const DrawScratch& list, int64_t count, int64_t limit) {
  uint32_t near = 0, far = bits_of(kInfinity);  // near is within the limit, far is not
  int64_t before = 0;                           // weight less deep than near
  for (int step = 0; count > 0 && far - near > 1; ++step) {
    const uint32_t middle = between(near, far, step);
    const F16 depth = set1(float_of(middle));
    Total total;
    for (int64_t i = 0; i < count; i += kStride) total.add(only(below(load(list.rest + i), depth), load(list.weights + i)));
    const int64_t here = before + total.sum();
    const bool stays = here < limit;
    if (stays) before = here;
    (stays ? near : far) = middle;
    count = keep_side(list, count, float_of(middle), stays);
  }
  return far == bits_of(kInfinity) ? kInfinity : float_of(near);
}

// Lists the tokens of at most this depth; returns their number. Depths behind them are infinite.
inline int64_t list_within(const Draw& draw, const Depths& depths, float depth) {
  const F16 most = set1(depth < kLargest ? depth : kLargest), reach = depths.reach(depth);
  int64_t count = 0;
  for (int64_t at = 0; at < draw.vocabulary; at += kStride) {
    const F16 logits = logits_at(draw, at);
    if (!depths.any_within(logits, reach)) continue;
    const F16 here = depths.of(logits);
    const uint32_t lanes = lanes_of(at_most(here, most));
    compress(draw.scratch.depths + count, here, lanes);
    compress(draw.scratch.tokens + count, sixteen_from(static_cast<int32_t>(at)), lanes);
    count += __builtin_popcount(lanes);
  }
  store(draw.scratch.depths + count, set1(kInfinity));
  return count;
}

// Prepares the list for a search by mass; tokens deeper than `depth` have no mass. Returns the sum.
inline int64_t weigh_list(const DrawScratch& list, int64_t count, float depth) {
  Total total;
  for (int64_t i = 0; i < count; i += kStride) {
    const F16 here = load(list.depths + i);
    const I16 weights = only(at_most(here, set1(depth)), mass(here));
    total.add(weights);
    store(list.rest + i, here);
    store(list.weights + i, weights);
  }
  store(list.rest + count, set1(kInfinity));
  return total.sum();
}

struct Before {
  int64_t tokens, mass;  // of tokens less deep
  int64_t listed;        // mass of the whole list
};

// Tokens and mass of the list before this depth; prepares the list for a search by mass.
inline Before count_before(const DrawScratch& list, int64_t count, float depth) {
  Before before = {0, 0, weigh_list(list, count, depth)};
  Total mass;
  for (int64_t i = 0; i < count; i += kStride) {
    const Mask less = below(load(list.rest + i), set1(depth));
    before.tokens += __builtin_popcount(lanes_of(less));
    mass.add(only(less, load(list.weights + i)));
  }
  before.mass = mass.sum();
  return before;
}

inline void count_list(const DrawScratch& list, int64_t count) {
  for (int64_t i = 0; i < count; i += kStride) {
    store(list.rest + i, load(list.depths + i));
    store(list.weights + i, iset1(1));
  }
  store(list.rest + count, set1(kInfinity));
}

// The mass of all tokens of at most this depth.
inline int64_t weigh_all(const Draw& draw, const Depths& depths, float depth) {
  const F16 most = set1(depth), reach = depths.reach(depth < kWeightless ? depth : kWeightless);
  Total total;
  for (int64_t at = 0; at < draw.vocabulary; at += kStride) {
    const F16 logits = logits_at(draw, at);
    if (!depths.any_within(logits, reach)) continue;
    const F16 here = depths.of(logits);
    total.add(only(at_most(here, most), mass(here)));
  }
  return total.sum();
}

// The mass before a token from which on it is cut; the most likely token stays, however small top_p is.
inline int64_t nucleus(float top_p, int64_t mass) {
  const double limit = static_cast<double>(top_p) * static_cast<double>(mass);
  return limit > 1.0 ? static_cast<int64_t>(std::ceil(limit)) : 1;
}

// The largest logits of the columns c, c + kColumns, c + 2 kColumns ... into `columns`; returns the largest of all.
inline float column_maxima(const Draw& draw, float* columns) {
  for (int64_t c = 0; c < kColumns; c += kStride) store(columns + c, set1(kMinusInfinity));
  int64_t at = 0;
  for (; at + kColumns <= draw.vocabulary; at += kColumns) {
    for (int64_t c = 0; c < kColumns; c += kStride) store(columns + c, max(load(draw.logits + at + c), load(columns + c)));
  }
  for (int64_t c = 0; at + c < draw.vocabulary; c += kStride) store(columns + c, max(logits_at(draw, at + c), load(columns + c)));
  F16 top = set1(kMinusInfinity);
  for (int64_t c = 0; c < kColumns; c += kStride) top = max(load(columns + c), top);
  return largest(top);
}

struct Listed {
  int64_t count;  // tokens in the list, some of them deeper
  float deepest;
};

// Lists the top_k tokens and those equal to the last one. The top_k best columns each hold a token at least as good as
// the top_k-th column's maximum; few other tokens are as good, and only those are examined. `columns` is used up.
inline Listed list_top_k(const Draw& draw, const Depths& depths, const float* columns) {
  for (int64_t c = 0; c < kColumns; c += kStride) {
    store(draw.scratch.depths + c, depths.of(load(columns + c)));
  }
  count_list(draw.scratch, kColumns);
  const float bound = deepest_within(draw.scratch, kColumns, draw.top_k);
  const float most = bound < draw.deepest ? bound : draw.deepest;
  const int64_t count = list_within(draw, depths, most);
  count_list(draw.scratch, count);
  const float exact = deepest_within(draw.scratch, count, draw.top_k);
  return {count, exact < most ? exact : most};
}

// Top-p among the listed tokens.
inline Listed cut_to_nucleus(const Draw& draw, Listed listed) {
  if (!(draw.top_p < 1.0f)) return listed;
  const int64_t mass = weigh_list(draw.scratch, listed.count, listed.deepest);
  const float depth = deepest_within(draw.scratch, listed.count, nucleus(draw.top_p, mass));
  return {listed.count, depth < listed.deepest ? depth : listed.deepest};
}

inline bool cuts_to_few(const Draw& draw) { return draw.top_k > 0 && draw.top_k < draw.vocabulary; }

}  // namespace
}  // namespace paceline

#include "truncation.h"

namespace paceline {
namespace {

// --- the draw ------------------------------------------------------------------------------------------------------------

inline int64_t draw_from_list(const Draw& draw, Listed listed) {
  NoisyBest best(draw, 1.0f);
  for (int64_t i = 0; i < listed.count; i += kStride) {
    const F16 depths = load(draw.scratch.depths + i);
    const uint32_t stay = lanes_of(at_most(depths, set1(listed.deepest < kLargest ? listed.deepest : kLargest)));
    if (!stay) continue;
    for (uint32_t lanes = stay & best.may_win(zero() - depths, load(draw.scratch.tokens + i)); lanes; lanes &= lanes - 1) {
      const int64_t at = i + __builtin_ctz(lanes);
      best.enter(draw.scratch.tokens[at], draw.scratch.depths[at]);
    }
  }
  return best.winner();
}

inline int64_t draw_from_few(const Draw& draw) {
  float columns[kColumns];
  const float top = column_maxima(draw, columns);
  if (!finite(top)) return first_with(draw, top, 0);
  return draw_from_list(draw, cut_to_nucleus(draw, list_top_k(draw, Depths(top, draw.temperature), columns)));
}

// The winner of all tokens, if the cuts keep it, which is the usual case at any temperature. Otherwise the winner of
// the tokens that the cuts keep, all of which lie before it: a short list, which usually suffices.
inline int64_t within_cuts(const Draw& draw, const Depths& depths, const NoisyBest& best) {
  const bool few = cuts_to_few(draw);
  if ((!few && !(draw.top_p < 1.0f)) || best.depth() == 0.0f) return best.winner();
  const int64_t count = list_within(draw, depths, best.depth());
  const Before before = count_before(draw.scratch, count, best.depth());
  if (few && before.tokens >= draw.top_k) {
    count_list(draw.scratch, count);
    return draw_from_list(draw, cut_to_nucleus(draw, {count, deepest_within(draw.scratch, count, draw.top_k)}));
  }
  if (before.mass < nucleus(draw.top_p, before.listed)) return best.winner();
  if (few) return draw_from_few(draw);
  const int64_t limit = nucleus(draw.top_p, weigh_all(draw, depths, draw.deepest));
  if (before.mass < limit) return best.winner();
  return draw_from_list(draw, {count, deepest_within(draw.scratch, count, limit)});
}

inline int64_t draw_from_all(const Draw& draw) {
  const Leader leader = find_leader(draw);
  if (!(draw.temperature > 0.0f) || !finite(leader.logit)) return leader.token;
  const Depths depths(leader.logit, draw.temperature);
  NoisyBest best(draw, draw.temperature);
  best.enter(leader.token, 0.0f);
  for (int64_t at = 0; at < draw.vocabulary; at += kStride) {
    const F16 distance = logits_at(draw, at) - set1(leader.logit);
    for (uint32_t lanes = best.may_win(distance, sixteen_from(static_cast<int32_t>(at))); lanes; lanes &= lanes - 1) {
      const int64_t token = at + __builtin_ctz(lanes);
      if (token >= draw.vocabulary) break;
      const float depth = (leader.logit - draw.logits[token]) / draw.temperature;
      if (depth <= draw.deepest) best.enter(token, depth);
    }
  }
  return within_cuts(draw, depths, best);
}

inline int64_t draw(const Draw& whole) {
  const Draw draw = truncated(whole);
  return draw.temperature > 0.0f && cuts_to_few(draw) && draw.top_k <= kFew ? draw_from_few(draw) : draw_from_all(draw);
}

// --- probabilities and likelihoods
// ---------------------------------------------------------------------------------------

// 0 if the largest logit is not finite: every token is cut, or NaN.
inline float likelihood(const Draw& draw, int64_t token) {
  const float largest_logit = find_leader(draw).logit;
  if (!finite(largest_logit)) return 0.0f;
  const F16 top = set1(largest_logit), least = set1(kMinusInfinity);
  const auto weight = [&](F16 logits) { return exponential(max(logits, least) - top); };  // NaN counts as masked
  F16 sums[2] = {zero(), zero()};
  int64_t at = 0;
  for (; at + 2 * kStride <= draw.vocabulary; at += 2 * kStride) {
    sums[0] = sums[0] + weight(load(draw.logits + at));
    sums[1] = sums[1] + weight(load(draw.logits + at + kStride));
  }
  for (; at < draw.vocabulary; at += kStride) sums[0] = sums[0] + weight(logits_at(draw, at));
  float own[kStride];
  store(own, weight(set1(draw.logits[token])));
  return own[0] / sum(sums[0] + sums[1]);
}

// The depth of the deepest token that the cuts keep.
inline float deepest_kept(const Draw& draw, const Depths& depths, const float* columns) {
  if (cuts_to_few(draw)) return cut_to_nucleus(draw, list_top_k(draw, depths, columns)).deepest;
  if (!(draw.top_p < 1.0f)) return draw.deepest;
  const float most = draw.deepest < kWeightless ? draw.deepest : kWeightless;
  return cut_to_nucleus(draw, {list_within(draw, depths, most), most}).deepest;
}

inline void put(const Draw& draw, float* out, int64_t at, F16 x) {
  if (at + kStride <= draw.vocabulary) return store(out + at, x);
  store_first(out + at, x, static_cast<int>(draw.vocabulary - at));
}

inline void probabilities(const Draw& whole, float* out) {
  const Draw draw = truncated(whole);
  float columns[kColumns];
  const float top = column_maxima(draw, columns);
  if (!finite(top)) {
    for (int64_t at = 0; at < draw.vocabulary; ++at) out[at] = __builtin_nanf("");
    return;
  }
  if (!(draw.temperature > 0.0f)) {
    memset(out, 0, sizeof(float) * static_cast<size_t>(draw.vocabulary));
    out[first_with(draw, top, 0)] = 1.0f;
    return;
  }
  const Depths depths(top, draw.temperature);
  const float most = deepest_kept(draw, depths, columns);
  const F16 deepest = set1(most < 87.0f ? most : 87.0f);  // deeper ones would not be normal numbers
  F16 total = zero();
  for (int64_t at = 0; at < draw.vocabulary; at += kStride) {
    const F16 here = depths.of(logits_at(draw, at));
    const F16 weight = only(at_most(here, deepest), exponential(zero() - here));
    total = total + weight;
    put(draw, out, at, weight);
  }
  const F16 inverse = set1(1.0f / sum(total));
  for (int64_t at = 0; at + kStride <= draw.vocabulary; at += kStride) store(out + at, load(out + at) * inverse);
  for (int64_t at = draw.vocabulary / kStride * kStride; at < draw.vocabulary; ++at) out[at] /= sum(total);
}

// 2^x for x of at most 0, relative error 2e-7; zero below 2^-126.
inline F16 two_to(F16 x) {
  x = max(x, set1(-126.0f));
  const I16 whole = round_to_int(x);
  const F16 part = x - to_float(whole);
  F16 p = set1(kTwoTo[0]);
  for (int i = 1; i < 6; ++i) p = fma(p, part, set1(kTwoTo[i]));
  return scale_by_power_of_two(p, whole);
}

// The logarithm of the sum of e^logit.
inline double log_sum(const Draw& draw, float top) {
  const float shift = top * kLog2E;  // its rounding cancels: it is added again
  F16 sums[2] = {zero(), zero()};
  const F16 scale = set1(kLog2E), least = set1(-shift);
  int64_t at = 0;
  for (; at + 2 * kStride <= draw.vocabulary; at += 2 * kStride) {
    sums[0] = sums[0] + two_to(fma(load(draw.logits + at), scale, least));
    sums[1] = sums[1] + two_to(fma(load(draw.logits + at + kStride), scale, least));
  }
  for (; at < draw.vocabulary; at += kStride) sums[0] = sums[0] + two_to(fma(logits_at(draw, at), scale, least));
  return std::log(static_cast<double>(sum(sums[0] + sums[1]))) + static_cast<double>(shift) / static_cast<double>(kLog2E);
}

// Inserts a token into the `count` best so far, less deep ones first, after equal ones.
inline void rank(int64_t token, float depth, int64_t count, int64_t* ids, float* depths) {
  if (!(depth < depths[count - 1])) return;
  int64_t place = count - 1;
  for (; place > 0 && depth < depths[place - 1]; --place) {
    depths[place] = depths[place - 1];
    ids[place] = ids[place - 1];
  }
  depths[place] = depth;
  ids[place] = token;
}

// draw.top_k is `count`, its temperature 1.
inline float logprobs(const Draw& draw, int64_t token, int64_t count, int64_t* ids, float* values) {
  float columns[kColumns];
  const float top = count > 0 ? column_maxima(draw, columns) : find_leader(draw).logit;
  const Depths depths(top, 1.0f);
  const double total = log_sum(draw, top);
  for (int64_t i = 0; i < count; ++i) {
    values[i] = kInfinity;
    ids[i] = 0;
  }
  const int64_t listed = count > 0 ? list_top_k(draw, depths, columns).count : 0;
  for (int64_t i = 0; i < listed; ++i) rank(draw.scratch.tokens[i], draw.scratch.depths[i], count, ids, values);
  for (int64_t i = listed, next = 0; i < count && next < draw.vocabulary; ++next) {  // fewer than `count` tokens are listed
    if (!(draw.logits[next] > kMinusInfinity)) ids[i++] = next;
  }
  const auto logarithm = [&](float depth) { return static_cast<float>(static_cast<double>(top) - static_cast<double>(depth) - total); };
  for (int64_t i = 0; i < count; ++i) values[i] = logarithm(values[i]);
  return logarithm(top - draw.logits[token]);
}

}  // namespace
}  // namespace paceline
