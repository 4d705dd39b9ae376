#include "experts.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "system.h"

namespace paceline {

Buffer::~Buffer() { free_aligned(data_); }

const char* Model::problem_with(const Tokens& fed, const Cache& cache) const {
  for (int i = 0; i < fed.count; ++i) {
    if (fed.tokens[i] < 0 || fed.tokens[i] >= read_vocabulary()) return "a token is outside the vocabulary";
    if (fed.rows[i] < 0 || fed.rows[i] >= cache.rows) return "a row is outside the cache";
    if (spec.adapters && (cache.adapter_of[fed.rows[i]] < 0 || cache.adapter_of[fed.rows[i]] > spec.adapters)) return "a row's adapter does not exist";
    if (fed.positions[i] < 0 || fed.positions[i] > INT32_MAX) return "a position is negative or absurdly large";
    if (!fed.parents && i > 0 && fed.rows[i] == fed.rows[i - 1] && fed.positions[i] < fed.positions[i - 1] + (reads_only ? 0 : 1)) return "positions of a row do not ascend";
  }
  if (const char* problem = reads_only ? nullptr : problem_with_pages(fed, cache)) return problem;
  return spec.recurrent.kind ? problem_with_states(fed, cache) : nullptr;
}

const char* problem_with_pages(const Tokens& fed, const Cache& cache) {
  const int64_t blocks = static_cast<int64_t>(blocks_for(cache.capacity));
  for (int i = fed.read; cache.references && i < fed.count; ++i) {
    const int64_t slot = fed.slots ? fed.slots[i] : fed.positions[i];
    if (slot >= cache.capacity) continue;
    if (cache.references[cache.tables[0].keys.pages[fed.rows[i] * blocks + slot / kPagePositions]] != 1) return "a token's page is missing or shared";
  }
  return nullptr;
}

const char* problem_with_states(const Tokens& fed, const Cache& cache) {
  if (!cache.inputs) return "a recurrent model needs a cache with states";
  if (cache.window > kWalkTokens) return "a slot keeps more inputs than go through a state together";
  if (fed.read > 0) return "a recurrent model reads each token of a tree once";
  for (int i = 0; i < fed.count; ++i) {
    if (i > 0 && fed.rows[i] == fed.rows[i - 1]) {
      if (fed.parents ? fed.parents[i] < 0 : fed.positions[i] != fed.positions[i - 1] + 1) return "tokens of a row do not follow each other";
      continue;
    }
    for (int j = 0; j < i; ++j) if (fed.rows[j] == fed.rows[i]) return "tokens of a row lie apart";
    const int64_t applied = fed.positions[i] - cache.base[fed.rows[i]];
    if (fed.positions[i] > 0 && (applied < 0 || applied > cache.count[fed.rows[i]])) return "a row's state is not known where its tokens begin";
  }
  return nullptr;
}

const char* problem_with_trees(const Tokens& t, int64_t capacity) {
  std::vector<int64_t> text(static_cast<size_t>(t.count));  // per token: the position at which its row's text ends
  for (int i = 0; i < t.count; ++i) {
    const int64_t parent = t.parents[i];
    if (parent < -1 || parent >= i) return "a token comes before its parent";
    if (parent >= 0 && (t.rows[parent] != t.rows[i] || t.positions[parent] + 1 != t.positions[i])) return "a token does not follow its parent";
    text[static_cast<size_t>(i)] = parent < 0 ? t.positions[i] : text[static_cast<size_t>(parent)];
    if (t.slots[i] < text[static_cast<size_t>(i)] || t.slots[i] >= capacity) return "a slot is in the row's text or outside the cache";
    for (int j = i - 1; j >= 0 && t.rows[j] == t.rows[i]; --j) {
      if (t.slots[j] == t.slots[i]) return "two tokens share a slot";
      if (text[static_cast<size_t>(j)] != text[static_cast<size_t>(i)]) return "two tokens of a row follow texts of different lengths";
    }
  }
  return nullptr;
}

void Buffer::grow(size_t bytes) {
  if (bytes <= bytes_) return;
  free_aligned(data_);
  data_ = nullptr;
  bytes_ = 0;  // so that a later call tries again if there is no memory now
  bytes = (bytes + 63) / 64 * 64;
  data_ = static_cast<uint8_t*>(new_aligned(bytes));
  if (!data_) throw std::bad_alloc();
  bytes_ = bytes;
  std::memset(data_, 0, bytes_);
}

void Quantised::grow(int rows, int inputs) {
  rows = padded(rows, kRowMultiple);
  // 4 bytes per input fit every kind of activation; one line more per row keeps rows out of each other's cache sets.
  view.stride = static_cast<size_t>(inputs) * 4 + 64;
  view.scale_stride = static_cast<size_t>(inputs) / kActivationGroup;
  view.sum_stride = static_cast<size_t>(inputs) / 16;
  data.grow(view.stride * static_cast<size_t>(rows));
  scales.grow(sizeof(float) * view.scale_stride * static_cast<size_t>(rows));
  sums.grow(sizeof(int32_t) * view.sum_stride * static_cast<size_t>(rows));
  view.data = data.as<uint8_t>();
  view.scales = scales.as<float>();
  view.sums = sums.as<int32_t>();
}

template <class Measure>
int widest(const std::vector<Layer>& layers, Measure measure) {
  int found = 0;
  for (const Layer& layer : layers) found = std::max(found, measure(layer));
  return found;
}

static bool writes_nothing(const Layer& layer) { return layer.reads_only && !layer.recurrent; }

static int last_writer_of(const std::vector<Layer>& layers) {
  int last = static_cast<int>(layers.size()) - 1;
  while (last > 0 && writes_nothing(layers[static_cast<size_t>(last)])) --last;
  return last;
}

// The most padded outputs of a part of an adapter's changes.
static int widest_of_changes(const ModelSpec& s, Router LowRank::* part) {
  int found = 0;
  for (int32_t layer = 0; layer < s.layer_count; ++layer) {
    for (const LowRank* changes : s.layers[layer].changes) {
      for (int32_t adapter = 0; changes && adapter < s.adapters; ++adapter) found = std::max(found, padded((changes[adapter].*part).outputs, kRouterPanel));
    }
  }
  return found;
}

Model::Model(const ModelSpec& s, const Kernels& k)
    : spec(s),
      kernels(k),
      layers(s.layers, s.layers + s.layer_count),
      padded_width(padded(s.width, kInputMultiple)),
      padded_qkv(widest(layers, [](const Layer& layer) { return padded(std::max(layer.qkv.outputs, layer.recurrent ? layer.recurrent->first.outputs : 0), kPanel); })),
      padded_attention(widest(layers, [](const Layer& layer) { return layer.attention_out.inputs; })),
      padded_recurred(widest(layers, [](const Layer& layer) { return layer.recurrent ? layer.recurrent->second.inputs : 0; })),
      padded_activated(widest(layers, [](const Layer& layer) { return std::max(layer.down.inputs, layer.input ? layer.input->out.inputs : 0); })),
      widest_dim(widest(layers, [](const Layer& layer) { return std::max(layer.dim, layer.value_dim); })),
      queries_per_key(widest(layers, [](const Layer& layer) { return layer.heads / layer.kv_heads; })),
      last_writer(last_writer_of(layers)),
      reads_only(std::all_of(layers.begin(), layers.end(), writes_nothing)),
      widest_rank(widest_of_changes(s, &LowRank::down)),
      widest_change(widest_of_changes(s, &LowRank::up)),
      next_unit_(static_cast<size_t>(s.layer_count)),
      experts_(std::make_unique<ExpertBuffers>()),
      exchange_(s.ranks ? std::make_unique<Exchange>(*s.ranks) : nullptr) {}

Model::~Model() = default;

}  // namespace paceline
