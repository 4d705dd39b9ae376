// Recurrent layers over the states of slots: written once over F16, compiled once per instruction set. The references are
// src/paceline/kernels/recurrent.py, delta.py and short_conv.py. A state is computed token by token in one order, whether
// its tokens are prefilled, decoded or verified, so a token's bits do not depend on that.
#pragma once

#include "body.h"

namespace paceline {
namespace {

constexpr float kUnitEpsilon = 1e-6f;   // of the squared lengths of q and k
constexpr float kSoftplusLinear = 20.0f;  // above it, softplus is its argument

// Causal convolution of `size` channels from `channel` on. path: the last `taps` inputs, oldest first.
inline void convolve(const RecurrentCall& c, const float* const* path, int channel, int size, float* out) {
  const int channels = c.shape.channels;
  for (int i = 0; i < size; i += 16) {
    F16 total = zero();
    for (int t = 0; t < c.shape.taps; ++t) total = fma(load(c.conv + t * channels + channel + i), load(path[t] + channel + i), total);
    store(out + i, total);
  }
}

// One slot's nodes through a part of a recurrent layer, the same for every kind of layer. Kind derives from it and has:
//   each_slice(call): calls call(first channel, size) for the part's channels of the convolution
//   read(path): computes a token up to the state. path: the convolution's inputs that end with its own
//   compute_gates(node, to): what a node gives to the state beside its channels, in the places of all parts
//   apply(state): the token that was read last, through the state. Not called for layers without a state
//   write(node, state): the same, and the node's output
template <class Kind> class SlotWork {
 public:
  void run() {
    if (run_.fresh) clear();
    for (int i = 0; size_ && i < run_.applied; ++i) {
      read_earlier(i);
      kind().apply(state_);
    }
    for (int node = 0; node < run_.certain; ++node) read_and_write(node, state_);
    if (run_.count > run_.certain) try_others();
    store_tail();
    store_inputs();
  }

 protected:
  // size, state_first: of the part's state among the slot's. scratch: recurrent_scratch_floats().
  SlotWork(const RecurrentCall& call, const SlotRun& run, int size, int state_first, float* scratch)
      : c_(call), s_(call.shape), run_(run), size_(size), token_(scratch), gates_(token_ + s_.channels), gates_of_token_(gates_),
        trial_(gates_ + s_.gates), tails_(trial_ + size) {
    const int64_t slot = run.slot;
    state_ = size ? call.state + slot * s_.state + state_first : nullptr;
    tail_ = call.tail + slot * (s_.taps - 1) * s_.channels;
    inputs_ = call.inputs + slot * call.window * s_.input_width();
  }

  float* mixed(int node) const { return c_.mixed + static_cast<size_t>(run_.first + node) * c_.mixed_stride; }
  float* out(int node) const { return c_.out + static_cast<size_t>(run_.first + node) * c_.out_stride; }

  const RecurrentCall& c_;
  const RecurrentShape& s_;
  const SlotRun& run_;
  const int size_;
  float* const token_;  // [channels]: of the token that was read last
  float* const gates_;  // of the node that was read last
  const float* gates_of_token_;

 private:
  Kind& kind() { return *static_cast<Kind*>(this); }

  template <class Call> void each_slice(Call call) { kind().each_slice(call); }

  void copy_slices(const float* from, float* to) {
    each_slice([&](int channel, int size) { memcpy(to + channel, from + channel, sizeof(float) * static_cast<size_t>(size)); });
  }

  // The state and the convolution's inputs before a text.
  void clear() {
    if (size_) memset(state_, 0, sizeof(float) * static_cast<size_t>(size_));
    for (int t = 0; t + 1 < s_.taps; ++t) {
      each_slice([&](int channel, int size) { memset(tail_ + t * s_.channels + channel, 0, sizeof(float) * static_cast<size_t>(size)); });
    }
  }

  // Nodes that may be rejected go on from a copy of the state. A node that does not follow the one before it starts from
  // the stored state again, through its ancestors.
  void try_others() {
    int reached = run_.certain - 1;
    bool copied = false;
    for (int node = run_.certain; node < run_.count; ++node) {
      const int parent = parent_of(node);
      if (size_ && (!copied || parent != reached)) {
        memcpy(trial_, state_, sizeof(float) * static_cast<size_t>(size_));
        copied = true;
        replay(parent);
      }
      read_and_write(node, trial_);
      reached = node;
    }
  }

  void replay(int node) {
    if (node < run_.certain) return;
    replay(parent_of(node));
    read_own(node);
    kind().apply(trial_);
  }

  int parent_of(int node) const { return run_.parents ? static_cast<int>(run_.parents[node] - run_.offset) : node - 1; }

  // The convolution's input `back` places before the text of these nodes: 1 is the last one.
  const float* earlier(int back) const {
    const int place = run_.applied - back;
    return place >= 0 ? inputs_ + place * s_.input_width() : tail_ + (s_.taps - 1 + place) * s_.channels;
  }

  void read_earlier(int index) {
    const float* path[kMostTaps];
    for (int t = 0; t < s_.taps; ++t) path[t] = earlier(run_.applied - index + s_.taps - 1 - t);
    kind().read(path);
    gates_of_token_ = inputs_ + index * s_.input_width() + s_.channels;
  }

  void read_own(int node) {
    const float* path[kMostTaps];
    int at = node, back = 0;
    for (int t = s_.taps - 1; t >= 0; --t) {
      path[t] = at >= 0 ? mixed(at) : earlier(++back);
      if (at >= 0) at = parent_of(at);
    }
    kind().read(path);
    kind().compute_gates(node, gates_);
    gates_of_token_ = gates_;
  }

  void read_and_write(int node, float* state) {
    read_own(node);
    kind().write(node, state);
  }

  // The convolution's inputs before the first node that may be rejected. They may lie where others are stored.
  void store_tail() {
    for (int t = 0; t + 1 < s_.taps; ++t) {
      const int place = run_.certain - (s_.taps - 1) + t;
      copy_slices(place >= 0 ? mixed(place) : earlier(-place), tails_ + t * s_.channels);
    }
    for (int t = 0; t + 1 < s_.taps; ++t) copy_slices(tails_ + t * s_.channels, tail_ + t * s_.channels);
  }

  void store_inputs() {
    for (int node = run_.certain; node < run_.count; ++node) {
      float* to = inputs_ + (node - run_.certain) * s_.input_width();
      copy_slices(mixed(node), to);
      kind().compute_gates(node, to + s_.channels);
    }
  }

  float *const trial_, *const tails_;
  float *state_, *tail_, *inputs_;
};

inline float softplus(float x) { return x > kSoftplusLinear ? x : __builtin_log1pf(__builtin_expf(x)); }

// Scales a vector to length `to`.
inline void rescale(float* x, int size, float to) {
  F16 squares = zero();
  for (int i = 0; i < size; i += 16) squares = fma(load(x + i), load(x + i), squares);
  const F16 scale = set1(to / __builtin_sqrtf(sum(squares) + kUnitEpsilon));
  for (int i = 0; i < size; i += 16) store(x + i, load(x + i) * scale);
}

// One token through N vectors of columns of a value head's state [key_dim][value_dim]. Output: whether it gives its
// output, too. The state is scaled again in the second walk: storing it in the first takes longer than the product.
template <int N, bool Output>
inline void advance_columns(const RecurrentShape& s, float* state, const float* q, const float* k, const float* v, float decay, float beta, float* out) {
  const F16 by = set1(decay), rate = set1(beta);
  F16 sums[N], change[N];
  for (int i = 0; i < N; ++i) sums[i] = zero();
  for (int row = 0; row < s.key_dim; ++row) {
    const float* line = state + row * s.value_dim;
    const F16 key = set1(k[row]);
    for (int i = 0; i < N; ++i) sums[i] = fma(key, load(line + 16 * i) * by, sums[i]);
  }
  for (int i = 0; i < N; ++i) change[i] = (load(v + 16 * i) - sums[i]) * rate;
  for (int i = 0; i < N; ++i) sums[i] = zero();
  for (int row = 0; row < s.key_dim; ++row) {
    float* line = state + row * s.value_dim;
    const F16 key = set1(k[row]), query = set1(Output ? q[row] : 0.0f);
    for (int i = 0; i < N; ++i) {
      const F16 now = fma(key, change[i], load(line + 16 * i) * by);
      store(line + 16 * i, now);
      if (Output) sums[i] = fma(query, now, sums[i]);
    }
  }
  for (int i = 0; Output && i < N; ++i) store(out + 16 * i, sums[i]);
}

// One token through the columns of a value head's state from `at` on, as many as fill blocks -> the first column left.
template <int N>
inline int advance_blocks(const RecurrentShape& s, float* state, const float* q, const float* k, const float* v, float decay, float beta, float* out, int at) {
  for (; at + 16 * N <= s.value_dim; at += 16 * N) {
    if (out) advance_columns<N, true>(s, state + at, q, k, v + at, decay, beta, out + at);
    else advance_columns<N, false>(s, state + at, q, k, v + at, decay, beta, nullptr);
  }
  return at;
}

// One token through a value head's state. out: its output, or null for a token that was read before; the state's bits are
// the same.
inline void advance(const RecurrentShape& s, float* state, const float* q, const float* k, const float* v, float decay, float beta, float* out) {
  const int left = advance_blocks<kStateBlock>(s, state, q, k, v, decay, beta, out, 0);
  advance_blocks<1>(s, state, q, k, v, decay, beta, out, left);
}

// A gated delta net: one key head with its value heads.
class DeltaWork : public SlotWork<DeltaWork> {
 public:
  DeltaWork(const RecurrentCall& call, const SlotRun& run, int key_head, float* scratch)
      : SlotWork(call, run, call.shape.state / call.shape.key_heads, call.shape.state / call.shape.key_heads * key_head, scratch),
        head_(key_head), shared_(s_.value_heads / s_.key_heads), q_(token_), k_(q_ + s_.key_dim), v_(k_ + s_.key_dim) {}

  template <class Call> void each_slice(Call call) const {
    const int keys = s_.key_heads * s_.key_dim, values = shared_ * s_.value_dim;
    call(head_ * s_.key_dim, s_.key_dim);
    call(keys + head_ * s_.key_dim, s_.key_dim);
    call(2 * keys + head_ * values, values);
  }

  // q, of length key_dim ** -0.5, k, of length 1, and v [shared][value_dim].
  void read(const float* const* path) const {
    float* to = token_;
    each_slice([&](int channel, int size) {
      convolve(c_, path, channel, size, to);
      for (int i = 0; i < size; i += 16) store(to + i, silu(load(to + i)));
      to += size;
    });
    rescale(q_, s_.key_dim, 1.0f / __builtin_sqrtf(static_cast<float>(s_.key_dim)));
    rescale(k_, s_.key_dim, 1.0f);
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

  void apply(float* state) const {
    for (int j = 0; j < shared_; ++j) step(j, state, nullptr);
  }

  // The output is normed, and multiplied by the gate that lies behind the channels.
  void write(int node, float* state) const {
    for (int j = 0; j < shared_; ++j) {
      const int first = (head_ * shared_ + j) * s_.value_dim;
      float* to = out(node) + first;
      const float* gate = mixed(node) + s_.channels + first;
      step(j, state, to);
      rms_norm(to, Norm{c_.norm, s_.value_dim, c_.epsilon}, s_.value_dim, to);
      for (int i = 0; i < s_.value_dim; i += 16) store(to + i, load(to + i) * silu(load(gate + i)));
    }
  }

 private:
  void step(int j, float* states, float* to) const {
    const int value = head_ * shared_ + j;
    advance(s_, states + j * s_.key_dim * s_.value_dim, q_, k_, v_ + j * s_.value_dim, gates_of_token_[value],
            gates_of_token_[s_.value_heads + value], to);
  }

  const int head_, shared_;
  float *const q_, *const k_, *const v_;
};

// A short convolution between two gates: some of its channels. A row has B, C and x; the convolution's inputs are B x,
// which take the place of B. Channels do not meet, so their cut into parts does not change a bit.
class ShortConvWork : public SlotWork<ShortConvWork> {
 public:
  ShortConvWork(const RecurrentCall& call, const SlotRun& run, int part, float* scratch)
      : SlotWork(call, run, 0, 0, scratch), first_(bound(part)), width_(bound(part + 1) - first_) {
    for (int node = 0; node < run.count; ++node) {
      float* b = mixed(node) + first_;
      for (int i = 0; i < width_; i += 16) store(b + i, load(b + i) * load(b + 2 * s_.channels + i));
    }
  }

  template <class Call> void each_slice(Call call) const { call(first_, width_); }
  void read(const float* const* path) const { convolve(c_, path, first_, width_, token_); }
  void compute_gates(int, float*) const {}
  void apply(float*) const {}

  void write(int node, float*) const {
    const float* c = mixed(node) + s_.channels + first_;
    for (int i = 0; i < width_; i += 16) store(out(node) + first_ + i, load(token_ + i) * load(c + i));
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
