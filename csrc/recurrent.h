// Recurrent layers over the states of slots: written once over F16, compiled once per instruction set. The references are
// src/paceline/kernels/recurrent.py, delta.py, mamba2.py and short_conv.py. A state is computed token by token in one order, whether
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
    F16 total = c.conv_bias ? load(c.conv_bias + channel + i) : zero();
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

  // Lets the text begin in `tails`, where the inputs before it are zero, while other parts may read the slot's.
  void begin_apart() {
    memset(tails_, 0, sizeof(float) * static_cast<size_t>((s_.taps - 1) * s_.channels));
    tail_ = tails_;
  }

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

  float *const tails_, *tail_, *const inputs_;
};

inline float softplus(float x) { return x > kSoftplusLinear ? x : __builtin_log1pf(__builtin_expf(x)); }

// Scales a vector to length `to`.
inline void rescale(float* x, int size, float to) {
  F16 squares = zero();
  for (int i = 0; i < size; i += 16) squares = fma(load(x + i), load(x + i), squares);
  const F16 scale = set1(to / __builtin_sqrtf(sum(squares) + kUnitEpsilon));
  for (int i = 0; i < size; i += 16) store(x + i, load(x + i) * scale);
}

// Value heads of one key head, each with a state [key_dim][value_dim]. Columns of a state do not meet, so tokens are
// collected first, and then all of them go through a block of columns while it lies in the nearest cache. Kind derives from
// it and has:
//   prepare(node, to): writes q, k and v of a node to a token's memory, and returns its gates
//   run_columns<N>(j, column): takes all collected tokens through N vectors of columns of the part's value head j
//   finish(node, j): completes a node's output of value head j
template <class Kind> class StateWork : public SlotWork<Kind> {
 public:
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
      if (this->parent_of(node) != reached_) replay(this->parent_of(node));
      collect(node, true);
    }
    run_collected();
  }

 protected:
  using SlotWork<Kind>::c_;
  using SlotWork<Kind>::s_;
  using SlotWork<Kind>::run_;

  struct Token {
    const float *q, *k, *v;  // v [shared][value_dim]
    const float* gates;
    int node;
    bool output, starts;  // whether its output is wanted; whether it starts from the stored state
  };

  // key_head: whose value heads from `first` on, `shared` of them, are the part's.
  StateWork(const RecurrentCall& call, const SlotRun& run, int key_head, int first, int shared, float* scratch)
      : SlotWork<Kind>(call, run, scratch + recurrent_walk_floats(call.shape)), key_head_(key_head), first_(first), shared_(shared),
        state_(call.state + run.slot * s_.state + first * s_.key_dim * s_.value_dim), block_(scratch),
        channels_(scratch + kWidestBlock * s_.key_dim) {}

  const int key_head_, first_, shared_;
  float *const state_, *const block_, *const channels_;  // channels_: q, k, v and gates of each collected token
  Token tokens_[kWalkTokens];
  int count_ = 0, stored_ = 0;  // collected tokens; those that cannot be rejected, after which the state is stored

 private:
  Kind& kind() { return *static_cast<Kind*>(this); }

  void replay(int node) {
    starts_ = node < run_.certain;
    if (starts_) return;
    replay(this->parent_of(node));
    collect(node, false);
  }

  void collect(int node, bool output) {
    float* const q = channels_ + count_ * recurrent_token_floats(s_);
    float *const k = q + s_.key_dim, *const v = k + s_.key_dim;
    tokens_[count_++] = {q, k, v, kind().prepare(node, q), node, output, starts_};
    starts_ = false;
    reached_ = node;
  }

  void run_collected() {
    for (int j = 0; j < shared_; ++j) {
      int column = 0;
      for (; column + 16 * kStateBlock <= s_.value_dim; column += 16 * kStateBlock) kind().template run_columns<kStateBlock>(j, column);
      for (; column < s_.value_dim; column += 16) kind().template run_columns<1>(j, column);
      for (int i = 0; i < count_; ++i) {
        if (tokens_[i].output) kind().finish(tokens_[i].node, j);
      }
    }
    count_ = stored_ = 0;
    starts_ = true;
    reached_ = run_.certain - 1;
  }

  int reached_ = 0;     // the last collected node
  bool starts_ = true;  // whether the next token starts from the stored state
};

// A gated delta net: one key head with its value heads. q has length key_dim ** -0.5, k length 1.
class DeltaWork : public StateWork<DeltaWork> {
 public:
  DeltaWork(const RecurrentCall& call, const SlotRun& run, int key_head, float* scratch)
      : StateWork(call, run, key_head, key_head * shared_of(call), shared_of(call), scratch) {}

  template <class Call> void each_slice(Call call) const {
    const int keys = s_.key_heads * s_.key_dim, values = shared_ * s_.value_dim;
    call(key_head_ * s_.key_dim, s_.key_dim);
    call(keys + key_head_ * s_.key_dim, s_.key_dim);
    call(2 * keys + key_head_ * values, values);
  }

  // Decays of the value heads, and behind those of all heads their betas.
  void compute_gates(int node, float* gates) const {
    const float* raw = c_.gates + static_cast<size_t>(run_.first + node) * c_.gates_stride;
    for (int value = first_; value < first_ + shared_; ++value) {
      gates[value] = __builtin_expf(c_.rate[value] * softplus(raw[s_.value_heads + value] + c_.bias[value]));
      gates[s_.value_heads + value] = 1.0f / (1.0f + __builtin_expf(-raw[value]));
    }
  }

  const float* prepare(int node, float* to) const {
    float *const q = to, *const k = q + s_.key_dim;
    const Taps taps = taps_of(node);
    each_slice([&](int channel, int size) {
      convolve(c_, taps, channel, size, to);
      for (int i = 0; i < size; i += 16) store(to + i, silu(load(to + i)));
      to += size;
    });
    rescale(q, s_.key_dim, 1.0f / __builtin_sqrtf(static_cast<float>(s_.key_dim)));
    rescale(k, s_.key_dim, 1.0f);
    if (node < 0) return applied(node) + s_.channels;
    compute_gates(node, to);
    return to;
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

  // The output of a value head is normed, and multiplied by the gate that lies behind the channels.
  void finish(int node, int j) const {
    const int first = (first_ + j) * s_.value_dim;
    float* to = out(node) + first;
    const float* gate = mixed(node) + s_.channels + first;
    apply_norm(to, Norm{c_.norm, s_.value_dim, c_.epsilon}, s_.value_dim, to);
    for (int i = 0; i < s_.value_dim; i += 16) store(to + i, load(to + i) * silu(load(gate + i)));
  }

 private:
  static int shared_of(const RecurrentCall& call) { return call.shape.value_heads / call.shape.key_heads; }

  // What the stored state holds for a token's k.
  template <int N> void recall(int j, int column, const Token& token, F16 (&recalled)[N]) const {
    const float* line = state_ + j * s_.key_dim * s_.value_dim + column;
    const F16 decay = set1(token.gates[first_ + j]);
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
    const int value = first_ + j, rows = s_.key_dim, stride = s_.value_dim;
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
};

// The step of a head of Mamba-2 at a token. raw: the inputs of the token's steps.
inline float step_of(const RecurrentCall& c, const float* raw, int head) {
  const float step = softplus(raw[head] + c.bias[head]);
  return step < c.least_step ? c.least_step : step;
}

// A Mamba-2 layer: some heads of one group. B is k, C is q, and x is v; the state of a head is [B's width][x's width].
class Mamba2Work : public StateWork<Mamba2Work> {
 public:
  Mamba2Work(const RecurrentCall& call, const SlotRun& run, int part, float* scratch)
      : Mamba2Work(call, run, part / parts_of_group(call), part % parts_of_group(call) * kHeadsOfPart, scratch) {}

  // What the slot keeps is shared by parts, so KeepInputs stores it when all of them have run.
  void run() {
    if (run_.fresh) begin_apart();
    walk();
  }

  const float* prepare(int node, float* to) const {
    const int values = s_.value_heads * s_.value_dim, keys = s_.key_heads * s_.key_dim, key = key_head_ * s_.key_dim;
    const Taps taps = taps_of(node);
    const auto add = [&](int channel, int size) {
      convolve(c_, taps, channel, size, to);
      for (int i = 0; i < size; i += 16) store(to + i, silu(load(to + i)));
      to += size;
    };
    add(values + keys + key, s_.key_dim);
    add(values + key, s_.key_dim);
    add(first_ * s_.value_dim, shared_ * s_.value_dim);
    const float* const raw = node < 0 ? nullptr : c_.gates + static_cast<size_t>(run_.first + node) * c_.gates_stride;
    for (int j = 0; j < shared_; ++j) {
      const int head = first_ + j;
      to[j] = raw ? step_of(c_, raw, head) : applied(node)[s_.channels + head];
      to[shared_ + j] = __builtin_expf(to[j] * c_.rate[head]);
    }
    return to;
  }

  template <int N> void run_columns(int j, int column) const {
    for (const Token *token = tokens_, *end = tokens_ + count_; token < end; ++token) {
      const bool last = token + 1 == end || token[1].starts;
      if (token->starts) walk_columns<N, true>(j, column, *token, last);
      else walk_columns<N, false>(j, column, *token, last);
    }
  }

  void finish(int, int) const {}  // the norm is over the heads of a group: gate_output

 private:
  Mamba2Work(const RecurrentCall& call, const SlotRun& run, int group, int first_of_group, float* scratch)
      : StateWork(call, run, group, group * heads_of_group(call) + first_of_group,
                  heads_of_group(call) - first_of_group < kHeadsOfPart ? heads_of_group(call) - first_of_group : kHeadsOfPart, scratch) {}

  static int heads_of_group(const RecurrentCall& call) { return call.shape.value_heads / call.shape.key_heads; }
  static int parts_of_group(const RecurrentCall& call) { return call.parts / call.shape.key_heads; }

  // Changes columns of the state by a token. Between tokens they lie in the block. Starts: they come from the stored state.
  template <int N, bool Starts>
  void walk_columns(int j, int column, const Token& token, bool last) const {
    const int rows = s_.key_dim, stride = s_.value_dim;
    const bool stored = &token + 1 == tokens_ + stored_;
    const F16 step = set1(token.gates[j]), decay = set1(token.gates[shared_ + j]), skip = set1(c_.skip[first_ + j]);
    const float *const k = token.k, *const q = token.q, *const x = token.v + j * stride + column;
    float *line = state_ + j * rows * stride + column, *block = block_;
    float* const output = token.output ? out(token.node) + (first_ + j) * stride + column : nullptr;
    F16 now[N], change[N], sums[N];
    for (int i = 0; i < N; ++i) {
      change[i] = load(x + 16 * i) * step;
      sums[i] = zero();
    }
    for (int row = 0; row < rows; ++row, line += stride, block += 16 * N) {
      const F16 key = set1(k[row]), query = set1(q[row]);
      for (int i = 0; i < N; ++i) now[i] = fma(key, change[i], (Starts ? load(line + 16 * i) : load(block + 16 * i)) * decay);
      if (stored) for (int i = 0; i < N; ++i) store(line + 16 * i, now[i]);
      if (output) for (int i = 0; i < N; ++i) sums[i] = fma(query, now[i], sums[i]);
      if (!last) for (int i = 0; i < N; ++i) store(block + 16 * i, now[i]);
    }
    if (output) for (int i = 0; i < N; ++i) store(output + 16 * i, fma(load(x + 16 * i), skip, sums[i]));
  }
};

// What a slot keeps of a Mamba-2 layer beside its state: all channels, and the steps of all heads.
class KeepInputs : public SlotWork<KeepInputs> {
 public:
  KeepInputs(const RecurrentCall& call, const SlotRun& run, float* scratch) : SlotWork(call, run, scratch) {}

  template <class Call> void each_slice(Call call) const { call(0, s_.channels); }
  void walk() const {}

  void compute_gates(int node, float* steps) const {
    const float* raw = c_.gates + static_cast<size_t>(run_.first + node) * c_.gates_stride;
    for (int head = 0; head < s_.value_heads; ++head) steps[head] = step_of(c_, raw, head);
  }
};

inline void keep_inputs(const RecurrentCall& call, const SlotRun& run, float* scratch) { KeepInputs(call, run, scratch).run(); }

// A token's output is multiplied by the gate that lies behind the channels, and normed group by group, if there is a norm.
inline void gate_output(const RecurrentCall& call, int token) {
  const RecurrentShape& s = call.shape;
  const int width = s.value_heads * s.value_dim, group = width / s.key_heads;
  float* out = call.out + static_cast<size_t>(token) * call.out_stride;
  const float* gate = call.mixed + static_cast<size_t>(token) * call.mixed_stride + s.channels;
  for (int i = 0; i < width; i += 16) store(out + i, load(out + i) * silu(load(gate + i)));
  for (int first = 0; call.norm && first < width; first += group) {
    apply_norm(out + first, Norm{call.norm + first, group, call.epsilon}, group, out + first);
  }
}

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
  else if (call.shape.kind == kMamba2) Mamba2Work(call, run, part, scratch).run();
  else ShortConvWork(call, run, part, scratch).run();
}

}  // namespace
}  // namespace paceline
