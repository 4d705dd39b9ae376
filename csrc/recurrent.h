// Recurrent layers over the states of slots: written once over F16, compiled once per instruction set. The references are
// src/paceline/kernels/recurrent.py, delta.py and short_conv.py. A state is computed token by token in one order, whether
// its tokens are prefilled, decoded or verified, so a token's bits do not depend on that.
#pragma once

#include "body.h"

namespace paceline {
namespace {

constexpr float kUnitEpsilon = 1e-6f;   // of the squared lengths of q and k
static_assert(16 * kStateBlock <= kWidestBlock, "a block of columns fits into the scratch");
constexpr float kSoftplusLinear = 20.0f;  // above it, softplus is its argument

// The inputs of a convolution that end with a token's own, oldest first.
struct Taps {
  const float* inputs[kMostTaps];
};

// Causal convolution of `size` channels from `channel` on.
inline void convolve(const RecurrentCall& c, const Taps& taps, int channel, int size, float* out) {
  const int channels = c.shape.channels;
  for (int i = 0; i < size; i += 16) {
    F16 total = zero();
    for (int t = 0; t < c.shape.taps; ++t) total = fma(load(c.conv + t * channels + channel + i), load(taps.inputs[t] + channel + i), total);
    store(out + i, total);
  }
}

// One slot's nodes through a part of a recurrent layer, the same for every kind of layer. Nodes below 0 are the tokens
// before these nodes; -1 is the last one. Kind derives from it and has:
//   each_slice(call): calls call(first channel, size) for the part's channels of the convolution
//   walk(): computes the outputs, and the state after the certain nodes
//   compute_gates(node, to): what a node gives to the state beside its channels, in the places of all parts
template <class Kind> class SlotWork {
 public:
  void run() {
    if (run_.fresh) clear_tail();
    kind().walk();
    store_tail();
    store_inputs();
  }

 protected:
  // tails: memory for taps - 1 inputs of the convolution.
  SlotWork(const RecurrentCall& call, const SlotRun& run, float* tails)
      : c_(call), s_(call.shape), run_(run), tails_(tails), tail_(call.tail + run.slot * (s_.taps - 1) * s_.channels),
        inputs_(call.inputs + run.slot * call.window * s_.input_width()) {}

  float* mixed(int node) const { return c_.mixed + static_cast<size_t>(run_.first + node) * c_.mixed_stride; }
  float* out(int node) const { return c_.out + static_cast<size_t>(run_.first + node) * c_.out_stride; }
  // An input to be applied: node lies in [-applied, 0).
  const float* applied(int node) const { return inputs_ + (run_.applied + node) * s_.input_width(); }
  int parent_of(int node) const {
    return node > 0 && run_.parents ? static_cast<int>(run_.parents[node] - run_.offset) : node - 1;
  }

  Taps taps_of(int node) const {
    Taps taps;
    for (int t = s_.taps - 1; t >= 0; --t, node = parent_of(node)) taps.inputs[t] = input(node);
    return taps;
  }

  const RecurrentCall& c_;
  const RecurrentShape& s_;
  const SlotRun& run_;

 private:
  Kind& kind() { return *static_cast<Kind*>(this); }

  const float* input(int node) const {
    if (node >= 0) return mixed(node);
    return node + run_.applied >= 0 ? applied(node) : tail_ + (s_.taps - 1 + run_.applied + node) * s_.channels;
  }

  void copy_slices(const float* from, float* to) {
    kind().each_slice([&](int channel, int size) { memcpy(to + channel, from + channel, sizeof(float) * static_cast<size_t>(size)); });
  }

  // The convolution's inputs before a text.
  void clear_tail() {
    for (int t = 0; t + 1 < s_.taps; ++t) {
      kind().each_slice([&](int channel, int size) { memset(tail_ + t * s_.channels + channel, 0, sizeof(float) * static_cast<size_t>(size)); });
    }
  }

  // The convolution's inputs before the first node that may be rejected. They may lie where others are stored.
  void store_tail() {
    for (int t = 0; t + 1 < s_.taps; ++t) copy_slices(input(run_.certain - (s_.taps - 1) + t), tails_ + t * s_.channels);
    for (int t = 0; t + 1 < s_.taps; ++t) copy_slices(tails_ + t * s_.channels, tail_ + t * s_.channels);
  }

  void store_inputs() {
    for (int node = run_.certain; node < run_.count; ++node) {
      float* to = inputs_ + (node - run_.certain) * s_.input_width();
      copy_slices(mixed(node), to);
      kind().compute_gates(node, to + s_.channels);
    }
  }

  float *const tails_, *const tail_, *const inputs_;
};

inline float softplus(float x) { return x > kSoftplusLinear ? x : __builtin_log1pf(__builtin_expf(x)); }

// Scales a vector to length `to`.
inline void rescale(float* x, int size, float to) {
  F16 squares = zero();
  for (int i = 0; i < size; i += 16) squares = fma(load(x + i), load(x + i), squares);
  const F16 scale = set1(to / __builtin_sqrtf(sum(squares) + kUnitEpsilon));
  for (int i = 0; i < size; i += 16) store(x + i, load(x + i) * scale);
}

// A gated delta net: one key head with its value heads. Columns of a state do not meet, so tokens are collected first,
// and then all of them go through a block of columns while it lies in the nearest cache.
class DeltaWork : public SlotWork<DeltaWork> {
 public:
  DeltaWork(const RecurrentCall& call, const SlotRun& run, int key_head, float* scratch)
      : SlotWork(call, run, scratch + recurrent_walk_floats(call.shape)), head_(key_head), shared_(s_.value_heads / s_.key_heads),
        state_(call.state + run.slot * s_.state + key_head * shared_ * s_.key_dim * s_.value_dim), block_(scratch),
        channels_(scratch + kWidestBlock * s_.key_dim) {}

  template <class Call> void each_slice(Call call) const {
    const int keys = s_.key_heads * s_.key_dim, values = shared_ * s_.value_dim;
    call(head_ * s_.key_dim, s_.key_dim);
    call(keys + head_ * s_.key_dim, s_.key_dim);
    call(2 * keys + head_ * values, values);
  }

  // Nodes that may be rejected go on in the block, where nothing of them is stored. One that does not follow the token
  // before it starts from the stored state again, through its ancestors.
  void walk() {
    if (run_.fresh) memset(state_, 0, sizeof(float) * static_cast<size_t>(shared_ * s_.key_dim * s_.value_dim));
    for (int node = -run_.applied; node < run_.certain; ++node) {
      if (count_ == kWalkTokens) run_collected();
      collect(node, node >= 0);
      stored_ = count_;
    }
    for (int node = run_.certain; node < run_.count; ++node) {
      if (count_ + node - run_.certain >= kWalkTokens) run_collected();  // its ancestors may be collected before it
      if (parent_of(node) != reached_) replay(parent_of(node));
      collect(node, true);
    }
    run_collected();
  }

  // Decays of the value heads, and behind those of all heads their betas.
  void compute_gates(int node, float* gates) const {
    const float* raw = c_.gates + static_cast<size_t>(run_.first + node) * c_.gates_stride;
    for (int j = 0; j < shared_; ++j) {
      const int value = head_ * shared_ + j;
      gates[value] = __builtin_expf(c_.rate[value] * softplus(raw[s_.value_heads + value] + c_.bias[value]));
      gates[s_.value_heads + value] = 1.0f / (1.0f + __builtin_expf(-raw[value]));
    }
  }

 private:
  struct Token {
    const float *q, *k, *v;  // q has length key_dim ** -0.5, k length 1; v [shared][value_dim]
    const float* gates;
    int node;
    bool output, starts;  // whether its output is wanted; whether it starts from the stored state
  };

  void replay(int node) {
    starts_ = node < run_.certain;
    if (starts_) return;
    replay(parent_of(node));
    collect(node, false);
  }

  void collect(int node, bool output) {
    float* const q = channels_ + count_ * recurrent_token_floats(s_);
    float *const k = q + s_.key_dim, *const v = k + s_.key_dim, *to = q;
    const Taps taps = taps_of(node);
    each_slice([&](int channel, int size) {
      convolve(c_, taps, channel, size, to);
      for (int i = 0; i < size; i += 16) store(to + i, silu(load(to + i)));
      to += size;
    });
    rescale(q, s_.key_dim, 1.0f / __builtin_sqrtf(static_cast<float>(s_.key_dim)));
    rescale(k, s_.key_dim, 1.0f);
    if (node >= 0) compute_gates(node, to);
    tokens_[count_++] = {q, k, v, node >= 0 ? to : applied(node) + s_.channels, node, output, starts_};
    starts_ = false;
    reached_ = node;
  }

  void run_collected() {
    for (int j = 0; j < shared_; ++j) {
      int column = 0;
      for (; column + 16 * kStateBlock <= s_.value_dim; column += 16 * kStateBlock) run_columns<kStateBlock>(j, column);
      for (; column < s_.value_dim; column += 16) run_columns<1>(j, column);
      for (int i = 0; i < count_; ++i) {
        if (tokens_[i].output) finish(tokens_[i].node, (head_ * shared_ + j) * s_.value_dim);
      }
    }
    count_ = stored_ = 0;
    starts_ = true;
    reached_ = run_.certain - 1;
  }

  // All collected tokens through N vectors of columns of value head j.
  template <int N> void run_columns(int j, int column) const {
    F16 recalled[N];
    for (const Token *token = tokens_, *end = tokens_ + count_; token < end; ++token) {
      const Token* const next = token + 1 == end || token[1].starts ? nullptr : token + 1;
      if (token->starts) recall<N>(j, column, *token, recalled);
      if (token->starts) walk_columns<N, true>(j, column, *token, next, recalled);
      else walk_columns<N, false>(j, column, *token, next, recalled);
    }
  }

  // What the stored state holds for a token's k.
  template <int N> void recall(int j, int column, const Token& token, F16 (&recalled)[N]) const {
    const float* line = state_ + j * s_.key_dim * s_.value_dim + column;
    const F16 decay = set1(token.gates[head_ * shared_ + j]);
    for (int i = 0; i < N; ++i) recalled[i] = zero();
    for (int row = 0; row < s_.key_dim; ++row, line += s_.value_dim) {
      const F16 key = set1(token.k[row]);
      for (int i = 0; i < N; ++i) recalled[i] = fma(key, load(line + 16 * i) * decay, recalled[i]);
    }
  }

  // Changes columns of the state by a token, and recalls what they then hold for the next one, or null. Between tokens
  // the columns lie in the block, scaled by the next one's decay. Starts: they come from the stored state.
  template <int N, bool Starts>
  void walk_columns(int j, int column, const Token& token, const Token* next, F16 (&recalled)[N]) const {
    const int value = head_ * shared_ + j, rows = s_.key_dim, stride = s_.value_dim;
    const bool stored = &token + 1 == tokens_ + stored_;
    const float *const k = token.k, *const q = token.q, *const next_k = next ? next->k : k;
    const F16 rate = set1(token.gates[s_.value_heads + value]), decay = set1(token.gates[value]);
    const F16 next_decay = set1(next ? next->gates[value] : 0.0f);
    float *line = state_ + j * rows * stride + column, *block = block_;
    float* const output = token.output ? out(token.node) + value * stride + column : nullptr;
    F16 now[N], change[N], sums[N];
    for (int i = 0; i < N; ++i) {
      change[i] = (load(token.v + j * stride + column + 16 * i) - recalled[i]) * rate;
      sums[i] = recalled[i] = zero();
    }
    for (int row = 0; row < rows; ++row, line += stride, block += 16 * N) {
      const F16 key = set1(k[row]), query = set1(q[row]), next_key = set1(next_k[row]);
      for (int i = 0; i < N; ++i) now[i] = fma(key, change[i], Starts ? load(line + 16 * i) * decay : load(block + 16 * i));
      if (stored) for (int i = 0; i < N; ++i) store(line + 16 * i, now[i]);
      if (output) for (int i = 0; i < N; ++i) sums[i] = fma(query, now[i], sums[i]);
      if (next) for (int i = 0; i < N; ++i) {
        now[i] = now[i] * next_decay;
        store(block + 16 * i, now[i]);
        recalled[i] = fma(next_key, now[i], recalled[i]);
      }
    }
    if (output) for (int i = 0; i < N; ++i) store(output + 16 * i, sums[i]);
  }

  // The output of a value head is normed, and multiplied by the gate that lies behind the channels.
  void finish(int node, int first) const {
    float* to = out(node) + first;
    const float* gate = mixed(node) + s_.channels + first;
    apply_norm(to, Norm{c_.norm, s_.value_dim, c_.epsilon}, s_.value_dim, to);
    for (int i = 0; i < s_.value_dim; i += 16) store(to + i, load(to + i) * silu(load(gate + i)));
  }

  const int head_, shared_;
  float *const state_, *const block_, *const channels_;  // channels_: q, k, v and gates of each collected token
  Token tokens_[kWalkTokens];
  int count_ = 0, stored_ = 0;  // collected tokens; those that cannot be rejected, after which the state is stored
  int reached_ = 0;             // the last collected node
  bool starts_ = true;          // whether the next token starts from the stored state
};

// A short convolution between two gates: some of its channels. A row has B, C and x; the convolution's inputs are B x,
// which take the place of B. Channels do not meet, so their cut into parts does not change a bit.
class ShortConvWork : public SlotWork<ShortConvWork> {
 public:
  ShortConvWork(const RecurrentCall& call, const SlotRun& run, int part, float* scratch)
      : SlotWork(call, run, scratch), first_(bound(part)), width_(bound(part + 1) - first_) {}

  template <class Call> void each_slice(Call call) const { call(first_, width_); }
  void compute_gates(int, float*) const {}

  void walk() const {
    for (int node = 0; node < run_.count; ++node) {
      float *const b = mixed(node) + first_, *const c = b + s_.channels, *const x = c + s_.channels, *const to = out(node) + first_;
      for (int i = 0; i < width_; i += 16) store(b + i, load(b + i) * load(x + i));
      convolve(c_, taps_of(node), first_, width_, to);
      for (int i = 0; i < width_; i += 16) store(to + i, load(to + i) * load(c + i));
    }
  }

 private:
  int bound(int part) const { return 16 * static_cast<int>(static_cast<int64_t>(s_.channels / 16) * part / c_.parts); }

  const int first_, width_;
};

inline void recurrent(const RecurrentCall& call, const SlotRun& run, int part, float* scratch) {
  if (call.shape.kind == kDeltaNet) DeltaWork(call, run, part, scratch).run();
  else ShortConvWork(call, run, part, scratch).run();
}

}  // namespace
}  // namespace paceline
