// Drafting in one call with a trained head or a draft model: it reads the tokens of every row's text that it has not
// computed, then draws draft tokens one after another, as chains or, with a head, as trees. A parallel head reads masks
// behind the text in the same pass. A head's inputs and outputs are defined in src/paceline/drafters/heads/feature.py,
// a draft model's chains in src/paceline/drafters/model.py, drawing in sampling.cpp, growing trees in
// src/paceline/drafters/growth.py.
#include <algorithm>
#include <cstring>

#include "exports.h"
#include "model.h"

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

// Offset of a place's states from the first, in numbers.
size_t state_offset(const Kept& kept, int64_t row, int64_t slot, size_t width) {
  return (static_cast<size_t>(row) * static_cast<size_t>(kept.capacity + 1) + static_cast<size_t>(std::min(slot, kept.capacity))) * width;
}

void store_state(const Kept& kept, size_t at, const float* from, size_t width) {
  if (!kept.bf16) {
    std::memcpy(reinterpret_cast<float*>(kept.states) + at, from, sizeof(float) * width);
    return;
  }
  uint16_t* to = reinterpret_cast<uint16_t*>(kept.states) + at;
  for (size_t i = 0; i < width; ++i) to[i] = to_bf16(from[i]);
}

void load_state(const Kept& kept, size_t at, float* to, size_t width) {
  if (!kept.bf16) {
    std::memcpy(to, reinterpret_cast<const float*>(kept.states) + at, sizeof(float) * width);
    return;
  }
  const uint16_t* from = reinterpret_cast<const uint16_t*>(kept.states) + at;
  for (size_t i = 0; i < width; ++i) to[i] = from_bf16(from[i]);
}

// Tokens of a pass of a head or a draft model, and its results.
class HeadTokens {
 public:
  HeadTokens(Model& head, Pool& pool, const Cache& cache) : head_(head), pool_(pool), cache_(cache), width_(static_cast<size_t>(head.spec.width)) {}

  // Adds a token; returns the memory for the state that enters with it, null for a draft model.
  float* add(int64_t token, int64_t row, int64_t position) {
    tokens_.push_back(token);
    rows_.push_back(row);
    positions_.push_back(position);
    if (!head_.spec.fusion) return nullptr;
    entering_.resize(tokens_.size() * width_);
    return entering_.data() + entering_.size() - width_;
  }

  // Adds a token of a tree, with its slot and the index of its parent among these tokens (-1: the row's text).
  float* branch(int64_t token, int64_t row, int64_t position, int64_t slot, int64_t parent) {
    slots_.push_back(slot);
    parents_.push_back(parent);
    return add(token, row, position);
  }

  void clear() {
    tokens_.clear();
    rows_.clear();
    positions_.clear();
    entering_.clear();
    slots_.clear();
    parents_.clear();
    read_ = 0;
  }

  int count() const { return static_cast<int>(tokens_.size()); }

  // keys_alone: no draft follows, so hidden states are not computed.
  const char* run(double* seconds, bool keys_alone = false) {
    const bool tree = !parents_.empty();
    const Tokens tokens = {tokens_.data(), rows_.data(), positions_.data(), tree ? slots_.data() : nullptr,
                           tree ? parents_.data() : nullptr, count(), head_.spec.fusion ? entering_.data() : nullptr, read_};
    if (const char* problem = head_.problem_with(tokens, cache_)) return problem;
    if (keys_alone) {
      head_.forward(pool_, tokens, cache_, PassOutputs{nullptr, nullptr, 0, nullptr}, seconds);
      return nullptr;
    }
    const int64_t last = head_.spec.layer_count;
    hidden_.resize(tokens_.size() * width_);
    if (!head_.spec.fusion) {
      head_.forward(pool_, tokens, cache_, PassOutputs{hidden_.data(), nullptr, 0, nullptr}, seconds);
      return nullptr;
    }
    unnormed_.resize(entering_.size());
    head_.forward(pool_, tokens, cache_, PassOutputs{hidden_.data(), &last, 1, unnormed_.data()}, seconds);
    if (tree) read_ = count();  // the next tokens may have these as parents
    return nullptr;
  }

  // Output of the last pass at the i-th token.
  const float* hidden(int i) const { return hidden_.data() + static_cast<size_t>(i) * width_; }
  // The state that enters a head's next step.
  const float* state(int i) const { return (head_.spec.fusion->normed_state ? hidden_ : unnormed_).data() + static_cast<size_t>(i) * width_; }

 private:
  Model& head_;
  Pool& pool_;
  const Cache& cache_;
  const size_t width_;
  int read_ = 0;  // a tree's tokens computed by earlier passes
  std::vector<int64_t> tokens_, rows_, positions_, slots_, parents_;
  std::vector<float> entering_, hidden_, unnormed_;
};

// The common part of chains and trees.
class Drafting {
 public:
  Drafting(Model& head, Pool& pool, const DraftCall& call, const Cache& cache, double* seconds)
      : head_(head), pool_(pool), call_(call), cache_(cache), seconds_(seconds), width_(static_cast<size_t>(head.spec.width)),
        early_(head.spec.fusion ? 1 : 0), fed_(head, pool, cache) {}

 protected:
  bool reads_masks() const { return head_.spec.fusion && head_.spec.fusion->mask; }

  // Reads the tokens of the rows' texts that are missing, and masks.
  const char* read_text_and_masks() {
    if (const char* problem = invalid_call()) return problem;
    read_text();
    return fed_.count() == 0 ? nullptr : fed_.run(seconds_, !call_.counts);
  }

  // Logits after some of the tokens of the last pass, over the tokens that are scored.
  void logits_after(const std::vector<int>& tokens) {
    hidden_.resize(tokens.size() * width_);
    logits_.resize(tokens.size() * scored_vocabulary());
    for (size_t i = 0; i < tokens.size(); ++i) std::memcpy(hidden_.data() + i * width_, fed_.hidden(tokens[i]), sizeof(float) * width_);
    head_.logits(pool_, hidden_.data(), static_cast<int>(tokens.size()), logits_.data(), output());
  }

  // Scatters the i-th of these logits into the target's vocabulary.
  void scatter_logits(size_t i, float* to) const {
    const size_t vocabulary = scored_vocabulary();
    const float* from = logits_.data() + i * vocabulary;
    if (head_.read_vocabulary() == static_cast<int64_t>(vocabulary)) {  // ascending, so every token is its own
      std::memcpy(to, from, sizeof(float) * vocabulary);
      return;
    }
    const int64_t* targets = call_.shortened ? call_.shortened->targets : head_.spec.fusion->targets;
    for (size_t token = 0; token < vocabulary; ++token) to[targets[token]] = from[token];
  }

  const Linear& output() const { return call_.shortened ? call_.shortened->head : head_.spec.head; }
  size_t scored_vocabulary() const { return static_cast<size_t>(output().outputs); }

  DrawCall drawing() const {
    DrawCall draw = {};
    draw.by = call_.by;
    draw.draft_tokens = call_.draft_tokens;
    draw.parents = call_.parents;
    draw.rows = call_.rows;
    draw.block = 1;
    draw.stride = draw.vocabulary = head_.read_vocabulary();
    draw.draft_stride = call_.draft_stride;
    draw.purpose = call_.purpose;
    return draw;
  }

  Model& head_;
  Pool& pool_;
  const DraftCall& call_;
  const Cache& cache_;
  double* seconds_;
  const size_t width_;
  const int64_t early_;  // a head reads a token one position early, beside the hidden state before it
  HeadTokens fed_;
  std::vector<int64_t> rows_;  // rows that still need draft tokens
  std::vector<int> lasts_;     // per row: index in the last pass of the token, or mask, before the next draft token
  std::vector<float> states_;

 private:
  const char* invalid_call() const {
    for (int64_t row = 0; row < call_.rows; ++row) {
      if (call_.start[row] < early_ || call_.stop[row] > call_.text_stride) return "a row's text starts or stops outside its range";
      if (call_.counts && (call_.counts[row] < 0 || call_.counts[row] > call_.draft_stride)) return "a row has more draft tokens than fit";
    }
    return nullptr;
  }

  // The tokens of the rows' texts that are missing. If none is missing, the last token is read again.
  void read_text() {
    for (int64_t row = 0; row < call_.rows; ++row) {
      if (call_.counts) call_.drawn[row] = 0;
      if (call_.counts && (call_.counts[row] == 0 || call_.stop[row] < 1 + early_)) continue;
      const int64_t place = call_.slots[row], stop = call_.stop[row];
      const int64_t start = call_.counts ? std::min(call_.start[row], stop - 1) : call_.start[row];
      for (int64_t i = start; i < stop; ++i) {
        float* entering = fed_.add(call_.text[place * call_.text_stride + i], place, i - early_);
        if (entering) load_state(call_.kept, state_offset(call_.kept, place, i - 1, width_), entering, width_);
      }
      rows_.push_back(row);
      lasts_.push_back(fed_.count() - 1);
      if (call_.counts && reads_masks()) read_masks(row);
    }
  }

  // Masks in place of all draft tokens but the last.
  void read_masks(int64_t row) {
    const Fusion& fusion = *head_.spec.fusion;
    for (int64_t step = 0; step + 1 < call_.counts[row]; ++step) {
      float* entering = fed_.add(fusion.mask_token, call_.slots[row], call_.stop[row] - 1 + step);
      std::memcpy(entering, fusion.mask, sizeof(float) * width_);
    }
  }

  std::vector<float> hidden_, logits_;
};

class Chains : public Drafting {
 public:
  using Drafting::Drafting;

  const char* run() {
    if (const char* problem = read_text_and_masks()) return problem;
    if (fed_.count() == 0 || !call_.counts) return nullptr;
    for (int64_t step = 0;; ++step) {
      compute_logits();
      if (call_.before_draw && !call_.before_draw()) return nullptr;
      draw(step);
      if (call_.continue_drafting && !call_.continue_drafting()) return nullptr;
      keep_unfinished(step + 1);
      if (rows_.empty()) return nullptr;
      if (reads_masks()) {  // the masks stand behind the text, one after the other
        for (int& last : lasts_) ++last;
        continue;
      }
      feed_draft_tokens(step);
      if (const char* problem = fed_.run(seconds_)) return problem;
      for (size_t i = 0; i < lasts_.size(); ++i) lasts_[i] = static_cast<int>(i);
    }
  }

 private:
  // The logits of the next draft token of every remaining row.
  void compute_logits() {
    logits_after(lasts_);
    for (size_t i = 0; i < rows_.size(); ++i) scatter_logits(i, call_.logits + rows_[i] * head_.read_vocabulary());
  }

  void draw(int64_t step) {
    DrawCall draw = drawing();
    draw.logits = call_.logits;
    draw.instead = call_.instead;
    draw.first = step;
    draw_draft_tokens(head_.kernels, pool_, draw, rows_, call_.draft_tokens, call_.chances, call_.probabilities);
    for (const int64_t row : rows_) call_.drawn[row] = step + 1;
  }

  // Keeps the rows that need more draft tokens.
  void keep_unfinished(int64_t drawn) {
    size_t kept = 0;
    for (size_t i = 0; i < rows_.size(); ++i) {
      if (call_.counts[rows_[i]] <= drawn) continue;
      rows_[kept] = rows_[i];
      lasts_[kept++] = lasts_[i];
    }
    rows_.resize(kept);
    lasts_.resize(kept);
  }

  // The tokens just drawn; into a head each with the state before it: the target has no hidden states for them yet.
  void feed_draft_tokens(int64_t step) {
    if (early_) keep_last_states();
    fed_.clear();
    for (size_t i = 0; i < rows_.size(); ++i) {
      const int64_t row = rows_[i];
      float* entering = fed_.add(call_.draft_tokens[row * call_.draft_stride + step], call_.slots[row], call_.stop[row] - early_ + step);
      if (entering) std::memcpy(entering, states_.data() + i * width_, sizeof(float) * width_);
    }
  }

  void keep_last_states() {
    states_.resize(rows_.size() * width_);
    for (size_t i = 0; i < rows_.size(); ++i) std::memcpy(states_.data() + i * width_, fed_.state(lasts_[i]), sizeof(float) * width_);
  }
};

// Trees as src/paceline/drafters/growth.py grows them.
class Trees : public Drafting {
 public:
  using Drafting::Drafting;

  const char* run() {
    if (const char* problem = read_text_and_masks()) return problem;
    start_trees();
    for (int64_t step = 0; !new_.empty(); ++step) {
      compute_logits();
      if (call_.before_draw && !call_.before_draw()) return nullptr;
      draw_and_grow();
      if (call_.continue_drafting && !call_.continue_drafting()) return nullptr;
      keep_unfinished(step + 1);
      if (reads_masks()) {  // the masks stand behind the text, one after the other
        for (Node& node : new_) node.read = ++node.before;
        continue;
      }
      if (const char* problem = feed_draft_tokens(step)) return problem;
    }
    return nullptr;
  }

 private:
  // A new draft token, or a row's text (-1).
  struct Node {
    int64_t row, draft;
    int read;    // its index in the last pass, or that of the mask behind it
    int before;  // the same for its parent
  };

  struct Candidate {
    int64_t parent, token, rank;
    float chance;
    double survival;  // product of the chances on its path
    int before;
  };

  void start_trees() {
    for (size_t i = 0; i < rows_.size(); ++i) new_.push_back({rows_[i], -1, lasts_[i], -1});
    const size_t rows = static_cast<size_t>(call_.rows), drafted = rows * static_cast<size_t>(call_.draft_stride);
    chain_.assign(rows, -1);
    survivals_.assign(drafted, 0.0);
    fed_index_.assign(drafted, -1);
  }

  // The logits after the new nodes, those of a row side by side. Nodes of a parallel head that share logits compute
  // them once.
  void compute_logits() {
    lasts_.clear();
    std::vector<size_t> written;
    for (const Node& node : new_) {
      if (written.empty() || lasts_.back() != node.read) lasts_.push_back(node.read);
      written.push_back(lasts_.size() - 1);
    }
    logits_after(lasts_);
    forks_.clear();
    lines_.clear();
    for (size_t i = 0; i < new_.size(); ++i) {
      const bool beside = i > 0 && new_[i - 1].row == new_[i].row;
      lines_.push_back(beside ? lines_.back() + 1 : new_[i].row * call_.width);
      forks_.push_back({new_[i].row, new_[i].draft, call_.logits + lines_.back() * head_.spec.fusion->vocabulary});
      scatter_logits(written[i], forks_.back().logits);
    }
  }

  void draw_and_grow() {
    for (size_t i = 0; call_.instead && i < forks_.size(); ++i) {
      if (float* instead = call_.instead[lines_[i]]) forks_[i].logits = instead;
    }
    const size_t width = static_cast<size_t>(call_.width);
    tokens_.resize(forks_.size() * width);
    chances_.resize(forks_.size() * width);
    draw_leaders(head_.kernels, pool_, drawing(), forks_, call_.width, tokens_.data(), chances_.data());
    std::vector<Node> grown;
    for (size_t first = 0, stop = 0; first < new_.size(); first = stop) {
      while (stop < new_.size() && new_[stop].row == new_[first].row) ++stop;
      grow(new_[first].row, candidates(first, stop), grown);
    }
    new_ = grown;
  }

  // All candidates of rank 0, then those of rank 1, and so on.
  std::vector<Candidate> candidates(size_t first, size_t stop) const {
    std::vector<Candidate> found;
    for (int64_t rank = 0; rank < call_.width; ++rank) {
      for (size_t i = first; i < stop; ++i) {
        const size_t at = i * static_cast<size_t>(call_.width) + static_cast<size_t>(rank);
        const double before = new_[i].draft < 0 ? 1.0 : survivals_[place(new_[i].row, new_[i].draft)];
        if (!(chances_[at] > 0.0f)) continue;  // no token is left to draw there
        found.push_back({new_[i].draft, tokens_[at], rank, chances_[at], before * static_cast<double>(chances_[at]), new_[i].read});
      }
    }
    return found;
  }

  // The most likely candidates become draft tokens, the chain of top-ranked ones always. Each takes a place in the
  // cache.
  void grow(int64_t row, std::vector<Candidate> found, std::vector<Node>& grown) {
    int64_t& count = call_.drawn[row];
    const int64_t room = std::min(call_.draft_stride, cache_.capacity - call_.stop[row]) - count;
    const size_t most = static_cast<size_t>(std::max<int64_t>(0, std::min(call_.width, room)));
    const int64_t chain = chain_[static_cast<size_t>(row)];
    const auto extends_chain = [&](const Candidate& each) { return each.parent == chain && each.rank == 0; };
    std::stable_sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) { return a.survival > b.survival; });
    const auto others = std::stable_partition(found.begin(), found.end(), extends_chain);
    if (others != found.begin() && most > 0) chain_[static_cast<size_t>(row)] = count;
    found.resize(std::min(found.size(), most));
    for (const Candidate& each : found) {
      const size_t at = place(row, count);
      call_.draft_tokens[at] = each.token;
      call_.parents[at] = each.parent;
      call_.ranks[at] = each.rank;
      call_.chances[at] = each.chance;
      survivals_[at] = each.survival;
      grown.push_back({row, count++, -1, each.before});
    }
  }

  // Keeps the nodes of rows that need deeper draft tokens.
  void keep_unfinished(int64_t depth) {
    const auto ends = [&](const Node& node) { return call_.counts[node.row] <= depth; };
    new_.erase(std::remove_if(new_.begin(), new_.end(), ends), new_.end());
  }

  // Reads the tokens just drawn, each with its parent's state: the target has no hidden states for them yet.
  const char* feed_draft_tokens(int64_t step) {
    states_.resize(new_.size() * width_);
    for (size_t i = 0; i < new_.size(); ++i) std::memcpy(states_.data() + i * width_, fed_.state(new_[i].before), sizeof(float) * width_);
    if (step == 0) fed_.clear();
    for (size_t i = 0; i < new_.size(); ++i) {
      Node& node = new_[i];
      const size_t at = place(node.row, node.draft);
      const int64_t parent = call_.parents[at], base = call_.stop[node.row] - 1;
      fed_index_[at] = fed_.count();
      float* entering = fed_.branch(call_.draft_tokens[at], call_.slots[node.row], base + step, base + node.draft,
                                    parent < 0 ? -1 : fed_index_[place(node.row, parent)]);
      std::memcpy(entering, states_.data() + i * width_, sizeof(float) * width_);
      node.read = static_cast<int>(i);
    }
    return new_.empty() ? nullptr : fed_.run(seconds_);
  }

  size_t place(int64_t row, int64_t draft) const { return static_cast<size_t>(row * call_.draft_stride + draft); }

  std::vector<Node> new_;       // row after row
  std::vector<int64_t> lines_;  // where their logits are, in the call's
  std::vector<Fork> forks_;
  std::vector<int64_t> tokens_;  // drawn after each node
  std::vector<float> chances_;
  std::vector<int64_t> chain_;      // per row: the last node of the chain of top-ranked tokens
  std::vector<double> survivals_;   // per draft token
  std::vector<int64_t> fed_index_;  // per draft token: its index among all tokens that were read
};

}  // namespace

void keep_states(Model& head, Pool& pool, const Kept& kept, const int64_t* rows, const int64_t* slots, const float* features, int count) {
  const size_t width = static_cast<size_t>(head.spec.width);
  const bool fuses = head.spec.fusion->embedding_norm == nullptr;
  std::vector<float> fused(fuses ? static_cast<size_t>(count) * width : 0);
  if (fuses) head.fuse(pool, features, count, fused.data());
  const float* states = fuses ? fused.data() : features;
  for (int i = 0; i < count; ++i) store_state(kept, state_offset(kept, rows[i], slots[i], width), states + static_cast<size_t>(i) * width, width);
}

void move_states(const Model& head, const Kept& kept, const std::vector<Move>& moves) {
  const size_t width = static_cast<size_t>(head.spec.width), item = kept.bf16 ? 2 : 4;
  for (const Move& move : moves) {
    const uint8_t* from = kept.states + state_offset(kept, move.row, move.from, width) * item;
    std::memcpy(kept.states + state_offset(kept, move.row, move.to, width) * item, from, width * item);
  }
}

const char* run_draft(Model& head, Pool& pool, const DraftCall& call, const Cache& cache, double* seconds) {
  if (!call.counts || call.width <= 1) return Chains(head, pool, call, cache, seconds).run();
  if (!head.spec.fusion) return "a draft model drafts chains only";
  return Trees(head, pool, call, cache, seconds).run();
}

}  // namespace paceline

using namespace paceline;

PL_EXPORT Problem pl_keep_fused(Model* head, Pool* pool, const Kept* kept, const int64_t* rows, const int64_t* slots, const float* features,
                                int count) {
  return guarded([&] { keep_states(*head, *pool, *kept, rows, slots, features, count); });
}

// Keys and values of tokens of a block drafter's text, from their states that were kept.
PL_EXPORT Problem pl_inject(Model* head, Pool* pool, const Kept* kept, const Cache* cache, const int64_t* rows, const int64_t* positions,
                            int count) {
  return guarded([&]() -> const char* {
    if (!head->spec.fusion || !head->spec.fusion->block) return "only block drafters store keys of states";
    const size_t width = static_cast<size_t>(head->spec.width);
    std::vector<float> states(static_cast<size_t>(count) * width);
    for (int i = 0; i < count; ++i) {
      if (rows[i] < 0 || rows[i] >= cache->rows || positions[i] < 0) return "a token is outside the cache";
      load_state(*kept, state_offset(*kept, rows[i], positions[i], width), states.data() + static_cast<size_t>(i) * width, width);
    }
    Tokens tokens = {nullptr, rows, positions, nullptr, nullptr, count};
    tokens.entering = states.data();
    if (const char* problem = problem_with_pages(tokens, *cache)) return problem;
    head->inject(*pool, tokens, *cache);
    return nullptr;
  });
}

PL_EXPORT Problem pl_draft(Model* head, Pool* pool, const DraftCall* call, const Cache* cache, double* seconds) {
  return guarded([&] { return run_draft(*head, *pool, *call, *cache, seconds); });
}
