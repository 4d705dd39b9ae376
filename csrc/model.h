// A llama-like decoder as the C interface hands it over: plain pointers into memory that the caller keeps alive.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "gain.h"
#include "kernels.h"
#include "pool.h"

namespace paceline {

// These structures mirror src/paceline/kernels/abi.py; kAbiVersion changes with them.
constexpr int kAbiVersion = 18;

struct Layer {
  Linear qkv, attention_out, gate_up, down;
  const float* input_norm;
  const float* post_norm;
  const float* q_norm;  // or null
  const float* k_norm;
  int64_t window;       // 0: unlimited
};

// What makes a decoder a head that reads its target's streams (src/paceline/drafters/heads/feature.py). Its first layer reads the normed
// embedding of a token beside the normed hidden state that enters: what the streams were fused to, or what it said last.
struct Fusion {
  Linear fuse;                // of all streams side by side
  const float* stream_norms;  // [streams][padded stream width], or null
  const float* joint_norm;    // of all streams side by side, or null
  const float* hidden_norm;
  const int64_t* targets;     // the target's number of each of its tokens
  const float* mask;          // [width], what it reads in place of streams with a draft that is not there yet; null: a head that
                              // reads its own draft_tokens
  int64_t mask_token;         // and in place of the draft
  int64_t vocabulary;         // the target's
  int32_t streams, stream_width;
  int32_t normed_residual;    // whether the first layer adds to the normed hidden state
  int32_t normed_state;       // whether the next step reads what the last norm gave
};

struct ModelSpec {
  const Layer* layers;
  Linear head;                // its packed columns are the embedding too, unless `embedding` is given
  const uint16_t* embedding;  // bf16 [vocabulary][padded width], or null
  const float* final_norm;
  const float* cosine;        // [positions][rotary_half]
  const float* sine;
  int64_t positions;
  int32_t layer_count, width, ffn, heads, kv_heads, dim, rotary_half;
  float epsilon, attention_scale;
  const Fusion* fusion;  // or null
};

// Tokens of every row, row after row: those of row i are numbers starts[i] .. starts[i + 1] - 1.
struct Entries {
  const int64_t* starts;  // null: no row has any
  const int64_t* tokens;
  const float* values;
};

// How the tokens of rows are drawn; SamplingRows of src/paceline/core/rows.py says what each number means. All but the first three
// may be null, where no row asks for it.
struct DrawRows {
  const float* temperature;
  const int64_t* seeds;
  const int64_t* length;  // of each row's text: the position of its next token
  const float* deepest;
  const int64_t* top_k;
  const float* top_p;
  const float *presence, *frequency, *repetition;  // all or none of these
  const int64_t* text;                             // [rows][text_stride]
  int64_t text_stride;
  const int64_t* prompt_length;
  const int64_t* min_length;
  Entries bias, stops;
};

// Logits of places: place j of a row follows the first `first` + j of its draft_tokens.
struct DrawCall {
  DrawRows by;
  float* logits;           // of row after row, `stride` floats from place to place; changed while they are read, then as before
  float* const* instead;   // or null; of each row where its logits lie if not there, or null
  const int64_t* draft_tokens;  // [rows][draft_stride], or null
  const int64_t* counts;   // real draft_tokens of each row, or null
  const int64_t* parents;  // [rows][draft_stride]: the draft that each follows, -1: the unseen token; null: the one before
  int64_t rows, block;     // places of a row
  int64_t stride, vocabulary, draft_stride, first;
  int32_t packed;  // whether only the real draft_tokens have places: counts[row] + 1
  uint32_t purpose;
};

struct LogprobCall {
  const float* logits;  // as above
  const int64_t* tokens;    // [rows][block]
  const int64_t* accepted;  // of each row: places up to this one are asked for
  const int64_t* wanted;    // of each row: how many of the most likely tokens; -1: nothing at all
  const int64_t* counts;
  int64_t rows, block, stride, vocabulary, most;
  int32_t packed;
  float* own;       // [rows][block]
  int64_t* ids;     // [rows][block][most]
  float* values;
};

class Model;

// A target's streams, fused, of every position of every row: what a head reads.
struct Kept {
  uint8_t* states;   // [row][capacity + 1][head's width]; the last place is for what lies beyond
  int64_t capacity;
  int32_t bf16;
};

// Guesses of a head, which first reads what it lacks of each row's text: the tokens start .. stop - 1, each at the place before
// its own, with the streams that are kept there.
struct DraftCall {
  DrawRows by;             // where draft_tokens are drawn
  const int64_t* text;     // [place][text_stride]
  int64_t text_stride;
  Kept kept;
  int64_t rows;
  const int64_t* places;   // of the rows in the text, in what is kept and in the cache
  const int64_t *start, *stop;
  const int64_t* counts;   // draft_tokens that each row is to have, at most `draft_stride`; a row that is to have none reads nothing.
                           // Null: all rows read, and none has any
  int64_t draft_stride;
  int64_t* draft_tokens;        // [rows][draft_stride]
  int64_t* drawn;          // of each row: draft_tokens; none after a text of one token, which has no streams yet
  float* chances;          // [rows][draft_stride], or null: the softmax at each draft; never null in trees
  float* probabilities;             // [draft_stride][rows][vocabulary], or null: what each was drawn from
  float* logits;           // [rows][width][vocabulary], a probability of 0 wherever the head says nothing
  float* const* instead;   // [rows][width], or null: where the logits lie that count in their place, or null: what `look` leaves there
  int32_t (*before_draw)();       // called before each draw of all rows; null: nobody looks. 0: nothing more is drawn
  int32_t (*continue_drafting)();    // asked after each draft of all rows; null: always
  uint32_t purpose;
  int64_t width;           // 1: chains. Else trees: so many leaders follow each draft, and so many draft_tokens a row stay of each depth.
                           // counts are depths then, and the draft_tokens of the last depth have the row's logits in their order
  int64_t *parents, *ranks;  // [rows][draft_stride], of trees: the draft that each follows, -1: the text; which of its leaders it is
};

// A round of the coupled rule: row i's unseen token and its counts[i] draft_tokens are verified, judged and committed. Guesses lie side
// by side behind the text; of trees those that are kept then move to where they would lie without the others.
struct RoundCall {
  DrawRows by;
  TextRows text;
  const int64_t* places;   // of the rows in the cache
  const int64_t* draft_tokens;  // [rows][draft_stride]
  const int64_t* counts;   // less than `block`
  const int64_t* parents;  // [rows][draft_stride]: the draft that each follows, one before it, -1: the unseen token; null: chains
  int64_t draft_stride, rows, block;
  int64_t* tokens;    // [rows][block]: what is drawn, up to the first that is not the draft
  int64_t* accepted;  // of each row: draft_tokens kept
  int64_t* gained;    // of each row: tokens, as TextRows::gain says
  int64_t* path;      // [rows][draft_stride], of trees: the draft_tokens kept, in their order
  float* hidden;      // [room][width] and [room][vocabulary], to be used up
  float* logits;
  int64_t room;       // for the unseen tokens and the draft_tokens of all rows
  uint32_t purpose;
  Model* head;        // or null; keeps the streams of what is read
  Kept kept;
  const int64_t* taps;
  int64_t tap_count;
  float* features;    // [room][tap_count][width]
};

struct Cache {
  uint8_t* keys;  // [layer][row][head][position][dim]
  uint8_t* values;
  int64_t layer_stride, row_stride, head_stride, position_stride;  // in elements
  int64_t rows, capacity;
  int32_t bf16;
};

// nodes.Nodes: what a pass reads.
struct Tokens {
  const int64_t* tokens;
  const int64_t* rows;
  const int64_t* positions;
  const int64_t* slots;    // where keys and values go; null: at their positions
  const int64_t* parents;  // the token that each follows, -1: the row's text; null: chains
  int count;
  const float* entering = nullptr;  // [tokens][width]: the hidden states that a head reads beside the tokens
  int read = 0;            // so many were read before: they are there to be followed
};

// What a pass gives of every token.
struct PassOutputs {
  float* hidden;  // [tokens][width]
  const int64_t* taps;  // layers
  int tap_count;
  float* features;  // [tokens][tap_count][width]: what enters each of these layers; what leaves the last enters one more
};

enum Phase { kEmbed, kPrepare, kProducts, kRotary, kAttention, kPhases };

// Memory that is reused from call to call, aligned to cache lines and padded with zeros.
class Buffer {
 public:
  ~Buffer();
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void grow(size_t bytes);
  template <class T> T* as() const { return reinterpret_cast<T*>(data_); }

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

// A set of quantised rows and the memory behind it.
struct Quantised {
  Buffer data, scales, sums;
  Activations view{};
  void grow(int rows, int inputs);
};

struct Scratch {  // of one thread
  Quantised rows;
  Buffer normed, attention;
};

class Model {
 public:
  Model(const ModelSpec& spec, const Kernels& kernels);

  void forward(Pool& pool, const Tokens& tokens, const Cache& cache, const PassOutputs& out, double* seconds);
  void logits(Pool& pool, const float* hidden, int rows, float* out);
  void fuse(Pool& pool, const float* features, int rows, float* out);  // a head's: [rows][streams][stream width] -> [rows][width]
  const char* problem_with(const Tokens& tokens, const Cache& cache) const;  // or null
  int64_t vocabulary() const { return spec.head.outputs; }
  int64_t read_vocabulary() const { return spec.fusion ? spec.fusion->vocabulary : vocabulary(); }

  const ModelSpec spec;
  const Kernels& kernels;
  const std::vector<Layer> layers;
  const int padded_width, padded_qkv, padded_attention, padded_ffn;

 private:
  friend class Pass;
  friend class HeadPass;
  friend class FusePass;
  void grow(int threads, int tokens);

  std::mutex one_call_at_a_time_;
  Buffer joined_, residual_, qkv_, attended_, activated_, padded_hidden_;
  Quantised shared_;
  std::vector<std::unique_ptr<Scratch>> scratch_;
  std::vector<std::atomic<int>> next_unit_;
};

// Draws the next draft of these rows, in their places' order: `call` has one place a row. chances, probabilities: as in DraftCall.
void draw_draft_tokens(const Kernels& kernels, Pool& pool, const DrawCall& call, const std::vector<int64_t>& rows, int64_t* draft_tokens,
                  float* chances, float* probabilities);

// Behind this draft of a row, or behind its text (-1), leaders are drawn. logits: the whole vocabulary's, changed while they are
// read, then as before.
struct Fork {
  int64_t row, draft;
  float* logits;
};

// Draws `width` tokens of each fork, each without those before it, and the chance of each to be what the target draws there:
// tokens, chances [forks][width]. Of the call no logits are read and no counts; its parents are not null.
void draw_leaders(const Kernels& kernels, Pool& pool, const DrawCall& call, const std::vector<Fork>& forks, int64_t width,
                  int64_t* tokens, float* chances);

// Fuses the streams of tokens and keeps them.
void keep_states(Model& head, Pool& pool, const Kept& kept, const int64_t* rows, const int64_t* slots, const float* features, int count);

// A draft of a row that was kept: from its slot to the one where the text has it.
struct Move {
  int64_t row, from, to;
};

void move_states(const Model& head, const Kept& kept, const std::vector<Move>& moves);

const char* problem_with_trees(const Tokens& tokens, int64_t capacity);  // or null; `problem_with` has found none

// The share of `thread` in `count` things.
struct Share : Range {
  Share(int count, int thread, int threads)
      : Range{static_cast<int>(static_cast<int64_t>(count) * thread / threads),
              static_cast<int>(static_cast<int64_t>(count) * (thread + 1) / threads)} {}
};

}  // namespace paceline
