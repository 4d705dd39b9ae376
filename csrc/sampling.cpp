// Drawing tokens place by place, as src/paceline/core/sampling.py defines it. A row does not depend on other rows, and
// rows are divided among the threads.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <utility>

#include "exports.h"
#include "model.h"
#include "old_glibc.h"

namespace paceline {
namespace {

// sampling.noise_key
void noise_key(uint64_t seed, int64_t position, uint32_t purpose, uint32_t* key) {
  const uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32), at = static_cast<uint32_t>(position);
  const uint32_t salt = 0x9e3779b9u * purpose;
  key[0] = mix(mix(mix(low ^ salt) ^ high) ^ at);
  key[1] = mix(mix(mix(high ^ 0x85ebca6bu) ^ low) ^ at ^ salt);
}

// A thread's memory for drawing, kept for the next call.
class Workspace {
 public:
  DrawScratch lists(int64_t vocabulary) {
    const size_t items = draw_scratch_items(vocabulary);
    if (logits_.size() < items) {  // the last one to grow: another one may have found no memory
      tokens_.resize(items);
      depths_.resize(items);
      rest_.resize(items);
      weights_.resize(items);
      logits_.resize(items);
    }
    return {tokens_.data(), depths_.data(), rest_.data(), weights_.data(), logits_.data()};
  }

  // Occurrences of each token: [vocabulary] zeros, to be left as zeros.
  uint32_t* counts(int64_t vocabulary) {
    if (counts_.size() < static_cast<size_t>(vocabulary)) counts_.resize(static_cast<size_t>(vocabulary));
    return counts_.data();
  }

  // Ends a row, also one that found no memory midway.
  void forget_row() {
    for (const int64_t token : seen) counts_[static_cast<size_t>(token)] = 0;
    seen.clear();
    before.clear();
    taken.clear();
  }

  std::vector<int64_t> seen;                      // tokens with a count
  std::vector<std::pair<int64_t, float>> before;  // original logits
  std::vector<std::pair<int64_t, float>> taken;   // the same for tokens that were drawn

  static Workspace& own() {
    static thread_local Workspace workspace;
    return workspace;
  }

 private:
  std::vector<int32_t> tokens_, weights_;
  std::vector<float> depths_, rest_, logits_;
  std::vector<uint32_t> counts_;
};

// Bias, penalties and minimum length of one row. Few tokens are touched: those of its text and of its lists.
class Adjustments {
 public:
  Adjustments(const DrawRows& by, int64_t row, int64_t vocabulary, Workspace& workspace)
      : by_(by), row_(row), vocabulary_(vocabulary), workspace_(workspace), counts_(workspace.counts(vocabulary)) {
    workspace.forget_row();  // a constructor that throws is followed by no destructor
    const int64_t slot = by.slot(row);
    if (by.presence) {
      presence_ = by.presence[slot];
      frequency_ = by.frequency[slot];
      repetition_ = by.repetition[slot];
    }
    penalises_ = presence_ != 0.0f || frequency_ != 0.0f || repetition_ != 1.0f;
    if (!penalises_) return;
    const int64_t* text = by.text + slot * by.text_stride;
    const int64_t prompt = by.prompt_length[slot];
    for (int64_t i = repetition_ == 1.0f ? prompt : 0; i < by.length[slot]; ++i) count(text[i], i >= prompt);
  }
  ~Adjustments() { workspace_.forget_row(); }
  Adjustments(const Adjustments&) = delete;
  Adjustments& operator=(const Adjustments&) = delete;

  void append(int64_t token) {
    if (penalises_) count(token, true);
  }

  // Adjusts the logits of the token that will have this position.
  void apply(float* logits, int64_t position) {
    each(by_.bias, [&](int64_t i) { change(logits, by_.bias.tokens[i], [&](float x) { return x + by_.bias.values[i]; }); });
    for (const int64_t token : workspace_.seen) change(logits, token, [&](float x) { return penalised(x, counts_[token] / 2); });
    if (by_.stops.starts && position < by_.min_length[by_.slot(row_)]) {
      each(by_.stops, [&](int64_t i) { change(logits, by_.stops.tokens[i], [](float) { return -__builtin_inff(); }); });
    }
  }

  void restore(float* logits) {
    auto& before = workspace_.before;
    for (; !before.empty(); before.pop_back()) logits[before.back().first] = before.back().second;
  }

 private:
  // Odd: the token occurs; half of it: its occurrences in the answer.
  void count(int64_t token, bool answer) {
    if (token < 0 || token >= vocabulary_) return;
    if (!counts_[token]) workspace_.seen.push_back(token);
    counts_[token] = (counts_[token] | 1) + (answer ? 2 : 0);
  }

  float penalised(float x, uint32_t count) const {
    const float repeated = x > 0.0f ? x / repetition_ : x * repetition_;
    const float present = repeated - presence_ * (count ? 1.0f : 0.0f);
    return present - frequency_ * static_cast<float>(count);
  }

  template <class Visit>
  void each(const Entries& entries, Visit visit) {
    if (!entries.starts) return;
    for (int64_t i = entries.starts[row_]; i < entries.starts[row_ + 1]; ++i) visit(i);
  }

  template <class Change>
  void change(float* logits, int64_t token, Change changed) {
    if (token < 0 || token >= vocabulary_) return;
    workspace_.before.emplace_back(token, logits[token]);
    logits[token] = changed(logits[token]);
  }

  const DrawRows& by_;
  const int64_t row_, vocabulary_;
  Workspace& workspace_;
  uint32_t* const counts_;
  float presence_ = 0.0f, frequency_ = 0.0f, repetition_ = 1.0f;
  bool penalises_ = false;
};

Draw draw_of(const DrawCall& call, int64_t row, int64_t position, const float* logits, const DrawScratch& scratch) {
  const DrawRows& by = call.by;
  const int64_t slot = by.slot(row);
  Draw draw = {logits, call.vocabulary, by.temperature[slot], {0, 0}, __builtin_inff(), 0, 1.0f, scratch};
  noise_key(static_cast<uint64_t>(by.seeds[slot]), position, call.purpose, draw.key);
  if (by.deepest) draw.deepest = by.deepest[slot];
  if (by.top_k) draw.top_k = by.top_k[slot];
  if (by.top_p) draw.top_p = by.top_p[slot];
  if (by.typical_p) draw.truncation = {by.typical_p[slot], by.epsilon_cutoff[slot], by.eta_cutoff[slot], by.top_n_sigma[slot]};
  return draw;
}

// The first place of each row.
template <class Call>
std::vector<int64_t> first_places(const Call& call) {
  std::vector<int64_t> starts(static_cast<size_t>(call.rows));
  int64_t place = 0;
  for (int64_t row = 0; row < call.rows; ++row) {
    starts[static_cast<size_t>(row)] = place;
    place += call.packed ? call.counts[row] + 1 : call.block;
  }
  return starts;
}

template <class Work>
void for_every_row(Pool& pool, int64_t rows, Work work) {
  std::atomic<int64_t> next{0};
  in_parallel(pool, [&](int) {
    for (int64_t row = next++; row < rows; row = next++) work(row);
  });
}

// The address of a row's logits, and the stride from place to place.
struct RowLogits {
  RowLogits(const DrawCall& call, int64_t row, int64_t first_place) {
    const bool elsewhere = call.instead && call.instead[row];
    first = elsewhere ? call.instead[row] : call.logits + first_place * call.stride;
    stride = elsewhere ? call.vocabulary : call.stride;
  }
  float* at(int64_t place) const { return first + place * stride; }
  float* first;
  int64_t stride;
};

// The draft token at this place that equals the token; -1 if there is none.
int64_t matching_draft(const DrawCall& call, int64_t row, int64_t place, int64_t token) {
  const int64_t* draft_tokens = call.draft_tokens + row * call.draft_stride;
  if (!call.parents) return place < call.counts[row] && draft_tokens[place] == token ? place : -1;
  const int64_t* parents = call.parents + row * call.draft_stride;
  for (int64_t draft = place; draft < call.counts[row]; ++draft) {  // parents come before their children
    if (parents[draft] == place - 1 && draft_tokens[draft] == token) return draft;
  }
  return -1;
}

// Log-softmax of a place's unadjusted logits at one token. place: counted over all rows.
float own_logprob(const Kernels& kernels, const DrawCall& call, int64_t place, int64_t token, const DrawScratch& scratch) {
  const Draw draw = {call.logits + place * call.stride, call.vocabulary, 1.0f, {0, 0}, __builtin_inff(), 0, 1.0f, scratch};
  return kernels.logprobs(draw, token, 0, nullptr, nullptr);
}

// Calls visit(draw, row, place) for the places of a row, each after the draft tokens before it.
template <class Visit>
void at_places_of(const DrawCall& call, int64_t row, int64_t first_place, Visit visit) {
  Workspace& workspace = Workspace::own();
  const DrawScratch scratch = workspace.lists(call.vocabulary);
  Adjustments adjustments(call.by, row, call.vocabulary, workspace);
  const int64_t* draft_tokens = call.draft_tokens + row * call.draft_stride;
  for (int64_t i = 0; i < call.first; ++i) adjustments.append(draft_tokens[i]);
  const RowLogits places(call, row, first_place);
  for (int64_t place = 0; place < call.block; ++place) {
    float* logits = places.at(place);
    const int64_t position = call.by.length[call.by.slot(row)] + call.first + place;
    adjustments.apply(logits, position);
    visit(draw_of(call, row, position, logits, scratch), row, place);
    adjustments.restore(logits);
    if (call.first + place < call.draft_stride) adjustments.append(draft_tokens[call.first + place]);
  }
}

// The same for every row.
template <class Visit>
void at_places(Pool& pool, const DrawCall& call, Visit visit) {
  const std::vector<int64_t> starts = first_places(call);
  for_every_row(pool, call.rows, [&](int64_t row) { at_places_of(call, row, starts[static_cast<size_t>(row)], visit); });
}

// The top-ranked tokens of these logits and their probabilities (growth.candidates).
void draw_top(const Kernels& kernels, const Draw& draw, float* logits, int64_t width, int64_t* tokens, float* chances,
          std::vector<std::pair<int64_t, float>>& taken) {
  float left = 1.0f;
  for (int64_t rank = 0; rank < width; ++rank) {
    const int64_t token = kernels.draw(draw);
    const float chance = kernels.likelihood(draw, token);
    tokens[rank] = token;
    chances[rank] = chance * left;
    left = std::max(left - chances[rank], 0.0f);
    taken.emplace_back(token, logits[token]);
    logits[token] = -__builtin_inff();
  }
  for (; !taken.empty(); taken.pop_back()) logits[taken.back().first] = taken.back().second;
}

// Each token's share of all weights, noise included; the remaining tokens weigh as much as the last one
// (growth._shares).
void noisy_shares(const Draw& draw, int64_t width, const int64_t* tokens, float* chances) {
  constexpr double kLeastTemperature = 1e-30;
  std::vector<double> weights(static_cast<size_t>(width));
  double top = -__builtin_inf(), all = 0.0;
  for (int64_t rank = 0; rank < width; ++rank) {
    const uint32_t hash = mix(mix(draw.key[0] ^ static_cast<uint32_t>(tokens[rank])) ^ draw.key[1]) >> 8;
    const double noise = -std::log(-std::log((static_cast<double>(hash) + 0.5) * 0x1p-24));
    const double temperature = std::max(static_cast<double>(draw.temperature), kLeastTemperature);
    weights[static_cast<size_t>(rank)] = std::log(static_cast<double>(chances[rank])) / temperature + noise;
    top = std::max(top, weights[static_cast<size_t>(rank)]);
  }
  for (double& weight : weights) all += weight = std::exp(weight - top);
  all += weights.back();
  for (int64_t rank = 0; rank < width; ++rank) {
    const double part = weights[static_cast<size_t>(rank)] / all;
    chances[rank] = std::isnan(part) ? 0.0f : static_cast<float>(part);
  }
}

// In place of a token that could not be drawn (Undrawn in src/paceline/core/draft.py).
constexpr int64_t kNotFinite = -1, kAllForbidden = -2;

// The token, if its logit could be drawn from: a draw returns a token whose logit is not finite only if the largest is
// not. drawn_from: the token's logit after all adjustments. own: the model's.
int64_t checked(int64_t token, float drawn_from, float own) {
  if (std::isfinite(drawn_from)) return token;
  return std::isfinite(own) ? kAllForbidden : kNotFinite;
}

// Draws each row's tokens [block] up to the first that matches no draft token; accepted: number of matches; path, or
// null: the matching draft tokens [draft_stride]; scored [rows], or null: nonzero where the tokens' log-probabilities
// under the model are wanted, in own [block]. Other elements stay.
void accept_draft_tokens(const Kernels& kernels, Pool& pool, const DrawCall& call, int64_t* tokens, int64_t* accepted, int64_t* path, const int64_t* scored,
            float* own) {
  const std::vector<int64_t> starts = first_places(call);
  for_every_row(pool, call.rows, [&](int64_t row) {
    Workspace& workspace = Workspace::own();
    const DrawScratch scratch = workspace.lists(call.vocabulary);
    Adjustments adjustments(call.by, row, call.vocabulary, workspace);
    const int64_t first_place = starts[static_cast<size_t>(row)];
    const RowLogits places(call, row, first_place);
    for (int64_t place = 0, depth = 0;; ++depth) {
      float* logits = places.at(place);
      const int64_t position = call.by.length[call.by.slot(row)] + depth;
      adjustments.apply(logits, position);
      const int64_t drawn = kernels.draw(draw_of(call, row, position, logits, scratch));
      const float drawn_from = logits[drawn];
      adjustments.restore(logits);
      const int64_t token = checked(drawn, drawn_from, call.logits[(first_place + place) * call.stride + drawn]);
      tokens[row * call.block + depth] = token;
      accepted[row] = depth;
      if (token < 0) break;
      if (scored && scored[row]) {
        own[row * call.block + depth] = own_logprob(kernels, call, first_place + place, token, scratch);
      }
      const int64_t draft = matching_draft(call, row, place, token);
      if (draft < 0) break;
      if (path) path[row * call.draft_stride + depth] = draft;
      adjustments.append(token);
      place = draft + 1;
    }
  });
}

}  // namespace

void draw_leaders(const Kernels& kernels, Pool& pool, const DrawCall& call, const std::vector<Fork>& forks, int64_t width,
                  int64_t* tokens, float* chances) {
  const int64_t most = std::min(width, call.vocabulary);
  for_every_row(pool, static_cast<int64_t>(forks.size()), [&](int64_t i) {
    const Fork& fork = forks[static_cast<size_t>(i)];
    Workspace& workspace = Workspace::own();
    Adjustments adjustments(call.by, fork.row, call.vocabulary, workspace);
    int64_t position = call.by.length[call.by.slot(fork.row)];
    for (int64_t at = fork.draft; at >= 0; at = call.parents[fork.row * call.draft_stride + at], ++position) {
      adjustments.append(call.draft_tokens[fork.row * call.draft_stride + at]);
    }
    adjustments.apply(fork.logits, position);
    const Draw draw = draw_of(call, fork.row, position, fork.logits, workspace.lists(call.vocabulary));
    std::fill(chances + i * width, chances + (i + 1) * width, 0.0f);
    draw_top(kernels, draw, fork.logits, most, tokens + i * width, chances + i * width, workspace.taken);
    if (draw.temperature > 0.0f) noisy_shares(draw, most, tokens + i * width, chances + i * width);
    adjustments.restore(fork.logits);
  });
}

void draw_draft_tokens(const Kernels& kernels, Pool& pool, const DrawCall& call, const std::vector<int64_t>& rows, int64_t* draft_tokens,
                  float* chances, float* probabilities) {
  for_every_row(pool, static_cast<int64_t>(rows.size()), [&](int64_t i) {
    const int64_t each = rows[static_cast<size_t>(i)];
    at_places_of(call, each, each, [&](const Draw& draw, int64_t row, int64_t) {
      const int64_t token = kernels.draw(draw), at = row * call.draft_stride + call.first;
      if (chances) chances[at] = kernels.likelihood(draw, token);
      if (probabilities) kernels.probabilities(draw, probabilities + (call.first * call.rows + row) * call.vocabulary);
      draft_tokens[at] = token;
    });
  });
}

}  // namespace paceline

using namespace paceline;

// A token for every place: tokens [rows][block].
PL_EXPORT Problem pl_draw(const Kernels* kernels, Pool* pool, const DrawCall* call, int64_t* tokens) {
  return guarded([&] {
    at_places(*pool, *call, [&](const Draw& draw, int64_t row, int64_t place) {
      tokens[row * call->block + place] = kernels->draw(draw);
    });
  });
}

// See accept_draft_tokens.
PL_EXPORT Problem pl_accept(const Kernels* kernels, Pool* pool, const DrawCall* call, int64_t* tokens, int64_t* accepted, int64_t* path,
                            const int64_t* scored, float* own) {
  return guarded([&] { accept_draft_tokens(*kernels, *pool, *call, tokens, accepted, path, scored, own); });
}

// The distributions that tokens are drawn from: out [rows][block][vocabulary].
PL_EXPORT Problem pl_probabilities(const Kernels* kernels, Pool* pool, const DrawCall* call, float* out) {
  return guarded([&] {
    at_places(*pool, *call, [&](const Draw& draw, int64_t row, int64_t place) {
      kernels->probabilities(draw, out + (row * call->block + place) * call->vocabulary);
    });
  });
}

// The softmax of the adjusted logits at tokens [rows][block].
PL_EXPORT Problem pl_likelihood(const Kernels* kernels, Pool* pool, const DrawCall* call, const int64_t* tokens, float* chances) {
  return guarded([&] {
    at_places(*pool, *call, [&](const Draw& draw, int64_t row, int64_t place) {
      const int64_t at = row * call->block + place;
      chances[at] = kernels->likelihood(draw, tokens[at]);
    });
  });
}

// Log-probabilities of the tokens that rows gained, and of the most likely ones.
PL_EXPORT Problem pl_logprobs(const Kernels* kernels, Pool* pool, const LogprobCall* call) {
  return guarded([&] {
    const std::vector<int64_t> starts = first_places(*call);
    for_every_row(*pool, call->rows, [&](int64_t row) {
      const int64_t wanted = call->wanted[row];
      if (wanted < 0) return;
      const DrawScratch scratch = Workspace::own().lists(call->vocabulary);
      const float* logits = call->logits + starts[static_cast<size_t>(row)] * call->stride;
      for (int64_t place = 0; place <= call->accepted[row]; ++place, logits += call->stride) {
        const int64_t at = row * call->block + place;
        if (call->tokens[at] < 0) return;
        const Draw draw = {logits, call->vocabulary, 1.0f, {0, 0}, __builtin_inff(), wanted, 1.0f, scratch};
        call->own[at] = kernels->logprobs(draw, call->tokens[at], wanted, call->ids + at * call->most, call->values + at * call->most);
      }
    });
  });
}

// Appends accepted[row] + 1 tokens of [rows][block] to the rows in `slots`; gained: tokens appended per row.
PL_EXPORT void pl_gain(const TextRows* by, const int64_t* slots, const int64_t* tokens, int64_t block, const int64_t* accepted, int64_t rows,
                       int64_t* gained) {
  for (int64_t row = 0; row < rows; ++row) gained[row] = by->gain(slots[row], tokens + row * block, accepted[row] + 1);
}

namespace {

// The parent of each draft token of a row.
struct Parents {
  Parents(const RoundCall& call, int64_t row) : parents(call.parents ? call.parents + row * call.draft_stride : nullptr) {}
  int64_t operator[](int64_t draft) const { return parents ? parents[draft] : draft - 1; }
  const int64_t* parents;
};

// The tokens of a round: each row's last one, which the target has not computed, and its draft tokens.
class RoundTokens {
 public:
  explicit RoundTokens(const RoundCall& call) : is_tree_(call.parents != nullptr) {
    for (int64_t row = 0; row < call.rows; ++row) {
      const int64_t slot = call.slots[row], last = call.text.length[slot] - 1, root = static_cast<int64_t>(tokens_.size());
      const Parents parent_of(call, row);
      add(slot, call.text.text[slot * call.text.text_stride + last], last, last, -1);
      for (int64_t draft = 0; draft < call.counts[row]; ++draft) {
        const int64_t parent = root + 1 + parent_of[draft], before = positions_[static_cast<size_t>(parent)];
        add(slot, call.draft_tokens[row * call.draft_stride + draft], before + 1, last + 1 + draft, parent);
      }
    }
  }
  Tokens view() const {
    return {tokens_.data(), rows_.data(), positions_.data(), is_tree_ ? places_.data() : nullptr, is_tree_ ? parents_.data() : nullptr,
            static_cast<int>(tokens_.size())};
  }
  const int64_t* places() const { return places_.data(); }  // per token: its place in the row's cache, of chains, too

 private:
  void add(int64_t slot, int64_t token, int64_t position, int64_t place, int64_t parent) {
    tokens_.push_back(token);
    rows_.push_back(slot);
    positions_.push_back(position);
    places_.push_back(place);
    parents_.push_back(parent);
  }

  const bool is_tree_;
  std::vector<int64_t> tokens_, rows_, positions_, places_, parents_;
};

// An error message about the shape of a round's draft tokens, or null.
const char* problem_with_draft(const RoundCall& call) {
  for (int64_t row = 0; row < call.rows; ++row) {
    const int64_t count = call.counts[row];
    if (call.text.length[call.slots[row]] < 1) return "a row has no text";
    if (count < 0 || count >= call.block || count > call.draft_stride) return "a row has more draft tokens than fit";
    const Parents parent_of(call, row);
    for (int64_t draft = 0; draft < count; ++draft) {
      if (parent_of[draft] < -1 || parent_of[draft] >= draft) return "a token comes before its parent";
    }
  }
  return nullptr;
}

// Makes the draft of a round that begins with it. Returns an error message, or null.
const char* draft_of_round(Pool& pool, const RoundCall& call) {
  if (!call.draft) return nullptr;
  const auto began = std::chrono::steady_clock::now();
  const char* problem = run_draft(*call.drafter, pool, *call.draft, *call.draft_cache, nullptr);
  *call.draft_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  return problem;
}

// For trees: the accepted draft tokens that do not lie at their final slots. A draft token is never before its place on
// the path, so moves in this order overwrite nothing that has yet to move.
std::vector<Move> moves_of(const RoundCall& call) {
  std::vector<Move> moves;
  for (int64_t row = 0; call.parents && row < call.rows; ++row) {
    const int64_t slot = call.slots[row], behind = call.text.length[slot], *path = call.path + row * call.draft_stride;
    for (int64_t place = 0; place < call.accepted[row]; ++place) {
      if (path[place] != place) moves.push_back({slot, behind + path[place], behind + place});
    }
  }
  return moves;
}

// Reference implementation: RowTables.keep in src/paceline/core/row_tables.py.
void move_in_layer(const CacheVectors& v, int64_t blocks, int64_t layer, int64_t heads, int64_t item, const std::vector<Move>& moves) {
  const auto at = [&](const Move& move, int64_t position, int64_t head) {
    const int64_t page = v.pages[move.row * blocks + position / kPagePositions];
    return v.data + (layer * v.layer_stride + page * v.page_stride + head * v.head_stride + position % kPagePositions * v.position_stride) * item;
  };
  for (int64_t head = 0; head < heads; ++head) {
    for (const Move& move : moves) std::memcpy(at(move, move.to, head), at(move, move.from, head), static_cast<size_t>(v.position_stride * item));
  }
}

void move_keys_and_values(Pool& pool, const Cache& cache, const std::vector<Move>& moves) {
  const int64_t blocks = static_cast<int64_t>(blocks_for(cache.capacity));
  in_parallel(pool, [&](int thread) {
    for (const KVTable* table = cache.tables; table < cache.tables + cache.table_count; ++table) {
      const Share share(static_cast<int>(table->layers), thread, pool.threads());
      for (const CacheVectors& vectors : {table->keys, table->values}) {
        if (!vectors.data) continue;
        for (int64_t layer = share.first; layer < share.last; ++layer) move_in_layer(vectors, blocks, layer, table->heads, bytes_of(cache.element), moves);
      }
    }
  });
}

// The same for the inputs of recurrent layers.
void move_inputs(const Model& model, const Cache& cache, const std::vector<Move>& moves) {
  const size_t width = static_cast<size_t>(model.spec.recurrent.input_width());
  for (const Layer& layer : model.layers) {
    if (!layer.recurrent) continue;
    for (const Move& move : moves) {
      const int64_t slot = move.row, base = cache.base[slot];
      float* inputs = cache.inputs + static_cast<size_t>((layer.recurrent->place * cache.rows + slot) * cache.window) * width;
      std::memcpy(inputs + static_cast<size_t>(move.to - base) * width, inputs + static_cast<size_t>(move.from - base) * width, sizeof(float) * width);
    }
  }
}

}  // namespace

// Drafts if the round begins with that, verifies the draft tokens, accepts them while they equal the target's own draws, keeps the accepted keys and values,
// and commits. Returns an error message, or null.
PL_EXPORT Problem pl_round(Model* model, Pool* pool, const RoundCall* call, const Cache* cache, double* seconds) {
  return guarded([&]() -> const char* {
    if (const char* problem = draft_of_round(*pool, *call)) return problem;
    if (const char* problem = problem_with_draft(*call)) return problem;
    const RoundTokens fed(*call);
    const Tokens tokens = fed.view();
    if (tokens.count > call->room) return "the logits' memory is too small for the round's tokens";
    if (const char* problem = model->problem_with(tokens, *cache)) return problem;
    if (const char* problem = call->parents ? problem_with_trees(tokens, cache->capacity) : nullptr) return problem;
    const PassOutputs out = {call->hidden, call->taps, static_cast<int>(call->tap_count), call->features};
    model->forward(*pool, tokens, *cache, out, seconds);
    if (call->head) keep_states(*call->head, *pool, call->kept, tokens.rows, fed.places(), call->features, tokens.count);
    model->logits(*pool, call->hidden, tokens.count, call->logits, model->spec.head);
    DrawCall draw = {};
    draw.by = call->by;
    draw.logits = call->logits;
    draw.draft_tokens = call->draft_tokens;
    draw.counts = call->counts;
    draw.parents = call->parents;
    draw.rows = call->rows;
    draw.block = call->block;
    draw.stride = draw.vocabulary = model->vocabulary();
    draw.draft_stride = call->draft_stride;
    draw.packed = 1;
    draw.purpose = call->purpose;
    accept_draft_tokens(model->kernels, *pool, draw, call->tokens, call->accepted, call->parents ? call->path : nullptr, nullptr, nullptr);
    const std::vector<Move> moves = moves_of(*call);
    if (!moves.empty()) move_keys_and_values(*pool, *cache, moves);
    if (model->spec.recurrent.kind) move_inputs(*model, *cache, moves);
    if (call->head) move_states(*call->head, call->kept, moves);
    pl_gain(&call->text, call->slots, call->tokens, call->block, call->accepted, call->rows, call->gained);
    return nullptr;
  });
}
