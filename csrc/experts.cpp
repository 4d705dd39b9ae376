#include "experts.h"
#include "old_glibc.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace paceline {
namespace {

int clamped_quotient(int value, int divisor, int most) { return std::clamp((value + divisor - 1) / divisor, 0, most); }

}  // namespace

void PairsByExpert::grow(int experts, int pairs) {
  const size_t count = static_cast<size_t>(pairs);
  starts_.resize(std::max(starts_.size(), static_cast<size_t>(experts) + 1));
  pairs_.resize(std::max(pairs_.size(), count));
  places_.resize(std::max(places_.size(), count));
}

void PairsByExpert::sort(const int32_t* chosen, int pairs, int experts) {
  std::fill(starts_.begin(), starts_.begin() + experts + 1, 0);
  for (int i = 0; i < pairs; ++i) ++starts_[static_cast<size_t>(chosen[i])];
  distinct_ = 0;
  int next = 0;
  for (int e = 0; e < experts; ++e) {  // now the ends: each pair from the last one on takes the place before
    const int rows = starts_[static_cast<size_t>(e)];
    distinct_ += rows > 0;
    next += rows;
    starts_[static_cast<size_t>(e)] = next;
  }
  starts_[static_cast<size_t>(experts)] = pairs;
  for (int i = pairs - 1; i >= 0; --i) {
    const int place = --starts_[static_cast<size_t>(chosen[i])];
    pairs_[static_cast<size_t>(place)] = i;
    places_[static_cast<size_t>(i)] = place;
  }
}

void ExpertBuffers::grow(const Experts& e, int threads, int tokens, int padded_width) {
  const int pairs = tokens * e.used;
  const size_t t = static_cast<size_t>(tokens), p = static_cast<size_t>(pairs), width = static_cast<size_t>(padded_width);
  normed.grow(sizeof(float) * t * width);
  if (e.latent_in.weights) latent.grow(sizeof(float) * t * static_cast<size_t>(e.gate_up->inputs));
  scores.grow(sizeof(float) * t * static_cast<size_t>(padded(e.router.outputs, kRouterPanel)));
  values.grow(sizeof(float) * t * static_cast<size_t>(e.count + e.groups));
  chosen.grow(sizeof(int32_t) * p);
  weights.grow(sizeof(float) * p);
  activated.grow(sizeof(float) * p * static_cast<size_t>(e.down->inputs));
  outputs.grow(sizeof(float) * p * width);
  rows.grow(pairs + kRowMultiple, std::max(e.gate_up->inputs, e.down->inputs));  // the last expert's rows are padded, too
  if (static_cast<int>(sorted.size()) < threads) sorted.resize(static_cast<size_t>(threads));
  for (PairsByExpert& by : sorted) by.grow(e.count, pairs);
}

void ExpertsStep::route(int thread) const {
  const Share panels(padded(e_.router.outputs, kRouterPanel) / kRouterPanel, thread, pool_.threads());
  for (int panel = panels.first; panel < panels.last; ++panel) {
    k_.route(e_.router, b_.normed.as<float>(), tokens_, stride_, panel, scores(0));
  }
  pool_.meet();
  const Share tokens(tokens_, thread, pool_.threads());
  for (int i = tokens.first; i < tokens.last; ++i) choose(i);
  pool_.meet();
  b_.sorted[static_cast<size_t>(thread)].sort(b_.chosen.as<int32_t>(), pairs(), e_.count);
}

constexpr float kNever = -std::numeric_limits<float>::infinity();

// The experts with the highest values, the first of equal ones, and the weights of their outputs. Exponentials are
// computed in double, so that the weights do not depend on a library's rounding of floats.
void ExpertsStep::choose(int token) const {
  const float* s = scores(token);
  float* values = b_.values.as<float>() + token * (e_.count + e_.groups);
  int32_t* chosen = b_.chosen.as<int32_t>() + token * e_.used;
  float* weights = b_.weights.as<float>() + token * e_.used;
  const float top = *std::max_element(s, s + e_.count);
  const auto chance = [&](int e) {  // of a softmax, times the sum of all
    return e_.sigmoid ? 1.0 / (1.0 + std::exp(-static_cast<double>(s[e]))) : std::exp(static_cast<double>(s[e] - top));
  };
  double all = e_.sigmoid ? 1.0 : 0.0, own = 0.0;
  if (!e_.sigmoid && (e_.correction || !e_.normalised)) for (int e = 0; e < e_.count; ++e) all += chance(e);
  for (int e = 0; e < e_.count; ++e) values[e] = e_.correction ? static_cast<float>(chance(e) / all) + e_.correction[e] : s[e];
  if (e_.groups > 1) drop_groups(values);
  for (int rank = 0; rank < e_.used; ++rank) {
    const int best = static_cast<int>(std::max_element(values, values + e_.count) - values);
    const double weight = e_.margin > 0.0f ? share_of(s, values, best) : chance(best);
    chosen[rank] = best;
    weights[rank] = static_cast<float>(weight);
    own += weight;
    values[best] = kNever;
  }
  for (int rank = 0; rank < e_.used; ++rank) {
    if (!(e_.margin > 0.0f)) weights[rank] = static_cast<float>(static_cast<double>(weights[rank]) / (e_.normalised ? own : all));
    if (e_.factors) weights[rank] *= e_.factors[chosen[rank]];
  }
}

// The share of the best expert in a softmax over those that were not chosen before and are within the margin below it.
double ExpertsStep::share_of(const float* scores, const float* values, int best) const {
  const float top = values[best];
  double total = 0.0;
  for (int e = 0; e < e_.count; ++e) {
    const bool near = (top - scores[e]) / std::max(std::fabs(scores[e]), top) <= e_.margin;
    if (near && values[e] != kNever) total += std::exp(static_cast<double>(values[e] - top));
  }
  return 1.0 / total;
}

// Leaves the groups whose highest values, one or two, have the largest sums, the first of equal ones.
void ExpertsStep::drop_groups(float* values) const {
  const int size = e_.count / e_.groups;
  float* totals = values + e_.count;
  for (int g = 0; g < e_.groups; ++g) {
    float first = kNever, second = kNever;
    for (int e = g * size; e < (g + 1) * size; ++e) {
      second = std::max(second, std::min(first, values[e]));
      first = std::max(first, values[e]);
    }
    totals[g] = size > 1 && e_.group_best > 1 ? first + second : first;
  }
  for (int g = 0; g < e_.groups; ++g) {
    int better = 0;
    for (int other = 0; other < e_.groups; ++other) better += totals[other] > totals[g] || (totals[other] == totals[g] && other < g);
    if (better >= e_.used_groups) std::fill(values + g * size, values + (g + 1) * size, kNever);
  }
}

void ExpertsStep::multiply(int thread) const {
  const size_t inner = static_cast<size_t>(e_.down->inputs);
  quantise(has_latent() ? latent(0) : input(0), inner_stride(), true, e_.gate_up, thread);
  product(e_.gate_up, gated_, b_.activated.as<float>(), inner, thread);
  quantise(b_.activated.as<float>(), inner, false, e_.down, thread);
  product(e_.down, Epilogue::kStore, b_.outputs.as<float>(), inner_stride(), thread);
}

// by_token: whether x has a row per token, not per place.
void ExpertsStep::quantise(const float* x, size_t stride, bool by_token, const Linear* consumers, int thread) const {
  const Share share(pairs(), thread, pool_.threads());
  for (int place = share.first; place < share.last; ++place) {
    const int pair = sorted(thread).pair(place), row = by_token ? pair / e_.used : place;
    const Linear& consumer = consumers[b_.chosen.as<int32_t>()[pair]];
    k_.quantise(x + stride * static_cast<size_t>(row), nullptr, consumer, b_.rows.view.from_row(place), {0, 1});
  }
  pool_.meet();
}

// Threads share the panels of all experts that have rows; those of a node, its panels of each expert. The panels of an expert count once for every kRowMultiple rows:
// the products of fewer wait for memory.
void ExpertsStep::product(const Linear* experts, Epilogue epilogue, float* out, size_t out_stride, int thread) const {
  const PairsByExpert& by = sorted(thread);
  const Range own = pool_.of_node(panels(experts->outputs), thread);
  const int count = own.last - own.first;
  const auto passes = [&](int expert) { return (by.rows(expert) + kRowMultiple - 1) / kRowMultiple; };
  int total = 0;
  for (int expert = 0; expert < e_.count; ++expert) total += passes(expert) * count;
  pool_.share_out(Range{0, total}, thread, [&](Range chunk) {
    for (int expert = 0, before = 0; expert < e_.count && before < chunk.last; before += passes(expert++) * count) {
      if (!by.rows(expert)) continue;
      const int first = clamped_quotient(std::max(0, chunk.first - before), passes(expert), count);
      const int last = clamped_quotient(std::max(0, chunk.last - before), passes(expert), count);
      if (first >= last) continue;
      const int row = by.first(expert);
      const LinearCall call = {experts + expert, b_.rows.view.from_row(row), by.rows(expert), epilogue,
                               out + out_stride * static_cast<size_t>(row), out_stride};
      k_.linear(call, own.first + first, own.first + last);
    }
  });
  pool_.meet();
}

void ExpertsStep::sum(int token, int thread, float* out) const {
  const size_t stride = inner_stride();
  std::fill(out, out + stride, 0.0f);
  for (int rank = 0; rank < e_.used; ++rank) {
    const int pair = token * e_.used + rank;
    const float* row = b_.outputs.as<float>() + stride * static_cast<size_t>(sorted(thread).place(pair));
    k_.accumulate(row, b_.weights.as<float>()[pair], static_cast<int>(stride), out);
  }
}

}  // namespace paceline
