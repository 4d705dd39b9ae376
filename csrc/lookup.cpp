// Prompt lookup: earlier occurrences of the end of each row's text, and the tokens that follow them.
// src/paceline/drafters/lookup.py defines which occurrence wins.
#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

#include "exports.h"
#include "lookup.h"

namespace paceline {
namespace {

constexpr const char* kOutside = "a length is negative or beyond the width";
constexpr int64_t kLongestSuffix = 8;
constexpr int64_t kMostPlaces = 16;  // latest occurrences of an n-gram that are compared
constexpr int64_t kMostOwnPlaces = 4096;  // the same in the row's own text, for trees
constexpr int64_t kWhole = 100;  // a share of all, in percent

struct Row {
  const int64_t* text;
  int64_t length;

  const int64_t* last() const { return text + length - 1; }
};

// texts: the texts that contain it; null: the row's own text.
struct Match {
  const Texts* texts = nullptr;
  int64_t size = 0;
  int64_t number = 0;  // index of the text
  int64_t place = 0;
  int64_t share = kWhole;  // percent of the equally long matches that go on with the same token
};

// Number of the row's last tokens that `text` has up to and including `place`.
template <typename Token>
int64_t agreeing(const Row& row, const Token* text, int64_t place) {
  const int64_t most = std::min({kLongestSuffix, row.length, place + 1});
  int64_t size = 0;
  while (size < most && text[place - size] == row.last()[-size]) ++size;
  return size;
}

}  // namespace

// Texts to copy from, which may grow. The places of each 4-, 2- and 1-gram that have a successor are chained, the latest
// first. Beyond `most` tokens the texts with the lowest numbers are forgotten.
class Texts {
 public:
  explicit Texts(int64_t most) : most_(most) {}

  int64_t held() const { return held_; }
  int64_t count() const { return static_cast<int64_t>(texts_.size()); }
  bool has_forgotten(int64_t number) const { return number < oldest_; }
  int64_t size(int64_t number) const {
    return oldest_ <= number && number < end() ? static_cast<int64_t>(at(number).tokens.size()) : 0;
  }

  void append(int64_t number, const int64_t* tokens, int64_t count) {
    if (has_forgotten(number)) return;
    if (number >= end()) texts_.resize(number - oldest_ + 1);
    Text& text = texts_[number - oldest_];
    for (int64_t i = 0; i < count; ++i) {
      if (!text.tokens.empty()) add_to_index(static_cast<int32_t>(number), text);
      text.tokens.push_back(static_cast<int32_t>(tokens[i]));
    }
    held_ += count;
    while (held_ > most_ && texts_.size() > 1) forget_oldest();
  }

  // Copies all tokens, text after text, and the number of each text's.
  void copy(int32_t* tokens, int64_t* sizes) const {
    for (const Text& text : texts_) {
      tokens = std::copy(text.tokens.begin(), text.tokens.end(), tokens);
      *sizes++ = static_cast<int64_t>(text.tokens.size());
    }
  }

  // The longest match, if it is longer than `best`, which stands in other texts. Among equally long ones the latest that goes on
  // as most of them do.
  Match longer_match(const Row& row, const Match& best) const {
    Match matches[kMostPlaces];
    for (int chain = 0; chain < kChains; ++chain) {
      const int64_t count = matches_in(chain, row, matches);
      if (count == 0) continue;
      const int64_t longest = std::max_element(matches, matches + count, shorter)->size;
      if (longest <= best.size) return best;
      return most_common(matches, std::remove_if(matches, matches + count, [&](const Match& match) { return match.size < longest; }) - matches);
    }
    return best;
  }

  // The longest match, then others of the same n-gram and of shorter ones; single tokens only if there are no others.
  void all_matches(const Row& row, std::vector<Match>& all) const {
    const Match best = longer_match(row, {});
    if (best.size == 0) return;
    all.push_back(best);
    Match matches[kMostPlaces];
    for (int chain = 0; chain < kChains - (best.size > 1); ++chain) all.insert(all.end(), matches, matches + matches_in(chain, row, matches));
  }

  // Copies up to k draft tokens and returns their number.
  int64_t continue_match(const Match& match, int64_t k, int64_t* draft_tokens) const {
    const std::vector<int32_t>& text = at(match.number).tokens;
    const int64_t many = std::min(k, static_cast<int64_t>(text.size()) - match.place - 1);
    std::copy_n(text.data() + match.place + 1, many, draft_tokens);
    return many;
  }

 private:
  static constexpr int kChains = 3;
  static constexpr int64_t kGrams[kChains] = {4, 2, 1};
  struct Place {
    int32_t number, place;
  };
  // before: of each token with a successor, the previous places of the n-grams that end there; number -1: none.
  struct Text {
    std::vector<int32_t> tokens;
    std::vector<std::array<Place, kChains>> before;
  };

  int64_t end() const { return oldest_ + static_cast<int64_t>(texts_.size()); }
  const Text& at(int64_t number) const { return texts_[number - oldest_]; }
  static bool shorter(const Match& a, const Match& b) { return a.size < b.size; }

  // A key of the `gram` tokens that end at `last`. Different n-grams may share a key: their tokens are compared.
  template <typename Token>
  static uint64_t key(const Token* last, int64_t gram) {
    uint64_t key = 0;
    for (int64_t i = 0; i < gram; ++i) key = (key ^ static_cast<uint32_t>(last[-i])) * 0x9E3779B97F4A7C15u;
    return key;
  }

  // The latest matches of at least the chain's tokens, the latest first. Returns their number. Beyond a forgotten text they
  // are not known.
  int64_t matches_in(int chain, const Row& row, Match* matches) const {
    if (row.length < kGrams[chain]) return 0;
    const auto found = latest_[chain].find(key(row.last(), kGrams[chain]));
    int64_t count = 0;
    Place place = found == latest_[chain].end() ? kNone : found->second;
    for (int64_t visited = 0; place.number >= oldest_ && visited < kMostPlaces; ++visited) {
      const Text& text = at(place.number);
      const int64_t size = agreeing(row, text.tokens.data(), place.place);
      if (size >= kGrams[chain]) matches[count++] = {this, size, place.number, place.place};
      place = text.before[place.place][chain];
    }
    return count;
  }

  Match most_common(const Match* matches, int64_t count) const {
    Match best;
    int64_t most = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t same = std::count_if(matches, matches + count, [&](const Match& other) { return next(other) == next(matches[i]); });
      if (same > most) best = matches[i], most = same;
    }
    best.share = kWhole * most / count;
    return best;
  }
  int32_t next(const Match& match) const { return at(match.number).tokens[match.place + 1]; }

  // Indexes the text's last token, which is about to get a successor.
  void add_to_index(int32_t number, Text& text) {
    const Place here = {number, static_cast<int32_t>(text.tokens.size()) - 1};
    text.before.push_back({kNone, kNone, kNone});
    for (int chain = 0; chain < kChains; ++chain) {
      if (here.place + 1 < kGrams[chain]) continue;
      Place& latest = latest_[chain].try_emplace(key(&text.tokens.back(), kGrams[chain]), kNone).first->second;
      text.before.back()[chain] = latest;
      latest = here;
    }
  }

  void forget_oldest() {
    const Text& text = texts_.front();
    for (int32_t place = 0; place < static_cast<int32_t>(text.before.size()); ++place) {
      for (int chain = 0; chain < kChains; ++chain) {
        if (place + 1 < kGrams[chain]) continue;
        const auto found = latest_[chain].find(key(&text.tokens[place], kGrams[chain]));
        if (found != latest_[chain].end() && found->second.number == oldest_) latest_[chain].erase(found);
      }
    }
    held_ -= static_cast<int64_t>(text.tokens.size());
    texts_.pop_front();
    ++oldest_;
  }

  static constexpr Place kNone = {-1, 0};
  int64_t most_, held_ = 0, oldest_ = 0;
  std::deque<Text> texts_;
  std::unordered_map<uint64_t, Place> latest_[kChains];
};

namespace {

// From the end backwards, so that the later of equal matches wins.
Match in_own_text(const Row& row) {
  Match best;
  for (int64_t place = row.length - 2; place >= 0 && best.size < kLongestSuffix; --place) {
    if (row.text[place] != *row.last()) continue;
    const int64_t size = agreeing(row, row.text, place);
    if (size > best.size) best = {nullptr, size, 0, place};
  }
  return best;
}

int64_t continue_own_text(const Row& row, int64_t place, int64_t k, int64_t* draft_tokens) {
  const int64_t period = row.length - 1 - place;
  for (int64_t i = 0; i < k; ++i) draft_tokens[i] = row.text[place + 1 + i % period];
  return k;
}

struct Found {
  int64_t matched = 0, share = kWhole, source = 0, count = 0;
};

// Among equally long matches the first wins: own text, references, answers, documents. The answers include the row's own,
// which can only win with a longer match than its own search found.
Found look_up(const Row& row, const Texts* documents, const RowSources& row_sources, int64_t k, int64_t* draft_tokens) {
  const Texts* others[] = {row_sources.references, row_sources.answers, documents};
  Match best = in_own_text(row);
  int64_t source = 0;
  for (int64_t i = 0; i < 3 && best.size < kLongestSuffix; ++i) {
    if (others[i] == nullptr) continue;
    best = others[i]->longer_match(row, best);
    if (best.texts == others[i]) source = i + 1;
  }
  if (best.size == 0) return {};
  return {best.size, best.share, source, best.texts == nullptr ? continue_own_text(row, best.place, k, draft_tokens) : best.texts->continue_match(best, k, draft_tokens)};
}

// Whether these draft tokens are no prefix of an earlier continuation.
bool is_new(const int64_t* draft_tokens, int64_t count, const int64_t* before, const int64_t* counts, int64_t ways, int64_t k) {
  for (int64_t way = 0; way < ways; ++way) {
    if (count <= counts[way] && std::equal(draft_tokens, draft_tokens + count, before + way * k)) return false;
  }
  return count > 0;
}

// Up to `ways` different continuations, those of the longest matches first: the first is that of `look_up`. Returns
// their number.
int64_t look_up_all(const Row& row, const Texts* documents, const RowSources& row_sources, int64_t ways, int64_t k, int64_t* draft_tokens,
                    int64_t* counts, int64_t* matched, int64_t* sources) {
  const Texts* others[] = {row_sources.references, row_sources.answers, documents};
  std::vector<Match> matches;
  for (int64_t place = row.length - 2; place >= 0 && static_cast<int64_t>(matches.size()) < kMostOwnPlaces; --place) {
    if (row.text[place] == *row.last()) matches.push_back({nullptr, agreeing(row, row.text, place), 0, place});
  }
  for (const Texts* texts : others) {
    if (texts != nullptr) texts->all_matches(row, matches);
  }
  std::stable_sort(matches.begin(), matches.end(), [](const Match& a, const Match& b) { return a.size > b.size; });
  int64_t made = 0;
  for (const Match& match : matches) {
    if (made == ways) break;
    int64_t* here = draft_tokens + made * k;
    const int64_t count = match.texts == nullptr ? continue_own_text(row, match.place, k, here) : match.texts->continue_match(match, k, here);
    if (!is_new(here, count, draft_tokens, counts, made, k)) continue;
    const Texts** source = std::find(others, others + 3, match.texts);
    counts[made] = count, matched[made] = match.size, sources[made] = match.texts == nullptr ? 0 : 1 + (source - others);
    ++made;
  }
  return made;
}

// Appends the rows' new tokens to their answers first, without the last, which the model has not read: if it reads NaN
// there, no other row should have drafted it. Returns whether all lengths lie within the width.
bool append_to_answers(const RowSources* row_sources, const int64_t* slots, const int64_t* text, int64_t stride, int64_t width,
                       const int64_t* lengths, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t slot = slots[i], length = lengths[slot];
    if (length < 0 || length > width) return false;
    if (row_sources == nullptr || row_sources[i].answers == nullptr) continue;
    Texts& answers = *row_sources[i].answers;
    const int64_t number = row_sources[i].number, known = row_sources[i].first + answers.size(number);
    if (!answers.has_forgotten(number) && known < length) answers.append(number, text + slot * stride + known, length - 1 - known);
  }
  return true;
}

}  // namespace
}  // namespace paceline

using namespace paceline;

// most: tokens held in all; beyond it the texts with the lowest numbers are forgotten, except for the last.
PL_EXPORT NewObject<Texts> pl_texts_new(int64_t most) { return made<Texts>(most); }
PL_EXPORT void pl_texts_free(Texts* texts) { delete texts; }
PL_EXPORT int64_t pl_texts_held(const Texts* texts) { return texts->held(); }
PL_EXPORT int64_t pl_texts_size(const Texts* texts, int64_t number) { return texts->size(number); }
PL_EXPORT int64_t pl_texts_count(const Texts* texts) { return texts->count(); }
// All texts that were not forgotten, the oldest first. tokens: [pl_texts_held]; sizes: [pl_texts_count], tokens of each text.
PL_EXPORT void pl_texts_copy(const Texts* texts, int32_t* tokens, int64_t* sizes) { texts->copy(tokens, sizes); }
PL_EXPORT Problem pl_texts_append(Texts* texts, int64_t number, const int64_t* tokens, int64_t count) {
  return guarded([&] { texts->append(number, tokens, count); });
}

// slots: of the rows, in text and lengths. text: at most `width` tokens in each slot, `stride` apart. row_sources: per row, or null; their answers are
// brought up to date first. draft_tokens [rows][k], 0 beyond counts[row]; shares: percent of the equally long matches that
// go on like the draft; sources: 0 the row's own text, 1 references, 2 answers, 3 documents. Returns an error message, or null.
PL_EXPORT Problem pl_lookup(const Texts* documents, const RowSources* row_sources, const int64_t* slots, const int64_t* text,
                            int64_t stride, int64_t width, const int64_t* lengths, int64_t rows, int64_t k, int64_t* draft_tokens, int64_t* counts, int64_t* matched,
                            int64_t* shares, int64_t* sources) {
  return guarded([&]() -> const char* {
    if (!append_to_answers(row_sources, slots, text, stride, width, lengths, rows)) return kOutside;
    std::fill(draft_tokens, draft_tokens + rows * k, 0);
    for (int64_t i = 0; i < rows; ++i) {
      Found found;
      if (lengths[slots[i]] > 0) {
        const Row row = {text + slots[i] * stride, lengths[slots[i]]};
        found = look_up(row, documents, row_sources == nullptr ? RowSources{} : row_sources[i], k, draft_tokens + i * k);
      }
      matched[i] = found.matched, shares[i] = found.share, counts[i] = found.count, sources[i] = found.source;
    }
    return nullptr;
  });
}

// The same with up to `ways` different continuations per row: draft_tokens [rows][ways][k]; counts, matched, sources
// [rows][ways]; made [rows]: their number.
PL_EXPORT Problem pl_lookup_all(const Texts* documents, const RowSources* row_sources, const int64_t* slots, const int64_t* text,
                                int64_t stride, int64_t width, const int64_t* lengths, int64_t rows, int64_t ways, int64_t k, int64_t* draft_tokens, int64_t* counts,
                                int64_t* matched, int64_t* sources, int64_t* made) {
  return guarded([&]() -> const char* {
    if (!append_to_answers(row_sources, slots, text, stride, width, lengths, rows)) return kOutside;
    for (int64_t i = 0; i < rows; ++i) {
      const Row row = {text + slots[i] * stride, lengths[slots[i]]};
      const RowSources beside = row_sources == nullptr ? RowSources{} : row_sources[i];
      const int64_t at = i * ways;
      made[i] = row.length == 0 ? 0 : look_up_all(row, documents, beside, ways, k, draft_tokens + at * k, counts + at, matched + at, sources + at);
    }
    return nullptr;
  });
}
