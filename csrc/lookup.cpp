// Prompt lookup: earlier occurrences of the end of each row's text, and the tokens that follow them.
// src/paceline/drafters/lookup.py defines which occurrence wins.
#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "exports.h"
#include "lookup.h"

namespace paceline {
namespace {

constexpr const char* kOutside = "a length is negative or beyond the width";
constexpr int64_t kLongestSuffix = 5;
constexpr int64_t kMostPlaces = 4096;  // occurrences of a pair of tokens that are examined: a text may repeat one pair over and over

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

// Texts to copy from, which may grow. The places of each pair of tokens that have a successor are chained, the latest
// first; of single tokens the latest place is stored.
class Texts {
 public:
  int64_t size(int64_t number) const { return number < count() ? static_cast<int64_t>(texts_[number].size()) : 0; }

  void append(int64_t number, const int64_t* tokens, int64_t tokens_count) {
    if (number >= count()) texts_.resize(number + 1);
    std::vector<int32_t>& text = texts_[number];
    for (int64_t i = 0; i < tokens_count; ++i) {
      if (!text.empty()) add_to_index(static_cast<int32_t>(number), text);
      text.push_back(static_cast<int32_t>(tokens[i]));
    }
  }

  // The longest match, if it is longer than `best`, which stands in other texts.
  Match longer_match(const Row& row, Match best) const {
    for (int64_t visited = 0, at = row.length < 2 ? -1 : found(pairs_, pair(row.last()[-1], *row.last()));
         at >= 0 && visited < kMostPlaces && best.size < kLongestSuffix; at = places_[at].before, ++visited) {
      const Place& place = places_[at];
      const int64_t size = agreeing(row, texts_[place.number].data(), place.place);
      if (size > best.size) best = {this, size, place.number, place.place};
    }
    if (best.size > 0) return best;
    const int64_t at = found(singles_, pair(-1, *row.last()));
    return at < 0 ? best : Match{this, 1, places_[at].number, places_[at].place};
  }

  // All places of the row's last two tokens, the latest first; if there are none, the latest place of its last one.
  void all_matches(const Row& row, std::vector<Match>& matches) const {
    const size_t before = matches.size();
    for (int64_t visited = 0, at = row.length < 2 ? -1 : found(pairs_, pair(row.last()[-1], *row.last())); at >= 0 && visited < kMostPlaces;
         at = places_[at].before, ++visited) {
      const Place& place = places_[at];
      matches.push_back({this, agreeing(row, texts_[place.number].data(), place.place), place.number, place.place});
    }
    const int64_t at = found(singles_, pair(-1, *row.last()));
    if (matches.size() == before && at >= 0) matches.push_back({this, 1, places_[at].number, places_[at].place});
  }

  // Copies up to k draft tokens and returns their number.
  int64_t continue_match(const Match& match, int64_t k, int64_t* draft_tokens) const {
    const std::vector<int32_t>& text = texts_[match.number];
    const int64_t many = std::min(k, static_cast<int64_t>(text.size()) - match.place - 1);
    std::copy_n(text.data() + match.place + 1, many, draft_tokens);
    return many;
  }

 private:
  using Latest = std::unordered_map<uint64_t, int32_t>;
  struct Place {
    int32_t number, place, before;  // before: the previous place of the same pair, or -1
  };

  int64_t count() const { return static_cast<int64_t>(texts_.size()); }
  static uint64_t pair(int64_t first, int64_t second) { return static_cast<uint64_t>(first) << 32 | static_cast<uint32_t>(second); }
  static int64_t found(const Latest& latest, uint64_t key) {
    const auto at = latest.find(key);
    return at == latest.end() ? -1 : at->second;
  }

  // Indexes the text's last token, which is about to get a successor.
  void add_to_index(int32_t number, const std::vector<int32_t>& text) {
    const int32_t here = static_cast<int32_t>(places_.size()), last = static_cast<int32_t>(text.size()) - 1;
    places_.push_back({number, last, -1});
    singles_[pair(-1, text[last])] = here;
    if (last == 0) return;
    int32_t& latest = pairs_.try_emplace(pair(text[last - 1], text[last]), -1).first->second;
    places_[here].before = latest;
    latest = here;
  }

  std::vector<std::vector<int32_t>> texts_;
  std::vector<Place> places_;
  Latest pairs_, singles_;
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
  int64_t matched = 0, source = 0, count = 0;
};

// Among equally long matches the first wins: own text, references, siblings, documents. The siblings include the row's own
// text, which can only win with a longer match than its own search found.
Found look_up(const Row& row, const Texts* documents, const RowSources& row_sources, int64_t k, int64_t* draft_tokens) {
  const Texts* others[] = {row_sources.references, row_sources.siblings, documents};
  Match best = in_own_text(row);
  int64_t source = 0;
  for (int64_t i = 0; i < 3 && best.size < kLongestSuffix; ++i) {
    if (others[i] == nullptr) continue;
    best = others[i]->longer_match(row, best);
    if (best.texts == others[i]) source = i + 1;
  }
  if (best.size == 0) return {};
  return {best.size, source, best.texts == nullptr ? continue_own_text(row, best.place, k, draft_tokens) : best.texts->continue_match(best, k, draft_tokens)};
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
  const Texts* others[] = {row_sources.references, row_sources.siblings, documents};
  std::vector<Match> matches;
  for (int64_t place = row.length - 2; place >= 0 && static_cast<int64_t>(matches.size()) < kMostPlaces; --place) {
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

// Appends the rows' new tokens to their siblings' texts first. Returns whether all lengths lie within the width.
bool append_to_siblings(const RowSources* row_sources, const int64_t* slots, const int64_t* text, int64_t stride, int64_t width,
                        const int64_t* lengths, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t slot = slots[i], length = lengths[slot];
    if (length < 0 || length > width) return false;
    if (row_sources == nullptr || row_sources[i].siblings == nullptr) continue;
    const int64_t known = row_sources[i].first + row_sources[i].siblings->size(row_sources[i].number);
    row_sources[i].siblings->append(row_sources[i].number, text + slot * stride + known, length - known);
  }
  return true;
}

}  // namespace
}  // namespace paceline

using namespace paceline;

PL_EXPORT NewObject<Texts> pl_texts_new() { return made<Texts>(); }
PL_EXPORT void pl_texts_free(Texts* texts) { delete texts; }
PL_EXPORT Problem pl_texts_append(Texts* texts, int64_t number, const int64_t* tokens, int64_t count) {
  return guarded([&] { texts->append(number, tokens, count); });
}

// slots: of the rows, in text and lengths. text: at most `width` tokens in each slot, `stride` apart. row_sources: per row, or null; their siblings' texts are
// brought up to date first. draft_tokens [rows][k], 0 beyond counts[row]; sources: 0 the row's own text, 1 references,
// 2 siblings, 3 documents. Returns an error message, or null.
PL_EXPORT Problem pl_lookup(const Texts* documents, const RowSources* row_sources, const int64_t* slots, const int64_t* text,
                            int64_t stride, int64_t width, const int64_t* lengths, int64_t rows, int64_t k, int64_t* draft_tokens, int64_t* counts, int64_t* matched,
                            int64_t* sources) {
  return guarded([&]() -> const char* {
    if (!append_to_siblings(row_sources, slots, text, stride, width, lengths, rows)) return kOutside;
    std::fill(draft_tokens, draft_tokens + rows * k, 0);
    for (int64_t i = 0; i < rows; ++i) {
      Found found;
      if (lengths[slots[i]] > 0) {
        const Row row = {text + slots[i] * stride, lengths[slots[i]]};
        found = look_up(row, documents, row_sources == nullptr ? RowSources{} : row_sources[i], k, draft_tokens + i * k);
      }
      matched[i] = found.matched, counts[i] = found.count, sources[i] = found.source;
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
    if (!append_to_siblings(row_sources, slots, text, stride, width, lengths, rows)) return kOutside;
    for (int64_t i = 0; i < rows; ++i) {
      const Row row = {text + slots[i] * stride, lengths[slots[i]]};
      const RowSources beside = row_sources == nullptr ? RowSources{} : row_sources[i];
      const int64_t at = i * ways;
      made[i] = row.length == 0 ? 0 : look_up_all(row, documents, beside, ways, k, draft_tokens + at * k, counts + at, matched + at, sources + at);
    }
    return nullptr;
  });
}
