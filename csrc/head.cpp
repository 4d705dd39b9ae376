// A trained head drafts: what it lacks of every row's text is read, then guess after guess is drawn, in one call. A parallel one
// reads masks behind the text in the same pass. What is read and said is src/paceline/heads/feature.py's; how guesses are drawn is
// sampling.cpp's.
#include <algorithm>
#include <cstring>

#include "model.h"

#define PL_EXPORT extern "C" __attribute__((visibility("default")))

namespace paceline {
namespace {

uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float from_bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Where the streams of a row's place lie, as numbers from the first.
size_t place_of(const Kept& kept, int64_t row, int64_t slot, size_t width) {
  return (static_cast<size_t>(row) * static_cast<size_t>(kept.capacity + 1) + static_cast<size_t>(std::min(slot, kept.capacity))) * width;
}

void keep(const Kept& kept, size_t at, const float* from, size_t width) {
  if (!kept.bf16) {
    std::memcpy(reinterpret_cast<float*>(kept.streams) + at, from, sizeof(float) * width);
    return;
  }
  uint16_t* to = reinterpret_cast<uint16_t*>(kept.streams) + at;
  for (size_t i = 0; i < width; ++i) to[i] = to_bf16(from[i]);
}

void recall(const Kept& kept, size_t at, float* to, size_t width) {
  if (!kept.bf16) {
    std::memcpy(to, reinterpret_cast<const float*>(kept.streams) + at, sizeof(float) * width);
    return;
  }
  const uint16_t* from = reinterpret_cast<const uint16_t*>(kept.streams) + at;
  for (size_t i = 0; i < width; ++i) to[i] = from_bf16(from[i]);
}

// Some tokens for a head's pass, and what it made of them.
class Fed {
 public:
  Fed(Model& head, Pool& pool, const Cache& cache) : head_(head), pool_(pool), cache_(cache), width_(static_cast<size_t>(head.spec.width)) {}

  // A place for the hidden state that enters with the token.
  float* add(int64_t token, int64_t row, int64_t position) {
    tokens_.push_back(token);
    rows_.push_back(row);
    positions_.push_back(position);
    entering_.resize(tokens_.size() * width_);
    return entering_.data() + entering_.size() - width_;
  }

  void clear() {
    tokens_.clear();
    rows_.clear();
    positions_.clear();
    entering_.clear();
  }

  int count() const { return static_cast<int>(tokens_.size()); }

  const char* run(double* seconds) {
    const Tokens tokens = {tokens_.data(), rows_.data(), positions_.data(), nullptr, nullptr, count(), entering_.data()};
    if (const char* problem = head_.problem_with(tokens, cache_)) return problem;
    const int64_t last = head_.spec.layer_count;
    hidden_.resize(entering_.size());
    left_.resize(entering_.size());
    head_.forward(pool_, tokens, cache_, Streams{hidden_.data(), &last, 1, left_.data()}, seconds);
    return nullptr;
  }

  const float* hidden(int i) const { return hidden_.data() + static_cast<size_t>(i) * width_; }
  // What the next step reads.
  const float* state(int i) const { return (head_.spec.fusion->normed_state ? hidden_ : left_).data() + static_cast<size_t>(i) * width_; }

 private:
  Model& head_;
  Pool& pool_;
  const Cache& cache_;
  const size_t width_;
  std::vector<int64_t> tokens_, rows_, positions_;
  std::vector<float> entering_, hidden_, left_;
};

class Drafting {
 public:
  Drafting(Model& head, Pool& pool, const DraftCall& call, const Cache& cache, double* seconds)
      : head_(head), pool_(pool), call_(call), seconds_(seconds), width_(static_cast<size_t>(head.spec.width)), fed_(head, pool, cache) {}

  const char* run() {
    if (const char* problem = wrong()) return problem;
    read_text();
    if (fed_.count() == 0) return nullptr;
    if (const char* problem = fed_.run(seconds_)) return problem;
    if (!call_.counts) return nullptr;
    for (int64_t step = 0;; ++step) {
      say();
      if (call_.look && !call_.look()) return nullptr;
      draw(step);
      if (call_.goes_on && !call_.goes_on()) return nullptr;
      stay(step + 1);
      if (rows_.empty()) return nullptr;
      if (head_.spec.fusion->mask) {  // the masks stand behind the text, one after the other
        for (int& last : lasts_) ++last;
        continue;
      }
      follow(step);
      if (const char* problem = fed_.run(seconds_)) return problem;
      for (size_t i = 0; i < lasts_.size(); ++i) lasts_[i] = static_cast<int>(i);
    }
  }

 private:
  const char* wrong() const {
    for (int64_t row = 0; row < call_.rows; ++row) {
      if (call_.start[row] < 1 || call_.stop[row] > call_.text_stride) return "a row's text begins or ends where it cannot";
      if (call_.counts && (call_.counts[row] < 0 || call_.counts[row] > call_.guess_stride)) return "a row's guesses do not fit";
    }
    return nullptr;
  }

  // The text that rows lack. The last token is read again where nothing is lacking.
  void read_text() {
    for (int64_t row = 0; row < call_.rows; ++row) {
      if (call_.counts) call_.drawn[row] = 0;
      if (call_.counts && (call_.counts[row] == 0 || call_.stop[row] < 2)) continue;
      const int64_t place = call_.places[row], stop = call_.stop[row];
      const int64_t start = call_.counts ? std::min(call_.start[row], stop - 1) : call_.start[row];
      for (int64_t i = start; i < stop; ++i) {
        float* entering = fed_.add(call_.text[place * call_.text_stride + i], place, i - 1);
        recall(call_.kept, place_of(call_.kept, place, i - 1, width_), entering, width_);
      }
      rows_.push_back(row);
      lasts_.push_back(fed_.count() - 1);
      if (call_.counts && head_.spec.fusion->mask) read_masks(row);
    }
  }

  // In place of all guesses but the last, which nothing follows.
  void read_masks(int64_t row) {
    const Fusion& fusion = *head_.spec.fusion;
    for (int64_t step = 0; step + 1 < call_.counts[row]; ++step) {
      float* entering = fed_.add(fusion.mask_token, call_.places[row], call_.stop[row] - 1 + step);
      std::memcpy(entering, fusion.mask, sizeof(float) * width_);
    }
  }

  // The logits of the next guess of every row that is still there.
  void say() {
    const Fusion& fusion = *head_.spec.fusion;
    const size_t said = static_cast<size_t>(head_.vocabulary());
    hidden_.resize(rows_.size() * width_);
    logits_.resize(rows_.size() * said);
    for (size_t i = 0; i < rows_.size(); ++i) std::memcpy(hidden_.data() + i * width_, fed_.hidden(lasts_[i]), sizeof(float) * width_);
    head_.logits(pool_, hidden_.data(), static_cast<int>(rows_.size()), logits_.data());
    for (size_t i = 0; i < rows_.size(); ++i) {
      float* to = call_.logits + rows_[i] * fusion.vocabulary;
      const float* from = logits_.data() + i * said;
      for (size_t token = 0; token < said; ++token) to[fusion.targets[token]] = from[token];
    }
  }

  void draw(int64_t step) {
    DrawCall draw = {};
    draw.by = call_.by;
    draw.logits = call_.logits;
    draw.instead = call_.instead;
    draw.guesses = call_.guesses;
    draw.rows = call_.rows;
    draw.block = 1;
    draw.stride = draw.vocabulary = head_.spec.fusion->vocabulary;
    draw.guess_stride = call_.guess_stride;
    draw.first = step;
    draw.purpose = call_.purpose;
    draw_guesses(head_.kernels, pool_, draw, rows_, call_.guesses, call_.chances, call_.laws);
    for (const int64_t row : rows_) call_.drawn[row] = step + 1;
  }

  // Of the rows those that are to have more guesses.
  void stay(int64_t drawn) {
    size_t kept = 0;
    for (size_t i = 0; i < rows_.size(); ++i) {
      if (call_.counts[rows_[i]] <= drawn) continue;
      rows_[kept] = rows_[i];
      lasts_[kept++] = lasts_[i];
    }
    rows_.resize(kept);
    lasts_.resize(kept);
  }

  // The guesses just drawn, each with the state before it: it has no streams yet.
  void follow(int64_t step) {
    states_.resize(rows_.size() * width_);
    for (size_t i = 0; i < rows_.size(); ++i) std::memcpy(states_.data() + i * width_, fed_.state(lasts_[i]), sizeof(float) * width_);
    fed_.clear();
    for (size_t i = 0; i < rows_.size(); ++i) {
      const int64_t row = rows_[i];
      float* entering = fed_.add(call_.guesses[row * call_.guess_stride + step], call_.places[row], call_.stop[row] - 1 + step);
      std::memcpy(entering, states_.data() + i * width_, sizeof(float) * width_);
    }
  }

  Model& head_;
  Pool& pool_;
  const DraftCall& call_;
  double* seconds_;
  const size_t width_;
  Fed fed_;
  std::vector<int64_t> rows_;  // that are still to be guessed for
  std::vector<int> lasts_;     // where in the last pass the token, or mask, before each one's next guess was
  std::vector<float> hidden_, logits_, states_;
};

}  // namespace

void keep_streams(Model& head, Pool& pool, const Kept& kept, const int64_t* rows, const int64_t* slots, const float* features, int count) {
  const size_t width = static_cast<size_t>(head.spec.width);
  std::vector<float> fused(static_cast<size_t>(count) * width);
  head.fuse(pool, features, count, fused.data());
  for (int i = 0; i < count; ++i) keep(kept, place_of(kept, rows[i], slots[i], width), fused.data() + static_cast<size_t>(i) * width, width);
}

void move_streams(const Model& head, const Kept& kept, const std::vector<Move>& moves) {
  const size_t width = static_cast<size_t>(head.spec.width), item = kept.bf16 ? 2 : 4;
  for (const Move& move : moves) {
    const uint8_t* from = kept.streams + place_of(kept, move.row, move.from, width) * item;
    std::memcpy(kept.streams + place_of(kept, move.row, move.to, width) * item, from, width * item);
  }
}

}  // namespace paceline

using namespace paceline;

PL_EXPORT void pl_keep_streams(Model* head, Pool* pool, const Kept* kept, const int64_t* rows, const int64_t* slots, const float* features,
                               int count) {
  keep_streams(*head, *pool, *kept, rows, slots, features, count);
}

// Reads and guesses; returns what is wrong, or null.
PL_EXPORT const char* pl_draft(Model* head, Pool* pool, const DraftCall* call, const Cache* cache, double* seconds) {
  return Drafting(*head, *pool, *call, *cache, seconds).run();
}
