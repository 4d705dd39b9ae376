// The whole forward pass in one job of the pool: no thread leaves it between layers.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "experts.h"
#include "old_glibc.h"

namespace paceline {
namespace {

constexpr int kChunk = 256;          // tokens per pass: bounds the buffers; each pass reads the weights once
constexpr int kRedundant = 16384;    // up to this number of values every thread prepares all rows itself: cheaper than a barrier
constexpr int kItemsAThread = 4, kRowsOfPart = 32;  // of a product with many rows: see row_parts
constexpr int kQueriesPerUnit = 48;  // attention: enough to share a key tile, few enough to divide the work

// Tokens of one row that attend in one call.
struct Unit {
  int64_t row;
  int first, count;
};

std::vector<Unit> cut_into_units(const Tokens& tokens, int most) {
  std::vector<Unit> units;
  for (int i = 0; i < tokens.count; ++i) {
    const bool joins = !units.empty() && units.back().row == tokens.rows[i] && units.back().count < most;
    if (joins) ++units.back().count;
    else units.push_back({tokens.rows[i], i, 1});
  }
  return units;
}

// The path of every token from its row's text. While slots equal positions, a token needs no list of slots.
class Paths {
 public:
  explicit Paths(const Tokens& tokens) {
    if (!tokens.parents) return;
    const size_t count = static_cast<size_t>(tokens.count);
    paths_.resize(count);
    std::vector<int64_t> from(count);
    size_t total = 0;
    for (size_t i = 0; i < count; ++i) {
      const int64_t parent = tokens.parents[i];
      from[i] = parent < 0 ? tokens.positions[i] : from[static_cast<size_t>(parent)];
      total += static_cast<size_t>(tokens.positions[i] - from[i]) + 1;
    }
    slots_.reserve(total);  // pointers into it must stay valid
    for (size_t i = 0; i < count; ++i) {
      const Path* before = tokens.parents[i] < 0 ? nullptr : &paths_[static_cast<size_t>(tokens.parents[i])];
      const int64_t* start = slots_.data() + slots_.size();
      for (int64_t p = from[i]; p < tokens.positions[i]; ++p) slots_.push_back(before->slots[p - from[i]]);
      slots_.push_back(tokens.slots[i]);
      paths_[i] = {from[i], tokens.positions[i], start};
    }
    for (Path& path : paths_) straighten(path);
  }
  const Path* of(int token) const { return paths_.empty() ? nullptr : paths_.data() + token; }

 private:
  static void straighten(Path& path) {
    while (path.from <= path.last && *path.slots == path.from) {
      ++path.from;
      ++path.slots;
    }
    if (path.from > path.last) path.from = INT64_MAX;
  }

  std::vector<Path> paths_;
  std::vector<int64_t> slots_;
};

// Tokens of one adapter that follow each other.
struct AdapterRun {
  int first, count;
  int32_t adapter;  // from 0 on
};

std::vector<AdapterRun> adapter_runs(const Tokens& tokens, const int32_t* adapter_of) {
  std::vector<AdapterRun> runs;
  for (int i = 0; i < tokens.count; ++i) {
    const int32_t adapter = adapter_of[tokens.rows[i]] - 1;
    if (adapter < 0) continue;
    const bool joins = !runs.empty() && runs.back().adapter == adapter && runs.back().first + runs.back().count == i;
    if (joins) ++runs.back().count;
    else runs.push_back({i, 1, adapter});
  }
  return runs;
}

// The slots of a pass of a model with recurrent layers. text: whether none of its tokens can be rejected.
std::vector<SlotRun> runs_of(const Tokens& tokens, int offset, const Cache& cache, bool text) {
  std::vector<SlotRun> runs;
  for (int i = 0; i < tokens.count; ++i) {
    if (!runs.empty() && runs.back().slot == tokens.rows[i]) {
      ++runs.back().count;
      continue;
    }
    const int64_t slot = tokens.rows[i], start = tokens.positions[i];
    const int applied = start == 0 ? 0 : static_cast<int>(start - cache.base[slot]);
    runs.push_back({i, 1, slot, applied, 0, start == 0, tokens.parents ? tokens.parents + i : nullptr, offset + i});
  }
  for (SlotRun& run : runs) run.certain = text ? run.count : std::max(1, run.count - static_cast<int>(cache.window));
  return runs;
}

// What adapters add to the outputs of a linear layer.
struct Changes {
  const LowRank* by_adapter = nullptr;      // null: nothing
  const float* const* of_rows = nullptr;    // LinearCall::changes
};

class Stopwatch {
 public:
  explicit Stopwatch(double* seconds) : seconds_(seconds), last_(seconds ? now() : 0.0) {}
  void lap(Phase phase) {
    if (!seconds_) return;
    const double t = now();
    seconds_[phase] += t - last_;
    last_ = t;
  }

 private:
  static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
  double* seconds_;
  double last_;
};

// The end of the chunk that begins at `start`. A slot's tokens stay together where they can: recurrent layers may have to
// reject all of them.
int chunk_end(const Tokens& tokens, int start) {
  const int limit = std::min(start + kChunk, tokens.count);
  int end = limit;
  while (end < tokens.count && end > start && tokens.rows[end] == tokens.rows[end - 1]) --end;
  return end > start ? end : limit;
}

// Parts into which the rows of a product are cut where it has too few panels for the threads, so that many cores share the
// arithmetic of a long prompt. Its weights then come from memory once, and from the cache to the other parts.
int row_parts(int panels, int rows, int threads) { return std::clamp(kItemsAThread * threads / panels, 1, std::max(1, rows / kRowsOfPart)); }

// Whether layers behind the last one that writes keys, values or states are tapped.
bool reads_beyond(const Model& model, const PassOutputs& out) {
  const auto deepest = std::max_element(out.taps, out.taps + out.tap_count);
  return out.tap_count > 0 && *deepest > model.last_writer;
}

}  // namespace

class Pass {
 public:
  // first: the layer to begin with. Unless it is 0, the states that enter it are in place.
  Pass(Model& model, Pool& pool, const Tokens& tokens, int offset, const Path* paths, const Cache& cache, const PassOutputs& out,
       double* seconds, int first = 0)
      : m_(model), k_(model.kernels), s_(model.spec), pool_(pool), tokens_(tokens), paths_(paths), cache_(cache), out_(out),
        seconds_(seconds), first_(static_cast<size_t>(first)) {
    if (s_.recurrent.kind) runs_ = runs_of(tokens, offset, cache, !out.hidden);
    if (s_.adapters) adapted_ = adapter_runs(tokens, cache.adapter_of);
    units_ = cut_into_units(tokens, std::max(1, kQueriesPerUnit / m_.queries_per_key));
    const size_t counters = 2 * m_.layers.size() * static_cast<size_t>(pool.teams());  // of attention, then of recurrent layers
    if (m_.next_unit_.size() < counters) m_.next_unit_ = std::vector<std::atomic<int>>(counters);
    for (auto& next : m_.next_unit_) next.store(0, std::memory_order_relaxed);
  }

  static void job(void* self, int thread) noexcept { static_cast<Pass*>(self)->run(thread); }
  static void inject_job(void* self, int thread) noexcept { static_cast<Pass*>(self)->inject(thread); }

  // Notes what the slots of recurrent layers hold, once all layers have run.
  void commit() const {
    for (const SlotRun& run : runs_) {
      cache_.base[run.slot] = tokens_.positions[run.first] + run.certain;
      cache_.count[run.slot] = run.count - run.certain;
    }
  }

 private:
  void run(int thread) const {
    Stopwatch watch(thread == 0 ? seconds_ : nullptr);
    if (first_ == 0) embed(thread);
    watch.lap(kEmbed);
    for (size_t layer = first_; layer < m_.layers.size(); ++layer) {
      tap(layer, thread);
      run_layer(layer, thread, watch);
      if (ends_with(layer)) return;
    }
    tap(m_.layers.size(), thread);
    const Share share(tokens_.count, thread, pool_.threads());
    float* normed = m_.scratch_[static_cast<size_t>(thread)]->normed.as<float>();
    for (int i = share.first; i < share.last; ++i) {
      k_.apply_norm(residual(i), norm(s_.final_norm), m_.padded_width, normed);
      tap_token(m_.layers.size() + 1, i, normed);
      if (!out_.hidden || i < out_.text) continue;
      std::memcpy(out_.hidden + static_cast<size_t>(i - out_.text) * static_cast<size_t>(s_.width), normed, sizeof(float) * static_cast<size_t>(s_.width));
    }
    watch.lap(kPrepare);
  }

  // Keys and values of every layer, from the states that enter: the same ones for all layers, so they are quantised once.
  void inject(int thread) const {
    const Share share(tokens_.count, thread, pool_.threads());
    for (int i = share.first; i < share.last; ++i) enter(i);
    pool_.meet();
    const auto input = prepare(m_.residual_.as<float>(), m_.padded_width, nullptr, m_.layers[0].qkv, thread);
    for (const Layer& layer : m_.layers) {
      Attention keys = describe(layer);
      const int queries = layer.heads * layer.dim, first = queries / kPanel;
      const LinearCall call = {&layer.qkv, input, tokens_.count, Epilogue::kStore, keys.qkv, keys.qkv_stride, 0.0f, nullptr};
      pool_.share_out(panels(layer.qkv.outputs) - first, thread, [&](Range chunk) { k_.linear(call, first + chunk.first, first + chunk.last); });
      pool_.meet();
      keys.qkv += queries;
      keys.heads = 0;
      write_keys(layer, keys, thread);
    }
  }

  // Whether the pass ends with the keys and values of this layer: nothing behind them is wanted.
  bool ends_with(size_t layer) const { return layer == static_cast<size_t>(m_.last_writer) && !out_.hidden && !reads_beyond(m_, out_); }

  // Writes the input of a tapped layer; it does not change before all threads have met within the layer.
  void tap(size_t layer, int thread) const {
    const Share share(tokens_.count, thread, pool_.threads());
    for (int i = share.first; i < share.last; ++i) tap_token(layer, i, residual(i));
  }

  void tap_token(size_t layer, int i, const float* from) const {
    const size_t width = static_cast<size_t>(s_.width);
    for (int t = 0; t < out_.tap_count; ++t) {
      if (out_.taps[t] != static_cast<int64_t>(layer)) continue;
      const size_t place = static_cast<size_t>(i) * static_cast<size_t>(out_.tap_count) + static_cast<size_t>(t);
      float* to = out_.features + place * width;
      std::memcpy(to, from, sizeof(float) * width);
      if (s_.tap_scale != 1.0f && layer <= m_.layers.size()) for (size_t j = 0; j < width; ++j) to[j] *= s_.tap_scale;
    }
  }

  void run_layer(size_t index, int thread, Stopwatch& watch) const {
    const Layer& layer = m_.layers[index];
    run_mixers(layer, index, thread, watch);
    if (ends_with(index)) return;
    if (layer.experts || layer.gate_up.weights) run_mlp(layer, thread, watch);
    if (layer.input) add_token_input(layer, index, thread, watch);
  }

  // The layer's parts that look at other tokens. All read the layer's input before anything is added to it.
  void run_mixers(const Layer& layer, size_t index, int thread, Stopwatch& watch) const {
    const bool last = ends_with(index);
    if (layer.recurrent) run_recurrent(layer, index, thread, watch);
    if (layer.qkv.weights) mix(layer, index, last, thread, watch);
    if (last) return;
    if (layer.parallel) read_input(layer, thread, watch);
    if (layer.recurrent) add_recurred(layer, thread, watch);
    if (layer.qkv.weights) add_attended(layer, thread, watch);
  }

  // Keys and values of a layer's attention and, unless `keys_alone`, what its second matrix reads.
  void mix(const Layer& layer, size_t index, bool keys_alone, int thread, Stopwatch& watch) const {
    const int mixed = layer.attended ? layer.attended[s_.ranks->count] : layer.heads * (layer.latent ? layer.latent->value_dim : layer.value_dim);
    clear_padding(m_.attended_, layer.attention_out.inputs, mixed, thread);
    if (layer.latent) run_latent(layer, index, keys_alone, thread, watch);
    else run_attention(layer, index, keys_alone, thread, watch);
  }

  void add_recurred(const Layer& layer, int thread, Stopwatch& watch) const {
    const Linear& second = layer.recurrent->second;
    const auto input = prepare(m_.recurred_.as<float>(), second.inputs, nullptr, second, thread);
    watch.lap(kPrepare);
    add(second, input, layer.attention_out_norm, thread, watch);
  }

  void add_attended(const Layer& layer, int thread, Stopwatch& watch) const {
    const auto input = prepare(m_.attended_.as<float>(), layer.attention_out.inputs, nullptr, layer.attention_out, thread);
    const Changes changes = change(layer.changes[kChangedAttentionOut], m_.attended_.as<float>(), nullptr, layer.attention_out, thread);
    watch.lap(kPrepare);
    if (layer.convs) add_convolved(layer.attention_out, input, layer.convs[0], thread, watch);
    else add(layer.attention_out, input, layer.attention_out_norm, thread, watch, nullptr, changes);
  }

  void run_mlp(const Layer& layer, int thread, Stopwatch& watch) const {
    const float* scale = layer.input ? nullptr : layer.scale_out;
    if (!layer.parallel) read_input(layer, thread, watch);
    if (layer.experts) return run_experts(layer, scale, thread, watch);
    const auto input = prepare(m_.activated_.as<float>(), layer.down.inputs, nullptr, layer.down, thread);
    watch.lap(kPrepare);
    if (layer.convs) add_convolved(layer.down, input, layer.convs[1], thread, watch);
    else add(layer.down, input, layer.mlp_out_norm, thread, watch, scale, change_down(layer, thread));
  }

  // What the MLP and the experts make of the hidden states before their last products.
  void read_input(const Layer& layer, int thread, Stopwatch& watch) const {
    if (layer.experts) choose_experts(layer, thread, watch);
    if (layer.gate_up.weights) activate(layer, thread, watch);
  }

  // The first product of an MLP of all tokens.
  void activate(const Layer& layer, int thread, Stopwatch& watch) const {
    const Norm second = norm(layer.post_norm);
    const Norm* before = layer.post_norm ? &second : nullptr;
    const auto input = layer.convs ? convolve(layer.convs[1], second, layer.gate_up, thread)
                                   : prepare(m_.residual_.as<float>(), m_.padded_width, before, layer.gate_up, thread);
    const Changes changes = change(layer.changes[kChangedGateUp], m_.residual_.as<float>(), before, layer.gate_up, thread);
    watch.lap(kPrepare);
    const int activated = layer.activated ? layer.activated[s_.ranks->count] : layer.gate_up.outputs / (layer.plain ? 1 : 2);
    clear_padding(m_.activated_, layer.down.inputs, activated, thread);
    const Epilogue end = layer.plain ? activation_of(layer) : gate_of(layer);
    const size_t stride = static_cast<size_t>(layer.down.inputs);
    multiply(layer.gate_up, input, end, m_.activated_.as<float>() + first_column(layer.activated), stride, thread, changes, layer.shape);
    gather(m_.activated_.as<float>(), stride, layer.activated, thread);
    watch.lap(kProducts);
  }

  Changes change_down(const Layer& layer, int thread) const {
    return change(layer.changes[kChangedDown], m_.activated_.as<float>(), nullptr, layer.down, thread);
  }

  static Epilogue gate_of(const Layer& layer) {
    constexpr Epilogue of[] = {Epilogue::kSwiglu, Epilogue::kGeglu, Epilogue::kClampedSwiglu};
    return of[layer.activation];
  }

  static Epilogue activation_of(const Layer& layer) {
    constexpr Epilogue of[] = {Epilogue::kSilu, Epilogue::kGelu, Epilogue::kStore, Epilogue::kExactGelu, Epilogue::kRelu, Epilogue::kRelu2, Epilogue::kXielu};
    return of[layer.activation];
  }

  ExpertsStep step_of(const Layer& layer) const {
    const Epilogue end = layer.plain ? activation_of(layer) : gate_of(layer);
    return {*layer.experts, k_, pool_, *m_.experts_, end, tokens_.count, m_.padded_width};
  }

  void choose_experts(const Layer& layer, int thread, Stopwatch& watch) const {
    const ExpertsStep step = step_of(layer);
    const Share share(tokens_.count, thread, pool_.threads());
    const size_t stride = static_cast<size_t>(m_.padded_width);
    const ExpertsNorms* norms = layer.experts->norms;
    const auto write_inputs = [&](const float* weight) {  // of the norm, or null
      for (int i = share.first; i < share.last; ++i) {
        if (weight) k_.apply_norm(residual(i), norm(weight), m_.padded_width, step.input(i));
        else std::memcpy(step.input(i), residual(i), sizeof(float) * stride);
      }
      pool_.meet();
    };
    write_inputs(norms ? norms->router : layer.post_norm);
    step.route(thread);
    if (norms) write_inputs(norms->before);
    if (step.has_latent()) {
      const Linear& into = layer.experts->latent_in;
      const auto input = prepare(step.input(0), m_.padded_width, nullptr, into, thread);
      watch.lap(kPrepare);
      multiply(into, input, Epilogue::kStore, step.latent(0), step.inner_stride(), thread);
      watch.lap(kProducts);
    }
    if (thread == 0) m_.experts_read_ += step.distinct(thread);
    watch.lap(kPrepare);
  }

  // Adds a mixture and the MLP beside it, if there is one, to the hidden states, after `read_input`. scale: a factor of the
  // sum, or null.
  void run_experts(const Layer& layer, const float* scale, int thread, Stopwatch& watch) const {
    const ExpertsStep step = step_of(layer);
    const Share share(tokens_.count, thread, pool_.threads());
    const size_t stride = static_cast<size_t>(m_.padded_width);
    const ExpertsNorms* norms = layer.experts->norms;
    const bool shared = layer.gate_up.weights != nullptr;
    if (shared) {
      const auto input = prepare(m_.activated_.as<float>(), layer.down.inputs, nullptr, layer.down, thread);
      watch.lap(kPrepare);
      multiply(layer.down, input, Epilogue::kStore, m_.branch_.as<float>(), stride, thread, change_down(layer, thread));
    }
    step.multiply(thread);
    watch.lap(kProducts);
    if (step.has_latent()) leave_latent(layer.experts->latent_out, step, thread, watch);
    for (int i = share.first; i < share.last; ++i) {
      float* sum = step.input(i);
      if (!step.has_latent()) step.sum(i, thread, sum);
      float* branch = m_.branch_.as<float>() + static_cast<size_t>(i) * stride;
      if (norms) k_.apply_norm(sum, norm(norms->after), m_.padded_width, sum);
      if (shared) {
        if (norms) k_.apply_norm(branch, norm(norms->shared_after), m_.padded_width, branch);
        k_.accumulate(branch, shared_weight(*layer.experts, step, i), m_.padded_width, sum);
      }
      if (layer.mlp_out_norm) k_.apply_norm(sum, norm(layer.mlp_out_norm), m_.padded_width, sum);
      k_.accumulate(sum, 1.0f, m_.padded_width, residual(i));
      if (scale) for (size_t j = 0; j < stride; ++j) residual(i)[j] *= *scale;
    }
    pool_.meet();
    watch.lap(kPrepare);
  }

  // The sums of the experts' outputs -> `input` of the step, in the model's width.
  void leave_latent(const Linear& out, const ExpertsStep& step, int thread, Stopwatch& watch) const {
    const Share share(tokens_.count, thread, pool_.threads());
    for (int i = share.first; i < share.last; ++i) step.sum(i, thread, step.latent(i));
    pool_.meet();
    const auto input = prepare(step.latent(0), out.inputs, nullptr, out, thread);
    watch.lap(kPrepare);
    multiply(out, input, Epilogue::kStore, step.input(0), static_cast<size_t>(m_.padded_width), thread);
    watch.lap(kProducts);
  }

  // The weight of the shared MLP's output: a constant, or the sigmoid of its gate's score. It is computed in double, so
  // that it does not depend on a library's rounding of floats.
  static float shared_weight(const Experts& experts, const ExpertsStep& step, int token) {
    if (experts.router.outputs == experts.count) return experts.shared_scale;
    return static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(step.shared_score(token)))));
  }

  // Adds the part of a layer that reads its tokens' vectors (Gemma 4's per-layer embeddings), and scales the sum.
  void add_token_input(const Layer& layer, size_t index, int thread, Stopwatch& watch) const {
    const TokenInput& part = *layer.input;
    const size_t stride = static_cast<size_t>(part.out.inputs), width = static_cast<size_t>(s_.inputs->width);
    auto input = prepare(m_.residual_.as<float>(), m_.padded_width, nullptr, part.gate, thread);
    watch.lap(kPrepare);
    clear_padding(m_.activated_, part.out.inputs, s_.inputs->width, thread);
    const Epilogue activation = layer.activation == kGeluTanh ? Epilogue::kGelu : Epilogue::kSilu;
    multiply(part.gate, input, activation, m_.activated_.as<float>(), stride, thread);
    watch.lap(kProducts);
    const Share share(tokens_.count, thread, pool_.threads());
    for (int i = share.first; i < share.last; ++i) {
      float* gate = m_.activated_.as<float>() + static_cast<size_t>(i) * stride;
      const float* vector = vectors(i) + index * width;
      for (size_t j = 0; j < width; ++j) gate[j] *= vector[j];
    }
    pool_.meet();
    input = prepare(m_.activated_.as<float>(), part.out.inputs, nullptr, part.out, thread);
    watch.lap(kPrepare);
    add(part.out, input, part.norm, thread, watch, layer.scale_out);
  }

  float* vectors(int i) const { return m_.vectors_.as<float>() + static_cast<size_t>(i) * static_cast<size_t>(padded(s_.inputs->project.outputs, kPanel)); }

  // The vectors of every token for every layer.
  void read_vectors(int thread) const {
    const TokenInputs& from = *s_.inputs;
    const int all = from.project.outputs;
    const auto input = prepare(m_.residual_.as<float>(), m_.padded_width, nullptr, from.project, thread);
    multiply(from.project, input, Epilogue::kStore, m_.vectors_.as<float>(), static_cast<size_t>(padded(all, kPanel)), thread);
    const Share share(tokens_.count, thread, pool_.threads());
    float* stored = m_.scratch_[static_cast<size_t>(thread)]->normed.as<float>();
    for (int i = share.first; i < share.last; ++i) {
      k_.embed(from.table, tokens_.tokens[i], stored);
      float* vector = vectors(i);
      for (int j = 0; j < all; ++j) vector[j] *= from.project_scale;
      for (int first = 0; first < all; first += from.width) {
        k_.apply_norm(vector + first, Norm{from.norm, from.width, s_.epsilon}, from.width, vector + first);
      }
      for (int j = 0; j < all; ++j) vector[j] = (vector[j] + stored[j] * from.table_scale) * from.sum_scale;
    }
    pool_.meet();
  }

  // Adds the product of a layer's part to the hidden states, after a norm (if any) of its own. scale: a factor of the sum,
  // only behind a norm; or null.
  void add(const Linear& linear, const Activations& input, const float* after, int thread, Stopwatch& watch, const float* scale = nullptr,
           const Changes& changes = {}) const {
    const size_t stride = static_cast<size_t>(m_.padded_width);
    const int32_t* edges = s_.ranks ? s_.ranks->hidden : nullptr;
    float* out = (after ? m_.branch_ : m_.residual_).as<float>();
    multiply(linear, input, after ? Epilogue::kStore : Epilogue::kAdd, out + first_column(edges), stride, thread, changes);
    gather(out, stride, edges, thread);
    watch.lap(kProducts);
    if (!after) return;
    const Share share(tokens_.count, thread, pool_.threads());
    for (int i = share.first; i < share.last; ++i) {
      float* branch = m_.branch_.as<float>() + static_cast<size_t>(i) * stride;
      k_.apply_norm(branch, norm(after), m_.padded_width, branch);
      for (size_t j = 0; j < stride; ++j) residual(i)[j] += branch[j];
      if (scale) for (size_t j = 0; j < stride; ++j) residual(i)[j] *= *scale;
    }
    pool_.meet();
    watch.lap(kPrepare);
  }

  // The input of a block's attention or MLP: the normed hidden states, convolved.
  Activations convolve(const BlockConv& conv, const Norm& before, const Linear& consumer, int thread) const {
    const Share share(tokens_.count, thread, pool_.threads());
    const size_t stride = static_cast<size_t>(m_.padded_width);
    float* normed = m_.convolved_.as<float>();
    float* convolved = normed + stride * static_cast<size_t>(tokens_.count);
    for (int i = share.first; i < share.last; ++i) k_.apply_norm(residual(i), before, m_.padded_width, normed + stride * static_cast<size_t>(i));
    pool_.meet();
    const auto input = prepare(normed, m_.padded_width, nullptr, conv.project, thread);
    multiply(conv.project, input, Epilogue::kStore, m_.taps_.as<float>(), tap_stride(conv), thread);
    for (int i = share.first; i < share.last; ++i) {
      float* to = convolved + stride * static_cast<size_t>(i);
      std::memset(to, 0, sizeof(float) * stride);
      add_taps(conv, 0, normed, i, to);
    }
    pool_.meet();
    return prepare(convolved, m_.padded_width, nullptr, consumer, thread);
  }

  // Adds the product of a block's attention or MLP, convolved with the weights that `convolve` made.
  void add_convolved(const Linear& linear, const Activations& input, const BlockConv& conv, int thread, Stopwatch& watch) const {
    multiply(linear, input, Epilogue::kStore, m_.branch_.as<float>(), static_cast<size_t>(m_.padded_width), thread);
    watch.lap(kProducts);
    const Share share(tokens_.count, thread, pool_.threads());
    for (int i = share.first; i < share.last; ++i) add_taps(conv, 1, m_.branch_.as<float>(), i, residual(i));
    pool_.meet();
    watch.lap(kPrepare);
  }

  static size_t tap_stride(const BlockConv& conv) { return static_cast<size_t>(padded(conv.project.outputs, kPanel)); }

  // Adds token i's taps over the tokens of its block to `to`. side: 0 before the part, 1 after it.
  void add_taps(const BlockConv& conv, size_t side, const float* from, int i, float* to) const {
    const size_t stride = static_cast<size_t>(m_.padded_width), width = static_cast<size_t>(s_.width);
    const size_t taps = static_cast<size_t>(conv.taps), group = static_cast<size_t>(conv.group), groups = width / group;
    const float* own = m_.taps_.as<float>() + tap_stride(conv) * static_cast<size_t>(i) + side * taps * groups;
    for (int tap = 0; tap < conv.taps && i >= tap && same_block(i - tap, i); ++tap) {
      const float* x = from + stride * static_cast<size_t>(i - tap);
      const float* base = conv.base + stride * (side * taps + static_cast<size_t>(tap));
      for (size_t g = 0; g < groups; ++g) {
        const float weight = own[static_cast<size_t>(tap) * groups + g];
        for (size_t j = g * group; j < (g + 1) * group; ++j) to[j] += (base[j] + weight) * x[j];
      }
    }
  }

  bool same_block(int i, int j) const { return tokens_.rows[i] == tokens_.rows[j] && (!tokens_.ends || tokens_.ends[i] == tokens_.ends[j]); }

  // Layers write rows of different widths into one buffer, and padding is quantised with a row.
  void clear_padding(const Buffer& rows, int stride, int width, int thread) const {
    const Share share(tokens_.count, thread, pool_.threads());
    for (int i = share.first; i < share.last; ++i) {
      float* row = rows.as<float>() + static_cast<size_t>(i) * static_cast<size_t>(stride);
      std::memset(row + width, 0, sizeof(float) * static_cast<size_t>(stride - width));
    }
  }

  // The states of the recurrent layers, and their outputs.
  void run_recurrent(const Layer& layer, size_t index, int thread, Stopwatch& watch) const {
    const Norm first = norm(layer.input_norm);
    const Recurrent& weights = *layer.recurrent;
    const RecurrentCall call = describe_recurrent(weights);
    const auto project = [&](const Linear& linear, const Buffer& out, size_t stride) {
      const auto input = prepare(m_.residual_.as<float>(), m_.padded_width, &first, linear, thread);
      watch.lap(kPrepare);
      multiply(linear, input, Epilogue::kStore, out.as<float>(), stride, thread);
      watch.lap(kProducts);
    };
    project(weights.first, m_.qkv_, call.mixed_stride);
    if (call.shape.gates) project(weights.gates, m_.gates_, call.gates_stride);
    float* scratch = m_.scratch_[static_cast<size_t>(thread)]->recurrent.as<float>();
    const int count = static_cast<int>(runs_.size()) * call.parts;
    std::atomic<int>& next = m_.next_unit_[(m_.layers.size() + index) * static_cast<size_t>(pool_.teams())];
    for (int i = next++; i < count; i = next++) {
      k_.recurrent(call, runs_[static_cast<size_t>(i / call.parts)], i % call.parts, scratch);
    }
    pool_.meet();
    if (call.shape.kind == kMamba2) {
      const Share slots(static_cast<int>(runs_.size()), thread, pool_.threads());
      for (int i = slots.first; i < slots.last; ++i) k_.keep_inputs(call, runs_[static_cast<size_t>(i)], scratch);
      const Share tokens(tokens_.count, thread, pool_.threads());
      for (int i = tokens.first; i < tokens.last; ++i) k_.gate_output(call, i);
      pool_.meet();
    }
    watch.lap(kAttention);
  }

  int parts_of(const RecurrentShape& s) const {
    if (s.kind == kShortConv) return pool_.threads();
    const int shared = s.value_heads / s.key_heads;
    return s.key_heads * (s.kind == kDeltaNet ? 1 : (shared + kHeadsOfPart - 1) / kHeadsOfPart);
  }

  RecurrentCall describe_recurrent(const Recurrent& weights) const {
    const RecurrentShape& s = s_.recurrent;
    const int64_t slots = weights.place * cache_.rows;
    RecurrentCall call{};
    call.shape = s;
    call.parts = parts_of(s);
    call.conv = weights.conv;
    call.rate = weights.rate;
    call.bias = weights.bias;
    call.norm = weights.norm;
    call.conv_bias = weights.conv_bias;
    call.skip = weights.skip;
    call.epsilon = weights.epsilon;
    call.least_step = weights.least_step;
    call.mixed = m_.qkv_.as<float>();
    call.mixed_stride = static_cast<size_t>(m_.padded_qkv);
    call.gates = m_.gates_.as<float>();
    call.gates_stride = static_cast<size_t>(padded(s.gates, kPanel));
    call.out = m_.recurred_.as<float>();
    call.out_stride = static_cast<size_t>(weights.second.inputs);
    call.state = cache_.state + slots * s.state;
    call.tail = cache_.tail + slots * (s.taps - 1) * s.channels;
    call.inputs = cache_.inputs + slots * cache_.window * s.input_width();
    call.window = cache_.window;
    return call;
  }

  // Keys and values of an attention layer and, unless `keys_alone`, its outputs.
  void run_attention(const Layer& layer, size_t index, bool keys_alone, int thread, Stopwatch& watch) const {
    const Attention attention = describe(layer);
    const Norm first = norm(layer.input_norm);
    float* residual = m_.residual_.as<float>();
    const bool joined = s_.fusion && !s_.fusion->block && !projects() && index == 0;
    const auto input = joined ? prepare(m_.joined_.as<float>(), 2 * m_.padded_width, nullptr, layer.qkv, thread)
                       : layer.convs ? convolve(layer.convs[0], first, layer.qkv, thread)
                              : prepare(residual, m_.padded_width, layer.input_norm ? &first : nullptr, layer.qkv, thread);
    const Changes changes = change(layer.changes[kChangedQkv], residual, layer.input_norm ? &first : nullptr, layer.qkv, thread);
    watch.lap(kPrepare);
    multiply(layer.qkv, input, Epilogue::kStore, attention.qkv, attention.qkv_stride, thread, changes);
    watch.lap(kProducts);
    rotate(layer, attention, thread);
    watch.lap(kRotary);
    if (keys_alone) return;
    attend(attention, index, thread);
    gather(m_.attended_.as<float>(), attention.out_stride, layer.attended, thread);
    watch.lap(kAttention);
  }

  // The same of latent attention.
  void run_latent(const Layer& layer, size_t index, bool keys_alone, int thread, Stopwatch& watch) const {
    const Latent& latent = *layer.latent;
    const Norm first = norm(layer.input_norm);
    const auto input = prepare(m_.residual_.as<float>(), m_.padded_width, layer.input_norm ? &first : nullptr, layer.qkv, thread);
    watch.lap(kPrepare);
    multiply(layer.qkv, input, Epilogue::kStore, m_.qkv_.as<float>(), static_cast<size_t>(m_.padded_qkv), thread);
    watch.lap(kProducts);
    Attention attention = describe(layer);
    attention.qkv = m_.absorbed_.as<float>();
    attention.qkv_stride = absorbed_width(layer);
    write_latent_keys(layer, attention, thread);
    if (!keys_alone) absorb(layer, attention, thread, watch);
    uint8_t* const values = attention.values.data;
    attention.values.data = nullptr;  // they are written with the keys
    rotate(layer, attention, thread);
    watch.lap(kRotary);
    if (keys_alone) return;
    attention.values.data = values;
    attention.out = m_.mixed_.as<float>();
    attention.out_stride = static_cast<size_t>(layer.heads * latent.rank);
    share_key(attention);
    attend(attention, index, thread);
    watch.lap(kAttention);
    multiply_heads(layer, latent.expand, {attention.out, attention.out_stride, static_cast<size_t>(latent.rank), latent.rank},
                   {m_.attended_.as<float>(), static_cast<size_t>(layer.attention_out.inputs), static_cast<size_t>(latent.value_dim), latent.value_dim},
                   thread);
    watch.lap(kProducts);
  }

  // A row of absorbed queries, and of the key behind them.
  static size_t absorbed_width(const Layer& layer) { return static_cast<size_t>((layer.heads + 1) * layer.dim); }

  // The numbers of a token that a layer's first matrix gives: of its queries or their vector.
  static int query_outputs(const Layer& layer) {
    const Latent& latent = *layer.latent;
    return latent.query_rank ? latent.query_rank : layer.heads * (latent.key_dim + latent.rotary_dim);
  }

  // Lays every token's key, before its rotation, behind its absorbed queries.
  void write_latent_keys(const Layer& layer, const Attention& attention, int thread) const {
    const Latent& latent = *layer.latent;
    const Share share(tokens_.count, thread, pool_.threads());
    for (int i = share.first; i < share.last; ++i) {
      const float* vector = m_.qkv_.as<float>() + static_cast<size_t>(i) * static_cast<size_t>(m_.padded_qkv) + query_outputs(layer);
      float* key = attention.qkv + attention.qkv_stride * static_cast<size_t>(i) + layer.heads * layer.dim;
      std::memcpy(key, vector + latent.rank, sizeof(float) * static_cast<size_t>(latent.rotary_dim));
      k_.apply_norm(vector, Norm{latent.norm, latent.rank, latent.epsilon}, latent.rank, key + latent.rotary_dim);
    }
  }

  // The queries of every head, multiplied by the matrix of its keys.
  void absorb(const Layer& layer, const Attention& attention, int thread, Stopwatch& watch) const {
    const Latent& latent = *layer.latent;
    const int query_dim = latent.key_dim + latent.rotary_dim;
    float* queries = m_.qkv_.as<float>();
    size_t stride = static_cast<size_t>(m_.padded_qkv);
    const Share share(tokens_.count, thread, pool_.threads());
    if (latent.query_rank) {
      const Linear& up = latent.query_up;
      const size_t inputs = static_cast<size_t>(up.inputs), rank = static_cast<size_t>(latent.query_rank);
      float* vectors = m_.vectors_of_queries_.as<float>();
      for (int i = share.first; i < share.last; ++i) {
        float* to = vectors + inputs * static_cast<size_t>(i);
        std::memcpy(to, queries + stride * static_cast<size_t>(i), sizeof(float) * rank);
        std::memset(to + rank, 0, sizeof(float) * (inputs - rank));
      }
      pool_.meet();
      const Norm of_vector = {latent.query_norm, latent.query_rank, latent.epsilon};
      const auto input = prepare(vectors, up.inputs, &of_vector, up, thread);
      watch.lap(kPrepare);
      queries = m_.queries_.as<float>();
      stride = static_cast<size_t>(padded(up.outputs, kPanel));
      multiply(up, input, Epilogue::kStore, m_.queries_.as<float>(), stride, thread);
      watch.lap(kProducts);
    }
    for (int i = share.first; i < share.last; ++i) {
      for (int head = 0; head < layer.heads; ++head) {
        const float* query = queries + stride * static_cast<size_t>(i) + head * query_dim;
        float* to = attention.qkv + attention.qkv_stride * static_cast<size_t>(i) + head * layer.dim;
        std::memcpy(to, query + latent.key_dim, sizeof(float) * static_cast<size_t>(latent.rotary_dim));
      }
    }
    multiply_heads(layer, latent.absorb, {queries, stride, static_cast<size_t>(query_dim), latent.key_dim},
                   {attention.qkv + latent.rotary_dim, attention.qkv_stride, static_cast<size_t>(layer.dim), latent.rank}, thread);
    watch.lap(kProducts);
  }

  // Numbers of every token and head: `width` of them from x + stride * token + step * head on.
  struct ByHead {
    float* x;
    size_t stride, step;
    int width;
    float* at(int token, int head) const { return x + stride * static_cast<size_t>(token) + step * static_cast<size_t>(head); }
  };

  // The products of every head with its own matrix. Threads share the panels of all heads.
  void multiply_heads(const Layer& layer, const Linear* matrices, const ByHead& from, const ByHead& to, int thread) const {
    const int tokens = tokens_.count, count = panels(to.width);
    const Share rows(layer.heads * tokens, thread, pool_.threads());
    float* row = m_.scratch_[static_cast<size_t>(thread)]->normed.as<float>();
    for (int i = rows.first; i < rows.last; ++i) {
      const Linear& matrix = matrices[i / tokens];
      std::memcpy(row, from.at(i % tokens, i / tokens), sizeof(float) * static_cast<size_t>(from.width));
      std::memset(row + from.width, 0, sizeof(float) * static_cast<size_t>(matrix.inputs - from.width));
      k_.quantise(row, nullptr, matrix, m_.by_head_.view.from_row(i), {0, 1});
    }
    pool_.meet();
    const Range own = pool_.of_node(count, thread);
    const int width = own.last - own.first;  // panels of each head; 0 where there are more nodes than panels
    pool_.share_out(Range{0, layer.heads * width}, thread, [&](Range chunk) {
      for (int item = chunk.first; item < chunk.last;) {
        const int head = item / width, first = item % width, last = std::min(width, first + chunk.last - item);
        const LinearCall call = {matrices + head, m_.by_head_.view.from_row(head * tokens), tokens, Epilogue::kStore, to.at(0, head), to.stride};
        k_.linear(call, own.first + first, own.first + last);
        item += last - first;
      }
    });
    pool_.meet();
  }

  // Cuts the heads that read one key into groups, as many as threads where that is possible: each is a unit of work.
  void share_key(Attention& attention) const {
    const int wanted = std::max(1, pool_.threads() / static_cast<int>(units_.size()));
    int groups = 1;
    while (groups < attention.heads && (attention.heads % groups || attention.heads / groups > kMaxQueries || groups < wanted)) ++groups;
    attention.kv_heads = groups;
    attention.keys.head_stride = attention.values.head_stride = 0;
  }

  void embed(int thread) const {
    const Share share(tokens_.count, thread, pool_.threads());
    for (int i = share.first; i < share.last; ++i) {
      if (s_.fusion && !s_.fusion->block) join(i);
      else if (tokens_.entering) enter(i);
      else embed_token(i, residual(i));
    }
    pool_.meet();
    if (s_.inputs) read_vectors(thread);
    if (!projects()) return;
    const Linear& fuse = s_.fusion->fuse;
    const auto input = prepare(m_.joined_.as<float>(), 2 * m_.padded_width, nullptr, fuse, thread);
    multiply(fuse, input, Epilogue::kStore, m_.residual_.as<float>(), static_cast<size_t>(m_.padded_width), thread);
  }

  // Whether a head maps what it reads to its first layer's input.
  bool projects() const { return s_.fusion && s_.fusion->embedding_norm; }

  void embed_token(int i, float* out) const {
    read_embedding(i, out);
    if (s_.embed_scale != 1.0f) for (int j = 0; j < m_.padded_width; ++j) out[j] *= s_.embed_scale;
    if (s_.places) {
      const int64_t place = std::min(tokens_.positions[i], s_.positions - 1);  // padding: its result is not used
      const float* added = s_.places + static_cast<size_t>(place) * static_cast<size_t>(m_.padded_width);
      for (int j = 0; j < m_.padded_width; ++j) out[j] += added[j];
    }
    if (s_.embedding_norm) k_.apply_norm(out, norm(s_.embedding_norm), m_.padded_width, out);
  }

  void read_embedding(int i, float* out) const {
    if (!s_.embedding) return k_.embed(s_.head, tokens_.tokens[i], out);
    const uint16_t* from = s_.embedding + static_cast<size_t>(tokens_.tokens[i]) * static_cast<size_t>(m_.padded_width);
    for (int j = 0; j < m_.padded_width; ++j) {
      const uint32_t bits = static_cast<uint32_t>(from[j]) << 16;
      std::memcpy(out + j, &bits, sizeof bits);
    }
  }

  void enter(int i) const {
    const size_t width = static_cast<size_t>(s_.width), stride = static_cast<size_t>(m_.padded_width);
    std::memcpy(residual(i), tokens_.entering + width * static_cast<size_t>(i), sizeof(float) * width);
    std::memset(residual(i) + width, 0, sizeof(float) * (stride - width));
  }

  // A head's first layer reads the normed embedding and, behind it, the normed state that enters.
  void join(int i) const {
    const size_t stride = static_cast<size_t>(m_.padded_width);
    float* embedded = m_.joined_.as<float>() + 2 * stride * static_cast<size_t>(i);
    float* hidden = embedded + stride;
    embed_token(i, embedded);
    k_.apply_norm(embedded, norm(projects() ? s_.fusion->embedding_norm : m_.layers[0].input_norm), m_.padded_width, embedded);
    enter(i);
    k_.apply_norm(residual(i), norm(s_.fusion->hidden_norm), m_.padded_width, hidden);
    if (s_.fusion->normed_residual) std::memcpy(residual(i), hidden, sizeof(float) * stride);
  }

  // Norm (if any) and quantisation of every row. With few rows each thread makes its own copy and need not wait for
  // others.
  Activations prepare(const float* x, int inputs, const Norm* norm, const Linear& consumer, int thread) const {
    const bool redundant = tokens_.count * inputs <= kRedundant;
    const Activations to = redundant ? m_.scratch_[static_cast<size_t>(thread)]->rows.view : m_.shared_.view;
    const Range rows = redundant ? Range{0, tokens_.count} : Share(tokens_.count, thread, pool_.threads());
    k_.quantise(x, norm, consumer, to, rows);
    if (!redundant) pool_.meet();
    return to;
  }

  void multiply(const Linear& linear, const Activations& input, Epilogue epilogue, float* out, size_t stride, int thread,
                const Changes& changes = {}, const float* shape = nullptr) const {
    const int count = panels(linear.outputs), parts = changes.by_adapter ? 1 : row_parts(count, tokens_.count, pool_.threads());
    const auto compute = [&](Range of_panels, Range rows) {
      const size_t first = static_cast<size_t>(rows.first);
      k_.linear(LinearCall{&linear, input.from_row(rows.first), rows.last - rows.first, epilogue, out + stride * first, stride, 0.0f, changes.of_rows, shape},
                of_panels.first, of_panels.last);
    };
    const Range own = pool_.of_node(count, thread);
    pool_.share_out(Range{own.first * parts, own.last * parts}, thread, [&](Range chunk) {
      if (changes.by_adapter) compute_changes(changes.by_adapter, chunk);
      for (int item = chunk.first; item < chunk.last;) {
        const int panel = item / parts, part = item % parts, whole = part ? 0 : (chunk.last - item) / parts;
        const int last = std::min(parts, part + chunk.last - item);
        if (whole) compute({panel, panel + whole}, {0, tokens_.count});
        else compute({panel, panel + 1}, {Share(tokens_.count, part, parts).first, Share(tokens_.count, last, parts).first});
        item += whole ? whole * parts : last - part;
      }
    });
    pool_.meet();
  }

  // The first column that this rank computes; edges: of all ranks, or null.
  size_t first_column(const int32_t* edges) const { return edges ? static_cast<size_t>(edges[s_.ranks->rank]) : 0; }

  // Completes rows of a divided model with what other ranks have computed.
  void gather(float* rows, size_t stride, const int32_t* edges, int thread) const {
    if (edges) m_.exchange_->gather(pool_, thread, rows, tokens_.count, stride, edges);
  }

  // Prepares what adapters add to the outputs of a linear layer. x: its input rows, before `norm` (if any).
  Changes change(const LowRank* by_adapter, const float* x, const Norm* norm, const Linear& linear, int thread) const {
    if (!by_adapter || adapted_.empty()) return {};
    const size_t stride = static_cast<size_t>(linear.inputs);
    float* normed = m_.normed_.as<float>();
    if (norm) {
      const Share share(tokens_.count, thread, pool_.threads());
      for (int i = share.first; i < share.last; ++i) {
        const size_t at = stride * static_cast<size_t>(i);
        if (cache_.adapter_of[tokens_.rows[i]]) k_.apply_norm(x + at, *norm, linear.inputs, normed + at);
      }
      pool_.meet();
      x = normed;
    }
    share_panels(by_adapter, thread, [&](const AdapterRun& run, const LowRank& by, int panel) {
      k_.route(by.down, x + stride * static_cast<size_t>(run.first), run.count, stride, panel, ranks(run));
    });
    pool_.meet();
    auto& changes = m_.scratch_[static_cast<size_t>(thread)]->changes;
    changes.assign(static_cast<size_t>(tokens_.count), nullptr);
    for (const AdapterRun& run : adapted_) {
      const LowRank& by = by_adapter[run.adapter];
      if (!by.down.weights) continue;
      for (int i = 0; i < run.count; ++i) changes[static_cast<size_t>(run.first + i)] = added(run) + static_cast<size_t>(by.up.outputs) * static_cast<size_t>(i);
    }
    return {by_adapter, changes.data()};
  }

  // Computes what is added to some panels of 32 outputs: two of 16.
  void compute_changes(const LowRank* by_adapter, Range chunk) const {
    for (const AdapterRun& run : adapted_) {
      const LowRank& by = by_adapter[run.adapter];
      if (!by.down.weights) continue;
      for (int panel = chunk.first * 2; panel < chunk.last * 2; ++panel) {
        k_.route(by.up, ranks(run), run.count, static_cast<size_t>(by.up.inputs), panel, added(run));
      }
    }
  }

  float* ranks(const AdapterRun& run) const { return m_.ranks_.as<float>() + static_cast<size_t>(run.first) * static_cast<size_t>(m_.widest_rank); }
  float* added(const AdapterRun& run) const { return m_.changes_.as<float>() + static_cast<size_t>(run.first) * static_cast<size_t>(m_.widest_change); }

  // Threads share the panels of all runs' first products.
  template <class Do>
  void share_panels(const LowRank* by_adapter, int thread, Do&& compute) const {
    const auto count = [&](const AdapterRun& run) { return padded(by_adapter[run.adapter].down.outputs, kRouterPanel) / kRouterPanel; };
    int total = 0;
    for (const AdapterRun& run : adapted_) total += count(run);
    const Share share(total, thread, pool_.threads());
    int before = 0;
    for (const AdapterRun& run : adapted_) {
      for (int panel = 0; panel < count(run); ++panel) {
        const int item = before + panel;
        if (share.first <= item && item < share.last) compute(run, by_adapter[run.adapter], panel);
      }
      before += count(run);
    }
  }

  void rotate(const Layer& layer, const Attention& attention, int thread) const {
    Attention own = attention;
    if (layer.reads_only) own.kv_heads = 0;  // it has queries only
    write_keys(layer, own, thread);
  }

  void write_keys(const Layer& layer, const Attention& own, int thread) const {
    const Rotary rotary = {layer.cosine, layer.sine, layer.rotary_half, s_.positions};
    const Share share(tokens_.count, thread, pool_.threads());
    for (int i = share.first; i < share.last; ++i) k_.rotate_and_write(own, rotary, i, tokens_.rows[i]);
    pool_.meet();
  }

  void attend(const Attention& attention, size_t layer, int thread) const {
    float* scratch = m_.scratch_[static_cast<size_t>(thread)]->attention.as<float>();
    const int teams = pool_.teams(), own = pool_.team(thread);
    for (int i = 0; i < teams; ++i) attend_heads(attention, layer, (own + i) % teams, scratch);  // then those of other nodes
    pool_.meet();
  }

  // Attention of the key heads of a node, whose keys and values lie there (NativeModel of src/paceline/models/native/model.py).
  void attend_heads(const Attention& attention, size_t layer, int team, float* scratch) const {
    const Range heads = pool_.of_team(attention.kv_heads, team);
    const int width = heads.last - heads.first, count = static_cast<int>(units_.size()) * width;
    std::atomic<int>& next_unit = m_.next_unit_[layer * static_cast<size_t>(pool_.teams()) + static_cast<size_t>(team)];
    const auto of = [&](int i) { return RowHead{units_[static_cast<size_t>(i / width)].row, heads.first + i % width}; };
    for (int i = count ? next_unit++ : 0, next = i; i < count; i = next) {
      next = next_unit++;
      const Unit& unit = units_[static_cast<size_t>(i / width)];
      const RowHead then = next < count ? of(next) : RowHead{};
      k_.attend(attention, of(i), unit.first, unit.count, scratch, next < count ? &then : nullptr);
    }
  }

  CacheVectors of_layer(CacheVectors vectors, const Layer& layer) const {
    vectors.data += layer.place * vectors.layer_stride * bytes_of(cache_.element);
    return vectors;
  }

  Attention describe(const Layer& layer) const {
    const KVTable& table = cache_.tables[layer.table];
    Attention a{};
    a.qkv = m_.qkv_.as<float>();
    a.qkv_stride = static_cast<size_t>(m_.padded_qkv);
    a.out = m_.attended_.as<float>() + first_column(layer.attended);
    a.out_stride = static_cast<size_t>(layer.attention_out.inputs);
    a.positions = tokens_.positions;
    a.slots = tokens_.slots;
    a.ends = layer.looks_ahead ? tokens_.ends : nullptr;
    a.paths = paths_;
    a.keys = of_layer(table.keys, layer);
    a.values = layer.latent ? a.keys : of_layer(table.values, layer);
    a.element = cache_.element;
    a.heads = layer.heads;
    a.kv_heads = layer.kv_heads;
    a.dim = layer.dim;
    a.value_dim = layer.latent ? layer.latent->rank : layer.value_dim;
    if (layer.latent) a.values.data += layer.latent->rotary_dim * bytes_of(cache_.element);
    a.blocks = blocks_for(cache_.capacity);
    a.capacity = cache_.capacity;
    a.window = layer.window;
    a.scale = layer.scale;
    a.q_norm = layer.q_norm;
    a.k_norm = layer.k_norm;
    a.v_norm = layer.v_norm;
    a.epsilon = s_.epsilon;
    a.gates = layer.gated ? static_cast<size_t>((layer.heads + layer.kv_heads) * layer.dim + layer.kv_heads * layer.value_dim) : 0;
    a.norm_all = layer.norm_all != 0;
    a.sinks = layer.sinks;
    a.norm_after = layer.norm_after != 0;
    a.cap = layer.cap;
    a.balance = cache_.element == kCacheInt8 ? layer.balance : nullptr;
    return a;
  }

  float* residual(int i) const { return m_.residual_.as<float>() + static_cast<size_t>(i) * static_cast<size_t>(m_.padded_width); }
  Norm norm(const float* weight) const { return {weight, s_.width, s_.epsilon, weight && s_.centred ? weight + m_.padded_width : nullptr}; }

  Model& m_;
  const Kernels& k_;
  const ModelSpec& s_;
  Pool& pool_;
  const Tokens& tokens_;
  const Path* const paths_;
  const Cache& cache_;
  const PassOutputs out_;
  double* seconds_;
  size_t first_;
  std::vector<Unit> units_;
  std::vector<SlotRun> runs_;
  std::vector<AdapterRun> adapted_;
};

void Model::grow_latent(const Layer& layer, int tokens) {
  const Latent& latent = *layer.latent;
  const size_t n = static_cast<size_t>(tokens) * sizeof(float);
  if (latent.query_rank) {
    vectors_of_queries_.grow(n * static_cast<size_t>(latent.query_up.inputs));
    queries_.grow(n * static_cast<size_t>(padded(latent.query_up.outputs, kPanel)));
  }
  absorbed_.grow(n * static_cast<size_t>((layer.heads + 1) * layer.dim));
  mixed_.grow(n * static_cast<size_t>(layer.heads * latent.rank));
  by_head_.grow(layer.heads * tokens + kRowMultiple, std::max(latent.absorb->inputs, latent.expand->inputs));
}

void Model::grow(int threads, int tokens) {
  const size_t n = static_cast<size_t>(tokens) * sizeof(float);
  int widest = std::max({padded_width * (spec.fusion ? 2 : 1), padded_attention, padded_recurred, padded_activated,
                               spec.fusion ? spec.fusion->fuse.inputs : 0});
  if (spec.fusion) joined_.grow(n * static_cast<size_t>(std::max(2 * padded_width, spec.fusion->fuse.inputs)));
  residual_.grow(n * static_cast<size_t>(padded_width));
  branch_.grow(n * static_cast<size_t>(padded_width));
  qkv_.grow(n * static_cast<size_t>(padded_qkv));
  gates_.grow(n * static_cast<size_t>(padded(spec.recurrent.gates, kPanel)));
  attended_.grow(n * static_cast<size_t>(padded_attention));
  recurred_.grow(n * static_cast<size_t>(padded_recurred));
  activated_.grow(n * static_cast<size_t>(padded_activated));
  for (const Layer& layer : layers) {
    if (layer.experts) experts_->grow(*layer.experts, threads, tokens, padded_width);
    if (layer.latent) grow_latent(layer, tokens);
  }
  if (spec.inputs) vectors_.grow(n * static_cast<size_t>(padded(spec.inputs->project.outputs, kPanel)));
  padded_hidden_.grow(n * static_cast<size_t>(padded_width));
  if (layers[0].convs) {
    convolved_.grow(2 * n * static_cast<size_t>(padded_width));
    taps_.grow(n * static_cast<size_t>(padded(layers[0].convs->project.outputs, kPanel)));
  }
  if (spec.adapters) {
    normed_.grow(n * static_cast<size_t>(padded_width));
    ranks_.grow(n * static_cast<size_t>(widest_rank));
    changes_.grow(n * static_cast<size_t>(widest_change));
  }
  for (const Layer& layer : layers) {
    if (layer.latent) widest = std::max({widest, layer.latent->query_up.inputs, layer.latent->absorb->inputs, layer.latent->expand->inputs});
    if (layer.experts) widest = std::max(widest, layer.experts->latent_out.inputs);
  }
  shared_.grow(tokens, widest);
  while (static_cast<int>(scratch_.size()) < threads) scratch_.push_back(std::make_unique<Scratch>());
  for (auto& scratch : scratch_) {
    int narrowest = padded_width;
    for (const Layer& layer : layers) {
      const int others[] = {layer.input ? layer.input->out.inputs : 0, layer.latent ? layer.latent->query_up.inputs : 0,
                            layer.recurrent ? layer.recurrent->second.inputs : 0, layer.experts ? layer.experts->latent_out.inputs : 0};
      for (const int inputs : {layer.attention_out.inputs, layer.down.inputs, others[0], others[1], others[2], others[3]}) {
        if (inputs) narrowest = std::min(narrowest, inputs);  // a mixture may have no MLP of one width
      }
    }
    scratch->rows.grow(std::min(tokens, kRedundant / narrowest + 1), widest);
    scratch->normed.grow(sizeof(float) * static_cast<size_t>(std::max(widest, spec.inputs ? spec.inputs->table.inputs : 0)));
    scratch->attention.grow(sizeof(float) * attend_scratch_floats(widest_dim));
    scratch->recurrent.grow(sizeof(float) * recurrent_scratch_floats(spec.recurrent));
    scratch->changes.reserve(static_cast<size_t>(spec.adapters ? tokens : 0));
  }
}

void Model::forward(Pool& pool, const Tokens& tokens, const Cache& cache, const PassOutputs& out, double* seconds) {
  std::lock_guard<std::mutex> lock(one_call_at_a_time_);
  const size_t width = static_cast<size_t>(spec.width);
  const Paths paths(tokens);
  for (int start = tokens.read, stop = 0; start < tokens.count; start = stop) {
    stop = spec.recurrent.kind || tokens.ends ? chunk_end(tokens, start) : std::min(start + kChunk, tokens.count);
    const Tokens chunk = {tokens.tokens + start, tokens.rows + start, tokens.positions + start,
                          tokens.slots ? tokens.slots + start : nullptr, tokens.parents ? tokens.parents + start : nullptr, stop - start,
                          tokens.entering ? tokens.entering + static_cast<size_t>(start) * width : nullptr, 0,
                          tokens.ends ? tokens.ends + start : nullptr};
    grow(pool.threads(), chunk.count);
    const size_t done = static_cast<size_t>(start - tokens.read) * width;
    const int text = std::clamp(out.text - start, 0, chunk.count);
    float* hidden = out.hidden && text < chunk.count ? out.hidden + done - static_cast<size_t>(std::min(out.text, start)) * width : nullptr;
    const bool cut = hidden && text > 0 && !reads_beyond(*this, out) && !spec.recurrent.kind && !spec.fusion && !spec.inputs;
    const PassOutputs here = {cut ? nullptr : hidden, out.taps, out.tap_count, out.features + done * static_cast<size_t>(out.tap_count), text};
    Pass pass(*this, pool, chunk, start, paths.of(start), cache, here, seconds);
    pool.run(Pass::job, &pass);
    pass.commit();
    if (cut) read_end(pool, chunk, text, cache, hidden, seconds);
  }
}

void Model::inject(Pool& pool, const Tokens& tokens, const Cache& cache) {
  std::lock_guard<std::mutex> lock(one_call_at_a_time_);
  for (int start = 0; start < tokens.count; start += kChunk) {
    const Tokens chunk = {nullptr, tokens.rows + start, tokens.positions + start, nullptr, nullptr,
                          std::min(kChunk, tokens.count - start), tokens.entering + static_cast<size_t>(start) * static_cast<size_t>(spec.width)};
    grow(pool.threads(), chunk.count);
    Pass pass(*this, pool, chunk, start, nullptr, cache, PassOutputs{}, nullptr);
    pool.run(Pass::inject_job, &pass);
  }
}

// Runs the last layers for the tokens from number `first` on, after a pass that ended with the keys and values of the last
// layer that writes some.
void Model::read_end(Pool& pool, const Tokens& chunk, int first, const Cache& cache, float* hidden, double* seconds) {
  const Tokens end = {chunk.tokens + first, chunk.rows + first, chunk.positions + first, nullptr, nullptr, chunk.count - first};
  const size_t stride = static_cast<size_t>(padded_width);
  float* residual = residual_.as<float>();
  std::memmove(residual, residual + static_cast<size_t>(first) * stride, sizeof(float) * stride * static_cast<size_t>(end.count));
  Pass pass(*this, pool, end, first, nullptr, cache, PassOutputs{hidden, nullptr, 0, nullptr}, seconds, last_writer);
  pool.run(Pass::job, &pass);
}

// Hidden states to logits.
class HeadPass {
 public:
  HeadPass(Model& model, const Linear& head, Pool& pool, const float* hidden, int rows, float* logits)
      : m_(model), head_(head), pool_(pool), hidden_(hidden), rows_(rows), logits_(logits) {}

  static void job(void* self, int thread) noexcept { static_cast<HeadPass*>(self)->run(thread); }

 private:
  void run(int thread) {
    const Share rows(rows_, thread, pool_.threads());
    const size_t width = static_cast<size_t>(m_.spec.width);
    for (int i = rows.first; i < rows.last; ++i) {
      float* padded = m_.padded_hidden_.as<float>() + static_cast<size_t>(i) * static_cast<size_t>(m_.padded_width);
      std::memcpy(padded, hidden_ + static_cast<size_t>(i) * width, sizeof(float) * width);
    }
    m_.kernels.quantise(m_.padded_hidden_.as<float>(), nullptr, head_, m_.shared_.view, rows);
    pool_.meet();
    const float limit = m_.spec.logits_cap;
    const Epilogue end = limit > 0.0f ? Epilogue::kCap : Epilogue::kStore;
    const LinearCall call = {&head_, m_.shared_.view, rows_, end, logits_, static_cast<size_t>(head_.outputs), limit};
    const Ranks* ranks = &head_ == &m_.spec.head ? m_.spec.ranks : nullptr;  // a draft vocabulary's head is rank 0's own
    const int first = ranks ? ranks->tokens[ranks->rank] / kPanel : 0;
    const int last = ranks ? panels(ranks->tokens[ranks->rank + 1]) : panels(head_.outputs);
    pool_.share_out(last - first, thread, [&](Range chunk) { m_.kernels.linear(call, first + chunk.first, first + chunk.last); });
    if (!ranks) return;
    pool_.meet();
    m_.exchange_->gather(pool_, thread, logits_, rows_, static_cast<size_t>(head_.outputs), ranks->tokens, true);
  }

  Model& m_;
  const Linear& head_;
  Pool& pool_;
  const float* hidden_;
  int rows_;
  float* logits_;
};

// A target's hidden states to a head's input.
class FusePass {
 public:
  FusePass(Model& model, Pool& pool, const float* features, int rows, float* out)
      : m_(model), f_(*model.spec.fusion), pool_(pool), features_(features), rows_(rows), out_(out) {}

  static void job(void* self, int thread) noexcept { static_cast<FusePass*>(self)->run(thread); }

 private:
  void run(int thread) {
    const Share rows(rows_, thread, pool_.threads());
    float* own = m_.scratch_[static_cast<size_t>(thread)]->normed.as<float>();
    for (int i = rows.first; i < rows.last; ++i) lay(i, own);
    const Norm joint = {f_.joint_norm, f_.tap_count * f_.target_width, m_.spec.epsilon};
    m_.kernels.quantise(m_.joined_.as<float>(), f_.joint_norm ? &joint : nullptr, f_.fuse, m_.shared_.view, rows);
    pool_.meet();
    const LinearCall call = {&f_.fuse, m_.shared_.view, rows_, Epilogue::kStore, out_, static_cast<size_t>(f_.fuse.outputs)};
    pool_.share_out(panels(f_.fuse.outputs), thread, [&](Range chunk) { m_.kernels.linear(call, chunk.first, chunk.last); });
    if (!f_.block) return;
    pool_.meet();
    const size_t width = static_cast<size_t>(m_.spec.width);
    const Norm after = {f_.hidden_norm, m_.spec.width, m_.spec.epsilon};
    for (int i = rows.first; i < rows.last; ++i) {
      float* fused = out_ + static_cast<size_t>(i) * width;
      std::memcpy(own, fused, sizeof(float) * width);
      std::memset(own + width, 0, sizeof(float) * (static_cast<size_t>(m_.padded_width) - width));
      m_.kernels.apply_norm(own, after, m_.padded_width, own);
      std::memcpy(fused, own, sizeof(float) * width);
    }
  }

  // One token's hidden states side by side, each normed if the taps have norms.
  void lay(int i, float* own) const {
    const size_t width = static_cast<size_t>(f_.target_width), all = width * static_cast<size_t>(f_.tap_count);
    const size_t inputs = static_cast<size_t>(f_.fuse.inputs);
    const int stride = padded(f_.target_width, kInputMultiple);
    const float* from = features_ + all * static_cast<size_t>(i);
    float* to = m_.joined_.as<float>() + inputs * static_cast<size_t>(i);
    std::memset(to + all, 0, sizeof(float) * (inputs - all));
    if (!f_.tap_norms) {
      std::memcpy(to, from, sizeof(float) * all);
      return;
    }
    for (size_t tap = 0; tap < static_cast<size_t>(f_.tap_count); ++tap) {
      std::memcpy(own, from + tap * width, sizeof(float) * width);
      std::memset(own + width, 0, sizeof(float) * (static_cast<size_t>(stride) - width));
      const Norm norm = {f_.tap_norms + tap * static_cast<size_t>(stride), f_.target_width, m_.spec.epsilon};
      m_.kernels.apply_norm(own, norm, stride, own);
      std::memcpy(to + tap * width, own, sizeof(float) * width);
    }
  }

  Model& m_;
  const Fusion& f_;
  Pool& pool_;
  const float* features_;
  int rows_;
  float* out_;
};

void Model::fuse(Pool& pool, const float* features, int rows, float* out) {
  std::lock_guard<std::mutex> lock(one_call_at_a_time_);
  const size_t all = static_cast<size_t>(spec.fusion->tap_count) * static_cast<size_t>(spec.fusion->target_width);
  for (int start = 0; start < rows; start += kChunk) {
    const int count = std::min(kChunk, rows - start);
    grow(pool.threads(), count);
    FusePass pass(*this, pool, features + static_cast<size_t>(start) * all, count,
                  out + static_cast<size_t>(start) * static_cast<size_t>(spec.width));
    pool.run(FusePass::job, &pass);
  }
}

void Model::logits(Pool& pool, const float* hidden, int rows, float* out, const Linear& head) {
  std::lock_guard<std::mutex> lock(one_call_at_a_time_);
  for (int start = 0; start < rows; start += kChunk) {
    const int count = std::min(kChunk, rows - start);
    grow(pool.threads(), count);
    HeadPass pass(*this, head, pool, hidden + static_cast<size_t>(start) * static_cast<size_t>(spec.width), count,
                  out + static_cast<size_t>(start) * static_cast<size_t>(head.outputs));
    pool.run(HeadPass::job, &pass);
  }
}

}  // namespace paceline
