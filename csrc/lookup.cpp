// Where the end of each row's text stood before, and what followed it there: src/paceline/drafters/lookup.py says which
// place wins.
#include <algorithm>
#include <cstdint>

namespace paceline {
namespace {

constexpr int64_t kLongestSuffix = 5;

// Reference documents, each followed by a negative token. `places` are those that something follows, by the token that
// stands there and then from first to last; tokens[i] is what stands at places[i].
struct Documents {
  const int64_t* text;
  const int64_t* places;
  const int64_t* tokens;
  int64_t count;
};

struct Row {
  const int64_t* text;
  int64_t length;

  const int64_t* last() const { return text + length - 1; }
};

struct Match {
  int64_t size = 0;
  int64_t place = 0;
};

// How many of the row's last tokens stand in `text` up to and including `place`.
int64_t agreeing(const Row& row, const int64_t* text, int64_t place) {
  const int64_t most = std::min({kLongestSuffix, row.length, place + 1});
  int64_t size = 0;
  while (size < most && text[place - size] == row.last()[-size]) ++size;
  return size;
}

// From the end on backwards, so that of equal matches the later one wins.
Match in_own_text(const Row& row) {
  Match best;
  for (int64_t place = row.length - 2; place >= 0 && best.size < kLongestSuffix; --place) {
    if (row.text[place] != *row.last()) continue;
    const int64_t size = agreeing(row, row.text, place);
    if (size > best.size) best = {size, place};
  }
  return best;
}

Match in_documents(const Row& row, const Documents& documents) {
  Match best;
  const auto [first, stop] = std::equal_range(documents.tokens, documents.tokens + documents.count, *row.last());
  for (const int64_t* at = stop; at != first && best.size < kLongestSuffix;) {
    const int64_t place = documents.places[--at - documents.tokens];
    const int64_t size = agreeing(row, documents.text, place);
    if (size > best.size) best = {size, place};
  }
  return best;
}

// Both fill k guesses and return how many are real.
int64_t continue_own(const Row& row, int64_t place, int64_t k, int64_t* guesses) {
  const int64_t period = row.length - 1 - place;
  for (int64_t i = 0; i < k; ++i) guesses[i] = row.text[place + 1 + i % period];
  return k;
}

int64_t continue_document(const int64_t* following, int64_t k, int64_t* guesses) {
  int64_t count = 0;
  for (; count < k && following[count] >= 0; ++count) guesses[count] = following[count];
  return count;
}

}  // namespace
}  // namespace paceline

using namespace paceline;

// text: rows of at most `width` tokens, `stride` apart. guesses [rows][k], 0 beyond counts[row]. Returns the most guesses
// that a row has, or -1 if a length is negative or beyond the width.
extern "C" __attribute__((visibility("default"))) int64_t pl_lookup(const Documents* documents, const int64_t* text, int64_t stride,
                                                                    int64_t width, const int64_t* lengths, int64_t rows, int64_t k,
                                                                    int64_t* guesses, int64_t* counts, int64_t* matched) {
  int64_t widest = 0;
  std::fill(guesses, guesses + rows * k, 0);
  for (int64_t i = 0; i < rows; ++i) {
    if (lengths[i] < 0 || lengths[i] > width) return -1;
    counts[i] = matched[i] = 0;
    if (lengths[i] == 0) continue;
    const Row row = {text + i * stride, lengths[i]};
    const Match own = in_own_text(row), copied = in_documents(row, *documents);
    matched[i] = std::max(own.size, copied.size);
    if (copied.size > own.size) {
      counts[i] = continue_document(documents->text + copied.place + 1, k, guesses + i * k);
    } else if (own.size > 0) {
      counts[i] = continue_own(row, own.place, k, guesses + i * k);
    }
    widest = std::max(widest, counts[i]);
  }
  return widest;
}
