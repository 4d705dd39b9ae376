#include "model.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace paceline {

Buffer::~Buffer() { std::free(data_); }

const char* Model::problem_with(const Tokens& fed, const Cache& cache) const {
  for (int i = 0; i < fed.count; ++i) {
    if (fed.tokens[i] < 0 || fed.tokens[i] >= read_vocabulary()) return "a token is outside the vocabulary";
    if (fed.rows[i] < 0 || fed.rows[i] >= cache.rows) return "a row is outside the cache";
    if (fed.positions[i] < 0 || fed.positions[i] > INT32_MAX) return "a position is negative or absurdly large";
    if (!fed.parents && i > 0 && fed.rows[i] == fed.rows[i - 1] && fed.positions[i] <= fed.positions[i - 1]) return "positions of a row do not ascend";
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
  std::free(data_);
  bytes_ = (bytes + 63) / 64 * 64;
  data_ = static_cast<uint8_t*>(std::aligned_alloc(64, bytes_));
  if (!data_) throw std::bad_alloc();
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

Model::Model(const ModelSpec& s, const Kernels& k)
    : spec(s),
      kernels(k),
      layers(s.layers, s.layers + s.layer_count),
      padded_width(padded(s.width, kInputMultiple)),
      padded_qkv(padded((s.heads + 2 * s.kv_heads) * s.dim, kPanel)),
      padded_attention(padded(s.heads * s.dim, kInputMultiple)),
      padded_ffn(padded(s.ffn, kInputMultiple)),
      next_unit_(static_cast<size_t>(s.layer_count)) {}

}  // namespace paceline
