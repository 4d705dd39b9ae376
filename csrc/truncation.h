// Cuts by the shape of a row's distribution: typical sampling, epsilon, eta, top-n-sigma. src/paceline/core/truncation.py
// defines them and is the reference; sums run over whole numbers, so both compute the same bits.
#pragma once

namespace paceline {
namespace {

constexpr float kDepthScale = 65536.0f;   // units of a depth in sums
constexpr float kSpreadScale = 4096.0f;   // units of a distance in its variance
constexpr float kWidestDistance = 1024.0f;

// Sums over a row's distribution, at temperature.
struct Shape {
  double log_sum;  // of e^-depth
  double mean;     // of the depth
};

inline Shape shape_of(const Draw& draw, const Depths& depths) {
  Total weight;
  int64_t weighted = 0;
  const F16 reach = depths.reach(kWeightless);
  for (int64_t at = 0; at < draw.vocabulary; at += kStride) {
    const F16 logits = logits_at(draw, at);
    if (!depths.any_within(logits, reach)) continue;
    const F16 here = depths.of(logits);
    const I16 masses = mass(here);
    weight.add(masses);
    int32_t mass_of[kStride], depth_of[kStride];
    store(mass_of, masses);
    store(depth_of, round_to_int(min(here, set1(kWeightless)) * set1(kDepthScale)));
    for (int64_t i = 0; i < kStride; ++i) weighted += static_cast<int64_t>(mass_of[i]) * depth_of[i];
  }
  const double sum = static_cast<double>(weight.sum());
  return {std::log(sum * 0x1p-30), static_cast<double>(weighted) / sum * 0x1p-16};
}

// Depth of the least probable token that epsilon and eta keep.
inline float deepest_probable(const Truncation& by, const Shape& shape) {
  const double epsilon = std::log(static_cast<double>(by.epsilon_cutoff)), eta = std::log(static_cast<double>(by.eta_cutoff));
  const double entropy = shape.log_sum + shape.mean, adapted = std::fmin(eta, 0.5 * eta - entropy);
  return static_cast<float>(-std::fmin(std::fmax(epsilon, adapted) + shape.log_sum, 0.0));
}

// Depth that lies n standard deviations of the finite logits below the largest.
inline float deepest_within_spread(const Draw& draw, float top) {
  int64_t count = 0, sum = 0, squares = 0;
  for (int64_t at = 0; at < draw.vocabulary; at += kStride) {
    const F16 distance = set1(top) - logits_at(draw, at);
    const Mask finite = at_most(distance, set1(kLargest));
    count += __builtin_popcount(lanes_of(finite));
    int32_t lanes[kStride];
    store(lanes, only(finite, round_to_int(min(distance, set1(kWidestDistance)) * set1(kSpreadScale))));
    for (int64_t i = 0; i < kStride; ++i) {
      sum += lanes[i];
      squares += static_cast<int64_t>(lanes[i]) * lanes[i];
    }
  }
  const double all = static_cast<double>(count), mean = static_cast<double>(sum) / all;
  const double variance = static_cast<double>(squares) / all - mean * mean;
  const double spread = std::sqrt(std::fmax(variance, 0.0)) * 0x1p-12;
  return static_cast<float>(static_cast<double>(draw.truncation.top_n_sigma) * spread / static_cast<double>(draw.temperature));
}

// Depth of the most likely typical token.
inline float likeliest_typical(const Draw& draw, const Depths& depths, float mean, float radius) {
  F16 least = set1(kMinusInfinity);  // of the negative depths
  for (int64_t at = 0; at < draw.vocabulary; at += kStride) {
    const F16 here = depths.of(logits_at(draw, at));
    const Mask typical = at_most(abs(here - set1(mean)), set1(radius));
    least = max(least, select(typical, zero() - here, set1(kMinusInfinity)));
  }
  return -largest(least);
}

// Distance from the mean depth within which tokens are typical.
inline float typical_radius(const Draw& draw, const Depths& depths, float mean) {
  const DrawScratch& list = draw.scratch;
  const int64_t count = list_within(draw, depths, kWeightless);
  Total weight;
  for (int64_t i = 0; i < count; i += kStride) {
    const F16 here = load(list.depths + i);
    const I16 masses = mass(here);
    weight.add(masses);
    store(list.rest + i, abs(here - set1(mean)));
    store(list.weights + i, masses);
  }
  store(list.rest + count, set1(kInfinity));
  return deepest_within(list, count, nucleus(draw.truncation.typical_p, weight.sum()));
}

// The draw on a copy of the logits from which truncation has cut tokens. The copy lies in the scratch memory.
inline Draw truncated(const Draw& draw) {
  const Truncation& by = draw.truncation;
  const float top = by.any() && draw.temperature > 0.0f ? find_leader(draw).logit : kInfinity;
  if (!finite(top)) return draw;
  const Depths depths(top, draw.temperature);
  float deepest = by.top_n_sigma > 0.0f ? deepest_within_spread(draw, top) : kInfinity;
  float mean = 0.0f, radius = kInfinity;
  if (by.typical_p < 1.0f || by.epsilon_cutoff > 0.0f || by.eta_cutoff > 0.0f) {
    const Shape shape = shape_of(draw, depths);
    deepest = std::fmin(deepest, deepest_probable(by, shape));
    mean = static_cast<float>(shape.mean);
    if (by.typical_p < 1.0f) {
      radius = typical_radius(draw, depths, mean);
      deepest = std::fmax(deepest, likeliest_typical(draw, depths, mean, radius));
    }
  }
  for (int64_t at = 0; at < draw.vocabulary; at += kStride) {
    const F16 logits = logits_at(draw, at), here = depths.of(logits);
    const uint32_t kept = lanes_of(at_most(here, set1(deepest))) & lanes_of(at_most(abs(here - set1(mean)), set1(radius)));
    float lanes[kStride];
    store(lanes, logits);
    for (int64_t i = 0; i < kStride; ++i) draw.scratch.logits[at + i] = kept >> i & 1 ? lanes[i] : kMinusInfinity;
  }
  Draw left = draw;
  left.logits = draw.scratch.logits;
  left.truncation = {};
  return left;
}

}  // namespace
}  // namespace paceline
