// A mixture of experts: each token runs through the few experts that its router scores highest.
#pragma once

#include <cstdint>
#include <vector>

#include "model.h"

namespace paceline {

// The pairs of a token and one of its experts, sorted by expert. Pair i is the expert of rank i % used of token i / used.
class PairsByExpert {
 public:
  void grow(int experts, int pairs);
  void sort(const int32_t* chosen, int pairs, int experts);

  int first(int expert) const { return starts_[static_cast<size_t>(expert)]; }  // place of an expert's first pair
  int rows(int expert) const { return first(expert + 1) - first(expert); }
  int pair(int place) const { return pairs_[static_cast<size_t>(place)]; }
  int place(int pair) const { return places_[static_cast<size_t>(pair)]; }
  int distinct() const { return distinct_; }  // experts with a pair

 private:
  std::vector<int> starts_, pairs_, places_;
  int distinct_ = 0;
};

// The memory of a mixture, reused from layer to layer.
struct ExpertBuffers {
  Buffer normed, latent, scores, values, chosen, weights, activated, outputs;
  Quantised rows;                     // of all pairs, sorted by expert
  std::vector<PairsByExpert> sorted;  // one per thread: sorting is cheaper than waiting for another thread

  void grow(const Experts& experts, int threads, int tokens, int padded_width);
};

// One layer's mixture in a forward pass; every thread calls the functions in this order. A token's outputs are added in
// the order of its experts' ranks, and a row of a product has the same bits whatever rows share its expert, so the result
// of a token does not depend on others.
class ExpertsStep {
 public:
  ExpertsStep(const Experts& experts, const Kernels& kernels, Pool& pool, ExpertBuffers& buffers, Epilogue gated, int tokens, int stride)
      : e_(experts), k_(kernels), pool_(pool), b_(buffers), gated_(gated), tokens_(tokens), stride_(static_cast<size_t>(stride)) {}

  // The normed input of a token [stride], which the caller fills before all threads meet: of the router, then of the experts.
  float* input(int token) const { return b_.normed.as<float>() + static_cast<size_t>(token) * stride_; }
  // What the experts read of a token [inner_stride()], where their width is not the model's; then the sum of their outputs.
  float* latent(int token) const { return b_.latent.as<float>() + static_cast<size_t>(token) * inner_stride(); }
  // Chooses every token's experts and sorts the pairs.
  void route(int thread) const;
  // The products of all pairs.
  void multiply(int thread) const;
  // The sum of a token's weighted outputs -> out [inner_stride()].
  void sum(int token, int thread, float* out) const;
  // The score of the gate of the shared MLP's output.
  float shared_score(int token) const { return scores(token)[e_.count]; }
  int distinct(int thread) const { return sorted(thread).distinct(); }
  size_t inner_stride() const { return has_latent() ? static_cast<size_t>(e_.gate_up->inputs) : stride_; }
  bool has_latent() const { return e_.latent_in.weights; }

 private:
  int pairs() const { return tokens_ * e_.used; }
  float* scores(int token) const { return b_.scores.as<float>() + static_cast<size_t>(token) * static_cast<size_t>(padded(e_.router.outputs, kRouterPanel)); }
  const PairsByExpert& sorted(int thread) const { return b_.sorted[static_cast<size_t>(thread)]; }
  void choose(int token) const;
  void drop_groups(float* values) const;
  double share_of(const float* scores, const float* values, int best) const;
  void quantise(const float* x, size_t stride, bool by_token, const Linear* consumers, int thread) const;
  void product(const Linear* experts, Epilogue epilogue, float* out, size_t out_stride, int thread) const;

  const Experts& e_;
  const Kernels& k_;
  Pool& pool_;
  ExpertBuffers& b_;
  const Epilogue gated_;
  const int tokens_;
  const size_t stride_;
};

}  // namespace paceline
