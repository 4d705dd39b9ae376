// A token from a row of logits: the largest, or the largest after temperature and Gumbel noise (src/paceline/sampling.py
// says what the noise is). Two passes over the row: one finds the leader, one asks of every token whether its noise could
// carry it past the best so far; the few of which that may be so are computed exactly, in the twin's arithmetic.
#pragma once

#include <cmath>

#include "body.h"

namespace paceline {
namespace {

constexpr int64_t kStride = 16;
constexpr float kTwoTo23 = 8388608.0f;

inline I16 mix_lanes(I16 x) {  // mix of kernels.h
  x = (x ^ shift_right<16>(x)) * iset1(0x7feb352d);
  x = (x ^ shift_right<15>(x)) * iset1(static_cast<int32_t>(0x846ca68bu));
  return x ^ shift_right<16>(x);
}

// Sixteen logits from `at` on; beyond the end: -infinity.
inline F16 logits_at(const Draw& draw, int64_t at) {
  if (at + kStride <= draw.vocabulary) return load(draw.logits + at);
  float rest[kStride];
  for (int64_t i = 0; i < kStride; ++i) rest[i] = at + i < draw.vocabulary ? draw.logits[at + i] : kMinusInfinity;
  return load(rest);
}

struct Leader {
  int64_t token;  // the first of equals
  float logit;
};

inline int64_t first_with(const Draw& draw, float value, int64_t from) {
  for (int64_t at = from; at < draw.vocabulary; at += kStride) {
    const uint32_t equal = lanes_at_least(logits_at(draw, at), set1(value));
    if (equal && at + __builtin_ctz(equal) < draw.vocabulary) return at + __builtin_ctz(equal);
  }
  return 0;  // nothing but NaN
}

// One pass: it remembers the first block that holds the largest logit, and looks into that one alone.
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

// The best token so far, and what another one must reach.
class Contest {
 public:
  Contest(const Draw& draw, float top) : draw_(draw), top_(top), slope_(steepness(draw.temperature)) {}

  void enter(int64_t token) {
    const uint32_t hash = mix(mix(draw_.key[0] ^ static_cast<uint32_t>(token)) ^ draw_.key[1]) >> 8;
    const double uniform = (static_cast<double>(hash) + 0.5) * 0x1p-24;
    const float score = (draw_.logits[token] - top_) / draw_.temperature;
    const double value = static_cast<double>(score) - std::log(-std::log(uniform));
    if (value > best_) {
      best_ = value;
      winner_ = token;
      offset_ = static_cast<float>((127.002 - value * 1.4426950408889634) * kTwoTo23);
    } else if (value == best_ && token < winner_) {
      winner_ = token;
    }
  }

  // Lanes that may win. Winning takes 1 - uniform <= e^(score - best); its right side is bounded from above by the float
  // whose bits grow linearly with the exponent, a chord of the exponential.
  uint32_t may_win(F16 logits, int64_t at) const {
    const F16 bits = max(fma(logits - set1(top_), set1(slope_), set1(offset_)), zero());
    if (!lanes_at_least(bits, set1(kLeastBits))) return 0;
    const I16 hash = shift_right<8>(mix_lanes(mix_lanes(iset1(static_cast<int32_t>(draw_.key[0])) ^ sixteen_from(static_cast<int32_t>(at))) ^
                                        iset1(static_cast<int32_t>(draw_.key[1]))));
    const F16 least = to_float(iset1(0xffffff) - hash) * set1(0x1p-24f);  // 1 - uniform, or a little less
    return lanes_at_least(bits_as_float(round_to_int(bits)), least);
  }

  int64_t winner() const { return winner_; }

 private:
  static constexpr float kLeastBits = 101.9f * kTwoTo23;  // of 2^-25, the least that 1 - uniform can be
  static float steepness(float temperature) {
    const float slope = 1.4426950408889634f * kTwoTo23 / temperature;
    return slope < 1e30f ? slope : 1e30f;  // infinite, it would make the leader's equals NaN
  }

  const Draw& draw_;
  const float top_, slope_;
  float offset_ = 0.0f;
  double best_ = -__builtin_inf();
  int64_t winner_ = 0;
};

inline int64_t draw(const Draw& draw) {
  const Leader leader = find_leader(draw);
  if (!(draw.temperature > 0.0f)) return leader.token;
  Contest contest(draw, leader.logit);
  contest.enter(leader.token);
  for (int64_t at = 0; at < draw.vocabulary; at += kStride) {
    for (uint32_t lanes = contest.may_win(logits_at(draw, at), at); lanes; lanes &= lanes - 1) {
      const int64_t token = at + __builtin_ctz(lanes);
      if (token < draw.vocabulary) contest.enter(token);
    }
  }
  return contest.winner();
}

inline float likelihood(const Draw& draw, int64_t token) {
  const F16 top = set1(find_leader(draw).logit);
  F16 sums[2] = {zero(), zero()};
  int64_t at = 0;
  for (; at + 2 * kStride <= draw.vocabulary; at += 2 * kStride) {
    sums[0] = sums[0] + exponential(load(draw.logits + at) - top);
    sums[1] = sums[1] + exponential(load(draw.logits + at + kStride) - top);
  }
  for (; at < draw.vocabulary; at += kStride) sums[0] = sums[0] + exponential(logits_at(draw, at) - top);
  float own[kStride];
  store(own, exponential(set1(draw.logits[token]) - top));
  return own[0] / sum(sums[0] + sums[1]);
}

}  // namespace
}  // namespace paceline
