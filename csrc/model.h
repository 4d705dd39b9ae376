// A llama-like decoder as the C interface passes it: plain pointers into memory that the caller keeps alive.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "gain.h"
#include "kernels.h"
#include "pool.h"
#include "ranks.h"

namespace paceline {

// A recurrent layer. Its first matrix gives, of a gated delta net and Mamba-2, channels and the gates of its output; of a
// short convolution, B, C and x. Fields that a kind does not have are null.
struct Recurrent {
  Linear first, second;
  Linear gates;       // of a gated delta net: rows of beta, then of the decay; of Mamba-2: of the steps; else without weights
  const float* conv;  // [taps][channels]
  const float *rate, *bias, *norm, *conv_bias, *skip;  // see RecurrentCall
  float epsilon, least_step;        // of the norm; the least step of Mamba-2
  int32_t place;                    // of its state, among the layers with states
};

enum Activation : int32_t { kSilu = 0, kGeluTanh = 1, kClampedSilu = 2, kGelu = 3, kRelu = 4, kRelu2 = 5, kXielu = 6 };

// Norms of a mixture and of the MLP beside it, where each reads the hidden states and has norms of its own: before the
// router and the experts (before the MLP: Layer::post_norm), and after the experts and the MLP.
struct ExpertsNorms {
  const float *router, *before, *after, *shared_after;
};

// A mixture of experts. Its layer's gate_up and down, if it has any, are an MLP that every token runs through besides.
struct Experts {
  Router router;                 // rows of the experts, then that of the gate of the shared MLP's output, if it has one
  const Linear *gate_up, *down;  // of each expert; all have one shape
  int32_t count, used;           // experts, and experts of a token
  // How a token's experts follow from the scores: Routing of src/paceline/kernels/experts.py.
  int32_t normalised, sigmoid, groups, used_groups, group_best;  // group_best: 1 or 2
  float margin;
  const float* correction;       // [count], added to the probabilities for the choice alone, or null
  float shared_scale;            // of the output of the layer's MLP
  const float* factors;          // [count] of the experts' outputs, or null
  const ExpertsNorms* norms;     // or null: all parts read the layer's normed hidden states
  Linear latent_in, latent_out;  // where experts read and write vectors of another width: to it, and of the sum of their outputs back; else without weights
};

// What a layer adds of its token's vector (TokenInputs): norm(out(activation(gate(x)) * vector)).
struct TokenInput {
  Linear gate, out;
  const float* norm;
};

// A vector of every token for every layer: TokenInputsSpec of src/paceline/models/description/spec.py.
struct TokenInputs {
  Linear table;    // a column for each token: its vectors, layer after layer
  Linear project;  // of the embedding
  const float* norm;  // [width]
  int32_t width;
  float table_scale, project_scale, sum_scale;
};

// Latent attention (MLA), in the absorbed form of src/paceline/models/description/latent.py. Its layer's qkv gives the
// queries, or their vector, then the keys' vector and rotated elements. All heads read one key of a token, its rotated
// elements before its normed vector, which is also its value.
struct Latent {
  Linear query_up;                 // of the queries' vector; without weights: qkv gives the queries
  const Linear *absorb, *expand;   // of each head: a query's elements that are not rotated -> rank, and rank -> value_dim
  const float *query_norm, *norm;  // of the vectors: [padded query_rank], or null, and [rank]
  int32_t query_rank, rank, rotary_dim, key_dim, value_dim;
  float epsilon;
};

// An adapter's change of a linear layer (LoRA): up(down(x)) is added to the layer's outputs, in their packed order. In
// float32, with one chain of additions per number, so that a token's bits do not depend on others.
struct LowRank {
  Router down, up;  // up has as many outputs as the layer's panels, and as many inputs as `down` has padded outputs
};

// Convolutions over the tokens of a block around a part f of its layers: x + after(f(before(norm(x)))). The weight of a tap is
// its base's plus one of its group of channels, which a product of the normed x gives (GroupedConvolution of
// src/paceline/drafters/heads/block.py).
struct BlockConv {
  Linear project;     // [2][taps][groups] outputs: before, after
  const float* base;  // [2][taps][padded width]
  int32_t taps, group;
};

enum Changed { kChangedQkv, kChangedAttentionOut, kChangedGateUp, kChangedDown, kChangedLayers };

struct Layer {
  Linear qkv, attention_out, gate_up, down;  // without weights where the layer has no attention, or no MLP of all tokens
  // Norms of the hidden states, behind whose weights lie their biases if they are layer norms.
  const float* input_norm;  // before attention, or null
  const float* post_norm;   // before the MLP, or null
  const float* q_norm;      // or null
  const float* k_norm;
  int64_t window;  // 0: unlimited
  const float* attention_out_norm;  // after attention and before its output is added, or null
  const float* mlp_out_norm;        // likewise after the MLP
  const float* cosine;              // [positions][rotary_half]
  const float* sine;
  int32_t rotary_half;
  float scale;          // of attention
  int32_t norm_all;     // whether q_norm and k_norm are over all heads together
  int32_t activation;   // Activation
  const Recurrent* recurrent;  // in place of attention or beside it, where both read the same and both are added; or null
  int32_t gated;       // whether qkv ends with the gates of attention's output
  int32_t place;       // in its table of the cache
  int32_t table;       // of the cache
  int32_t reads_only;  // whether an earlier layer writes its keys and values; qkv then has queries only
  int32_t heads, kv_heads, dim, value_dim;  // widths of a query and of a value
  int32_t looks_ahead;  // whether a token of a block sees those behind it (Tokens::ends)
  const float* v_norm;      // [dim], or null
  const TokenInput* input;  // or null
  const float* scale_out;   // one factor of the layer's output, or null
  const Experts* experts;  // null: a dense MLP
  const float* sinks;      // of attention: [heads], or null
  const Latent* latent;    // null: attention with keys of its own heads
  int32_t norm_after;      // whether q_norm and k_norm stand behind the rotation
  float cap;               // of attention's scores; 0: none
  const float* balance;    // of its keys in caches of int8 (Attention::balance), or null
  int32_t parallel;        // whether the MLP reads the layer's input, too, in place of the sum with attention's output
  int32_t plain;           // whether the MLP has no gate: gate_up is up alone
  const float* shape;      // of the activation: four numbers, or null
  const BlockConv* convs;  // around attention, and around the MLP, of a block drafter; or null
  // Of a divided model, [ranks + 1]: the first column of attention's output, and of the MLP's second product's input, that
  // each rank computes, and their width. Null: all.
  const int32_t *attended, *activated;
  const LowRank* changes[kChangedLayers];  // of each linear layer: one of every adapter, without weights if it changes nothing; or null
};

// The extra parts of a head that reads its target's hidden states (src/paceline/drafters/heads/feature.py). Its first
// layer reads the normed embedding of a token beside the normed state that enters with it: the fused hidden states of
// the target, or the head's own last state.
struct Fusion {
  Linear fuse;                // of all hidden states side by side
  const float* tap_norms;  // [tap_count][padded target width], or null
  const float* joint_norm;    // of all hidden states side by side, or null
  const float* hidden_norm;
  const int64_t* targets;  // the target's token id of each of the head's tokens
  const float* mask;       // [width], read in place of hidden states with a draft token that does not exist yet; null: the head
                           // reads its own draft tokens
  int64_t mask_token;      // and in place of the draft token
  int64_t vocabulary;      // the target's
  int32_t tap_count, target_width;
  int32_t normed_residual;  // whether the first layer adds to the normed state
  int32_t normed_state;     // whether the next step reads the output of the last norm
  // A model's own head (MTP): `fuse` maps the normed embedding and the normed state behind it to the first layer's input,
  // and the target's hidden state is kept as it is. Null: the heads above.
  const float* embedding_norm;
  // A block drafter: `hidden_norm` is of the fused hidden states, from which a text's keys and values are made, and the
  // first layer reads tokens as that of a model does.
  int32_t block;
};

struct ModelSpec {
  const Layer* layers;
  Linear head;                // its packed columns are the embedding too, unless `embedding` is given
  const uint16_t* embedding;  // bf16 [vocabulary][padded width], or null
  const float* final_norm;
  int64_t positions;
  int32_t layer_count, width;
  float epsilon;
  float embed_scale;  // of the token embedding
  float tap_scale;    // of the hidden states that heads read
  const Fusion* fusion;  // or null
  RecurrentShape recurrent;
  const TokenInputs* inputs;  // or null
  float logits_cap;           // 0: none
  int32_t centred;            // whether the norms of the hidden states are layer norms
  const float* places;        // [positions][padded width], added to the embedding; or null
  const float* embedding_norm;  // of the embedding; or null
  int32_t adapters;           // number of adapters, which Layer::changes have
  const Ranks* ranks;         // of a divided model, whose layers have the heads and the outputs of one rank; or null
};

// Tokens of every row, row after row: row i has the entries starts[i] .. starts[i + 1] - 1.
struct Entries {
  const int64_t* starts;  // null: no row has any
  const int64_t* tokens;
  const float* values;
};

// Sampling settings by slot; SamplingRows of src/paceline/core/rows.py defines each. All but the first three may be
// null, if no row uses them.
struct DrawRows {
  const float* temperature;
  const int64_t* seeds;
  const int64_t* length;  // length of each row's text: the position of its next token
  const float* deepest;
  const int64_t* top_k;
  const float* top_p;
  const float *typical_p, *epsilon_cutoff, *eta_cutoff, *top_n_sigma;  // all or none of these
  const float *presence, *frequency, *repetition;  // all or none of these
  const int64_t* text;                             // [slots][text_stride]
  int64_t text_stride;
  const int64_t* prompt_length;
  const int64_t* min_length;
  Entries bias, stops;   // by row
  const int64_t* slots;  // of the rows; null: row i is in slot i

  int64_t slot(int64_t row) const { return slots ? slots[row] : row; }
};

// Logits at places: place j of a row follows the first `first` + j of its draft tokens.
struct DrawCall {
  DrawRows by;
  float* logits;                // row after row, `stride` floats from place to place; changed while they are read, then restored
  float* const* instead;        // per row: other logits to read in place of these, or null; or null for all rows
  const int64_t* draft_tokens;  // [rows][draft_stride], or null
  const int64_t* counts;        // number of draft tokens per row, or null
  const int64_t* parents;       // [rows][draft_stride]: each draft token's parent, -1: the row's last token; null: chains
  int64_t rows, block;          // block: places per row
  int64_t stride, vocabulary, draft_stride, first;
  int32_t packed;  // whether a row has only counts[row] + 1 places
  uint32_t purpose;
};

struct LogprobCall {
  const float* logits;      // as above
  const int64_t* tokens;    // [rows][block]
  const int64_t* accepted;  // per row: places up to this one are wanted
  const int64_t* wanted;    // per row: number of most likely tokens; -1: nothing at all
  const int64_t* counts;
  int64_t rows, block, stride, vocabulary, most;
  int32_t packed;
  float* own;    // [rows][block]
  int64_t* ids;  // [rows][block][most]
  float* values;
};

class Model;

// An output head over some of a vocabulary's tokens (src/paceline/models/decoding/draft_vocabulary.py).
struct ShortHead {
  Linear head;
  const int64_t* targets;  // the vocabulary's token id of each column
};

// The fused hidden states of the target at every position of every row: a head's input.
struct Kept {
  uint8_t* states;  // [slot][capacity + 1][head's width]; the last place takes writes beyond the capacity
  int64_t capacity;
  int32_t bf16;
};

// A call in which a head or a draft model first reads the tokens of each row's text that it has not computed, then
// drafts: the tokens start .. stop - 1. A head reads each at the place before its own, with the states that are kept
// there. A draft model has the batch's vocabulary, and drafts chains.
struct DraftCall {
  DrawRows by;          // sampling settings of the draft tokens
  const int64_t* text;  // [slot][text_stride]
  int64_t text_stride;
  Kept kept;  // of a head
  int64_t rows;
  const int64_t* slots;  // of the rows, in the text, in `kept` and in the cache
  const int64_t *start, *stop;
  const int64_t* counts;  // draft tokens wanted per row, at most `draft_stride`; a row that wants none reads nothing.
                          // Null: all rows read, and no row drafts
  int64_t draft_stride;
  int64_t* draft_tokens;           // [rows][draft_stride]
  int64_t* drawn;                  // per row: draft tokens drawn; a head draws none after a text of one token, which has no hidden states yet
  float* chances;                  // [rows][draft_stride], or null: softmax at each draft token; never null in trees
  float* probabilities;            // [draft_stride][rows][vocabulary], or null: the distribution that each was drawn from
  float* logits;                   // [rows][width][vocabulary]; initialised to a probability of 0, as the head writes only its own tokens
  float* const* instead;           // [rows][width], or null: other logits to use in their place, or null; set by `before_draw`
  int32_t (*before_draw)();        // called before each draw of all rows, or null; returns 0 to stop
  int32_t (*continue_drafting)();  // called after each draft token of all rows, or null; returns 0 to stop
  uint32_t purpose;
  int64_t width;             // 1: chains. Else trees: top-ranked tokens drawn per node, and draft tokens kept per row and depth.
                             // counts are then depths, and a row's draft tokens of the last depth have its logits in
                             // their order
  int64_t *parents, *ranks;  // [rows][draft_stride], of trees: each draft token's parent, -1: the text; its rank among its siblings
  const ShortHead* shortened;  // scores draft tokens in place of the head's own output; or null
};

struct Cache;

// A round of the coupled rule: row i's last token and its counts[i] draft tokens are verified, accepted and committed.
// Draft tokens lie side by side behind the text; in trees the accepted ones then move to their final slots.
struct RoundCall {
  DrawRows by;
  TextRows text;
  const int64_t* slots;         // of the rows, in the text, in `kept` and in the cache
  const int64_t* draft_tokens;  // [rows][draft_stride]
  const int64_t* counts;        // less than `block`
  const int64_t* parents;       // [rows][draft_stride]: each draft token's parent, an earlier one, -1: the row's last token; null: chains
  int64_t draft_stride, rows, block;
  int64_t* tokens;    // [rows][block]: the target's draws, up to the first that matches no draft token
  int64_t* accepted;  // per row: draft tokens accepted
  int64_t* gained;    // per row: tokens appended (TextRows::gain)
  int64_t* path;      // [rows][draft_stride], of trees: the accepted draft tokens, in order
  float* hidden;      // hidden [room][width] and logits [room][vocabulary]: scratch memory
  float* logits;
  int64_t room;  // at least the number of last tokens and draft tokens of all rows
  uint32_t purpose;
  Model* head;  // or null; keeps the hidden states of what the target reads
  Kept kept;
  const int64_t* taps;
  int64_t tap_count;
  float* features;  // [room][tap_count][width]
  // If not null, the round begins with this draft of chains, whose draft tokens and numbers of them (`drawn`) are the
  // round's `draft_tokens` and `counts`.
  const DraftCall* draft;
  Model* drafter;
  const Cache* draft_cache;
  double* draft_seconds;  // set to the time that the draft took
};

// Keys and values of the layers of one shape.
struct KVTable {
  CacheVectors keys, values;  // without values: a value is the last elements of its key
  int64_t layers, heads;
};

struct Cache {
  const KVTable* tables;
  int64_t table_count;
  int64_t rows, capacity;
  int32_t element;  // CacheElement
  float *state, *tail, *inputs;  // of recurrent layers: RecurrentStates of src/paceline/core/recurrent_state.py; or null
  int64_t *base, *count;         // per row
  int64_t window;
  const int32_t* references;  // number of rows that have each page; null: each row has its own pages
  const int32_t* adapter_of;  // per row: number of its adapter, from 1 on; 0: none
};

// The input of a forward pass (nodes.Nodes).
struct Tokens {
  const int64_t* tokens;
  const int64_t* rows;
  const int64_t* positions;
  const int64_t* slots;    // where keys and values go; null: at their positions
  const int64_t* parents;  // index of each token's parent, -1: the row's text; null: chains
  int count;
  const float* entering = nullptr;  // [tokens][width]: the states that a head reads beside the tokens; of a model without
                                    // fusion, the first layer's input in place of the tokens
  int read = 0;                     // number of leading tokens that an earlier pass computed; they only serve as parents
  const int64_t* ends = nullptr;    // last position that each token sees, in layers that look ahead; null: its own. A row's
                                    // tokens up to there must be in the same pass
};

// The outputs of a forward pass.
struct PassOutputs {
  float* hidden;        // [tokens - text][width]
  const int64_t* taps;  // layers
  int tap_count;
  float* features;  // [tokens][tap_count][width]: input of each of these layers; layer_count stands for the last layer's output,
                    // layer_count + 1 for the same after the final norm
  int text = 0;     // number of leading tokens of which no hidden states are wanted
};

struct ExpertBuffers;

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

struct Scratch {  // per thread
  Quantised rows;
  Buffer normed, attention, recurrent;
  std::vector<const float*> changes;  // LinearCall::changes; as long as a pass at most, so that no thread of one allocates
};

class Model {
 public:
  Model(const ModelSpec& spec, const Kernels& kernels);
  ~Model();

  void forward(Pool& pool, const Tokens& tokens, const Cache& cache, const PassOutputs& out, double* seconds);
  // head: an output head with the model's inputs, whose outputs are the logits of a row.
  void logits(Pool& pool, const float* hidden, int rows, float* out, const Linear& head);
  // For a block drafter: stores keys and values of tokens in all layers, from their fused states `entering`.
  void inject(Pool& pool, const Tokens& tokens, const Cache& cache);
  bool ranks_ended() const { return exchange_ && exchange_->ended(); }
  void fuse(Pool& pool, const float* features, int rows, float* out);        // for a head: [rows][tap_count][target width] -> [rows][width]
  const char* problem_with(const Tokens& tokens, const Cache& cache) const;  // or null
  int64_t experts_read() const { return experts_read_; }  // experts whose weights were read, all layers and passes together
  int64_t vocabulary() const { return spec.head.outputs; }
  int64_t read_vocabulary() const { return spec.fusion ? spec.fusion->vocabulary : vocabulary(); }

  const ModelSpec spec;
  const Kernels& kernels;
  const std::vector<Layer> layers;
  const int padded_width, padded_qkv, padded_attention, padded_recurred, padded_activated;
  const int widest_dim, queries_per_key;  // of all layers
  const int last_writer;                  // the last layer that writes keys, values or a state
  const bool reads_only;                  // whether all layers read another model's keys: a row's tokens may then share a position
  const int widest_rank, widest_change;   // padded outputs of LowRank::down and LowRank::up; 0 without adapters

 private:
  friend class Pass;
  friend class HeadPass;
  friend class FusePass;
  void grow(int threads, int tokens);
  void grow_latent(const Layer& layer, int tokens);
  void read_end(Pool& pool, const Tokens& chunk, int first, const Cache& cache, float* hidden, double* seconds);

  std::mutex one_call_at_a_time_;
  Buffer joined_, residual_, branch_, qkv_, gates_, attended_, activated_, padded_hidden_, vectors_;
  Buffer recurred_;  // what the second matrices of recurrent layers read
  Buffer normed_, ranks_, changes_;  // of tokens with adapters
  Buffer vectors_of_queries_, queries_, absorbed_, mixed_;  // of latent attention
  Quantised by_head_;                                       // its rows, head after head
  Buffer convolved_, taps_;          // of a block's convolutions: their input and what they give, and the weights of taps
  Quantised shared_;
  std::vector<std::unique_ptr<Scratch>> scratch_;
  std::vector<std::atomic<int>> next_unit_;
  std::unique_ptr<ExpertBuffers> experts_;
  const std::unique_ptr<Exchange> exchange_;  // with the other ranks, if there are any
  std::atomic<int64_t> experts_read_{0};
};

// Draws the next draft token of these rows, in their places' order: `call` has one place per row. chances,
// probabilities: as in DraftCall.
void draw_draft_tokens(const Kernels& kernels, Pool& pool, const DrawCall& call, const std::vector<int64_t>& rows, int64_t* draft_tokens,
                  float* chances, float* probabilities);

// A node whose children are drawn: a draft token of a row, or its text (-1). logits: of the whole vocabulary, changed
// while they are read, then restored.
struct Fork {
  int64_t row, draft;
  float* logits;
};

// Draws `width` different tokens per fork, and each one's probability of being the target's draw there: tokens, chances
// [forks][width]. The call's logits and counts are not read; its parents are not null.
void draw_leaders(const Kernels& kernels, Pool& pool, const DrawCall& call, const std::vector<Fork>& forks, int64_t width,
                  int64_t* tokens, float* chances);

// Fuses the hidden states of tokens and keeps the result.
void keep_states(Model& head, Pool& pool, const Kept& kept, const int64_t* rows, const int64_t* slots, const float* features, int count);

// An accepted draft token's move from its slot to its final one.
struct Move {
  int64_t row, from, to;
};

// Reads and drafts; returns an error message, or null.
const char* run_draft(Model& drafter, Pool& pool, const DraftCall& call, const Cache& cache, double* seconds);

void move_states(const Model& head, const Kept& kept, const std::vector<Move>& moves);

// Whether each token's page is its row's own, so that it can be written; or null.
const char* problem_with_pages(const Tokens& tokens, const Cache& cache);

const char* problem_with_states(const Tokens& tokens, const Cache& cache);  // of recurrent layers; or null

const char* problem_with_trees(const Tokens& tokens, int64_t capacity);  // or null; call it after problem_with

}  // namespace paceline
