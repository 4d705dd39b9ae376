// A gated delta net over the states of slots: written once over F16, compiled once per instruction set. The reference
// is src/paceline/kernels/delta.py. A state is computed token by token in one order, whether its tokens are prefilled,
// decoded or verified, so a token's bits do not depend on that.
#pragma once

#include "body.h"

namespace paceline {
namespace {

constexpr float kUnitEpsilon = 1e-6f;   // of the squared lengths of q and k
constexpr float kSoftplusLinear = 20.0f;  // above it, softplus is its argument

// Inputs of one token for one key head and the value heads that share it, in scratch memory.
struct DeltaToken {
  float* q;  // [key_dim], of length key_dim ** -0.5
  float* k;  // of length 1
  float* v;  // [shared][value_dim]
  const float* gates;  // decay of every value head, then beta of every value head
};

inline float softplus(float x) { return x > kSoftplusLinear ? x : __builtin_log1pf(__builtin_expf(x)); }

// Scales a vector to length `to`.
inline void rescale(float* x, int size, float to) {
  F16 squares = zero();
  for (int i = 0; i < size; i += 16) squares = fma(load(x + i), load(x + i), squares);
  const F16 scale = set1(to / __builtin_sqrtf(sum(squares) + kUnitEpsilon));
  for (int i = 0; i < size; i += 16) store(x + i, load(x + i) * scale);
}

// Causal convolution of `size` channels from `channel` on, and SiLU. path: the last `taps` inputs, oldest first.
inline void convolve(const DeltaCall& c, const float* const* path, int channel, int size, float* out) {
  const int channels = c.shape.channels();
  for (int i = 0; i < size; i += 16) {
    F16 total = zero();
    for (int t = 0; t < c.shape.taps; ++t) total = fma(load(c.conv + t * channels + channel + i), load(path[t] + channel + i), total);
    store(out + i, silu(total));
  }
}

// One token through the state [key_dim][value_dim] of one value head. out: its output, or null for a token that was read
// before; the state's bits are the same.
inline void advance(const DeltaShape& s, float* state, const float* q, const float* k, const float* v, float decay, float beta, float* out) {
  constexpr int kBlock = 4;  // vectors of the state's columns that stay in registers
  const F16 by = set1(decay), rate = set1(beta);
  for (int first = 0; first < s.value_dim; first += 16 * kBlock) {
    const int left = (s.value_dim - first) / 16, vectors = left < kBlock ? left : kBlock;
    F16 sums[kBlock], change[kBlock];
    for (int i = 0; i < vectors; ++i) sums[i] = zero();
    for (int row = 0; row < s.key_dim; ++row) {
      float* line = state + row * s.value_dim + first;
      const F16 key = set1(k[row]);
      for (int i = 0; i < vectors; ++i) {
        const F16 kept = load(line + 16 * i) * by;
        store(line + 16 * i, kept);
        sums[i] = fma(key, kept, sums[i]);
      }
    }
    for (int i = 0; i < vectors; ++i) change[i] = (load(v + first + 16 * i) - sums[i]) * rate;
    for (int i = 0; i < vectors; ++i) sums[i] = zero();
    for (int row = 0; row < s.key_dim; ++row) {
      float* line = state + row * s.value_dim + first;
      const F16 key = set1(k[row]), query = set1(out ? q[row] : 0.0f);
      for (int i = 0; i < vectors; ++i) {
        const F16 now = fma(key, change[i], load(line + 16 * i));
        store(line + 16 * i, now);
        sums[i] = fma(query, now, sums[i]);
      }
    }
    for (int i = 0; out && i < vectors; ++i) store(out + first + 16 * i, sums[i]);
  }
}

// One slot's nodes for one key head.
class DeltaUnit {
 public:
  DeltaUnit(const DeltaCall& call, const SlotRun& run, int key_head, float* scratch)
      : c_(call), s_(call.shape), run_(run), head_(key_head), shared_(s_.value_heads / s_.key_heads), size_(s_.key_dim * s_.value_dim) {
    token_.q = scratch;
    token_.k = token_.q + s_.key_dim;
    token_.v = token_.k + s_.key_dim;
    gates_ = token_.v + shared_ * s_.value_dim;
    trial_ = gates_ + 2 * s_.value_heads;
    tails_ = trial_ + shared_ * size_;
    const int64_t slot = run.slot;
    state_ = call.state + (slot * s_.value_heads + head_ * shared_) * size_;
    tail_ = call.tail + slot * (s_.taps - 1) * s_.channels();
    inputs_ = call.inputs + slot * call.window * s_.input_width();
  }

  void run() {
    if (run_.fresh) clear();
    for (int i = 0; i < run_.applied; ++i) {
      read_earlier(i);
      for (int j = 0; j < shared_; ++j) step(j, state_, nullptr);
    }
    for (int node = 0; node < run_.certain; ++node) read_and_write(node, state_);
    if (run_.count > run_.certain) try_others();
    store_tail();
    store_inputs();
  }

 private:
  // The state and the convolution's inputs before a text.
  void clear() {
    memset(state_, 0, sizeof(float) * static_cast<size_t>(shared_ * size_));
    for (int t = 0; t + 1 < s_.taps; ++t) each_slice([&](int channel, int size) { memset(tail_ + t * s_.channels() + channel, 0, sizeof(float) * static_cast<size_t>(size)); });
  }

  template <class Call> void each_slice(Call call) const {
    const int keys = s_.key_heads * s_.key_dim, values = shared_ * s_.value_dim;
    call(head_ * s_.key_dim, s_.key_dim);
    call(keys + head_ * s_.key_dim, s_.key_dim);
    call(2 * keys + head_ * values, values);
  }

  // Nodes that may be rejected go on from a copy of the state. A node that does not follow the one before it starts from
  // the stored state again, through its ancestors.
  void try_others() {
    int reached = run_.certain - 1;
    bool copied = false;
    for (int node = run_.certain; node < run_.count; ++node) {
      const int parent = parent_of(node);
      if (!copied || parent != reached) {
        memcpy(trial_, state_, sizeof(float) * static_cast<size_t>(shared_ * size_));
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
    for (int j = 0; j < shared_; ++j) step(j, trial_, nullptr);
  }

  int parent_of(int node) const { return run_.parents ? static_cast<int>(run_.parents[node] - run_.offset) : node - 1; }

  const float* mixed(int node) const { return c_.mixed + static_cast<size_t>(run_.first + node) * c_.mixed_stride; }

  // The convolution's input `back` places before the text of these nodes: 1 is the last one.
  const float* earlier(int back) const {
    const int place = run_.applied - back;
    return place >= 0 ? inputs_ + place * s_.input_width() : tail_ + (s_.taps - 1 + place) * s_.channels();
  }

  void read_earlier(int index) {
    const float* path[kMostTaps];
    for (int t = 0; t < s_.taps; ++t) path[t] = earlier(run_.applied - index + s_.taps - 1 - t);
    mix(path);
    token_.gates = inputs_ + index * s_.input_width() + s_.channels();
  }

  void read_own(int node) {
    const float* path[kMostTaps];
    int at = node, back = 0;
    for (int t = s_.taps - 1; t >= 0; --t) {
      path[t] = at >= 0 ? mixed(at) : earlier(++back);
      if (at >= 0) at = parent_of(at);
    }
    mix(path);
    compute_gates(node, gates_);
    token_.gates = gates_;
  }

  void mix(const float* const* path) {
    int part = 0;
    each_slice([&](int channel, int size) {
      float* out = part == 0 ? token_.q : part == 1 ? token_.k : token_.v;
      convolve(c_, path, channel, size, out);
      ++part;
    });
    rescale(token_.q, s_.key_dim, 1.0f / __builtin_sqrtf(static_cast<float>(s_.key_dim)));
    rescale(token_.k, s_.key_dim, 1.0f);
  }

  // Decay and beta of this unit's value heads, in the places of all heads.
  void compute_gates(int node, float* gates) const {
    const float* raw = c_.gates + static_cast<size_t>(run_.first + node) * c_.gates_stride;
    for (int j = 0; j < shared_; ++j) {
      const int value = head_ * shared_ + j;
      gates[value] = __builtin_expf(c_.rate[value] * softplus(raw[s_.value_heads + value] + c_.bias[value]));
      gates[s_.value_heads + value] = 1.0f / (1.0f + __builtin_expf(-raw[value]));
    }
  }

  void step(int j, float* states, float* out) const {
    const int value = head_ * shared_ + j;
    advance(s_, states + j * size_, token_.q, token_.k, token_.v + j * s_.value_dim, token_.gates[value],
            token_.gates[s_.value_heads + value], out);
  }

  // Reads a node and writes its output: normed, and multiplied by the gate that lies behind the channels.
  void read_and_write(int node, float* states) {
    read_own(node);
    for (int j = 0; j < shared_; ++j) {
      const int first = (head_ * shared_ + j) * s_.value_dim;
      float* out = c_.out + static_cast<size_t>(run_.first + node) * c_.out_stride + first;
      const float* gate = mixed(node) + s_.channels() + first;
      step(j, states, out);
      rms_norm(out, Norm{c_.norm, s_.value_dim, c_.epsilon}, s_.value_dim, out);
      for (int i = 0; i < s_.value_dim; i += 16) store(out + i, load(out + i) * silu(load(gate + i)));
    }
  }

  // The convolution's inputs before the first node that may be rejected. They may lie where others are stored.
  void store_tail() {
    for (int t = 0; t + 1 < s_.taps; ++t) {
      const int place = run_.certain - (s_.taps - 1) + t;
      const float* from = place >= 0 ? mixed(place) : earlier(-place);
      float* to = tails_ + t * s_.channels();
      each_slice([&](int channel, int size) { memcpy(to + channel, from + channel, sizeof(float) * static_cast<size_t>(size)); });
    }
    for (int t = 0; t + 1 < s_.taps; ++t) {
      each_slice([&](int channel, int size) {
        memcpy(tail_ + t * s_.channels() + channel, tails_ + t * s_.channels() + channel, sizeof(float) * static_cast<size_t>(size));
      });
    }
  }

  void store_inputs() {
    for (int node = run_.certain; node < run_.count; ++node) {
      float* to = inputs_ + (node - run_.certain) * s_.input_width();
      each_slice([&](int channel, int size) { memcpy(to + channel, mixed(node) + channel, sizeof(float) * static_cast<size_t>(size)); });
      compute_gates(node, to + s_.channels());
    }
  }

  const DeltaCall& c_;
  const DeltaShape& s_;
  const SlotRun& run_;
  const int head_, shared_, size_;
  DeltaToken token_{};
  float *gates_, *trial_, *tails_;
  float *state_, *tail_, *inputs_;
};

inline void delta(const DeltaCall& call, const SlotRun& run, int key_head, float* scratch) { DeltaUnit(call, run, key_head, scratch).run(); }

}  // namespace
}  // namespace paceline
