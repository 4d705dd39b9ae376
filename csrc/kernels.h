// The functions of an instruction set. Every function gives each token the same bits, whatever other tokens are in the
// call: the order of additions is fixed by K, by the head width and by absolute key positions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "range.h"

namespace paceline {

enum Format : int32_t { kInt8 = 0, kBf16 = 1, kInt4 = 2 };
// Elements of stored keys and values. Behind a vector of int8 lies its scale, a float32: src/paceline/core/eight_bits.py.
enum CacheElement : int32_t { kCacheFloat32 = 0, kCacheBf16 = 1, kCacheInt8 = 2 };
// kSwiglu: silu(gate) * up. kGeglu: gelu(gate) * up (tanh). kClampedSwiglu: gpt-oss's, see clamped_swiglu. kSilu to kXielu
// apply to every output. kCap: limit * tanh(y / limit).
enum class Epilogue { kStore, kAdd, kSwiglu, kGeglu, kClampedSwiglu, kSilu, kGelu, kExactGelu, kRelu, kRelu2, kXielu, kCap };

constexpr int kPanel = 32;            // output columns that are packed and computed together
constexpr int kInputMultiple = 64;    // inputs are padded to it: the depth of an AMX tile of bytes
constexpr int kRowMultiple = 16;      // memory of rows is padded to it: the height of an AMX tile
constexpr int kKeyBlock = 256;        // keys, aligned to absolute positions, that share one softmax partial
constexpr int kPagePositions = 64;    // positions of a page of keys and values; src/paceline/core/pages.py
constexpr int kActivationGroup = 64;  // inputs of a row that share a scale, so that an outlier costs accuracy only within its group
constexpr int kRouterPanel = 16;      // experts that are scored together
constexpr int kInt8Zero = 128;        // int8 weights are stored as w + 128: the instruction multiplies unsigned by signed

// Packed weights: panels of 32 columns, each read sequentially.
// int8  [inputs / 4][32][4] bytes, w + 128
// bf16  [inputs / 2][32][2] bf16
// int4  per group of inputs: 32 fp16 scales, 32 fp16 lows (the value of code 0), then [group / 8][32][4] bytes; a byte
// holds the values of input i (low bits) and of input i + 4 (high bits)
// Panels of a gated MLP hold 16 columns of the gate, then the same 16 of up.
struct Linear {
  const uint8_t* weights;
  const float* scales;  // int8: one per column
  const float* bias;    // or null
  int32_t inputs;       // padded
  int32_t outputs;      // not padded
  int32_t format;
  int32_t group;  // int4: inputs that share a scale
  const int32_t* order;  // int4: [inputs], the place in a row of x of each input here; or null: their own
};

// Weights that score experts, in float32: panels of 16 experts, [padded inputs][16] each. Their sums decide which
// experts run, so nothing is rounded.
struct Router {
  const float* weights;
  const float* bias;  // padded, or null
  int32_t inputs;     // padded
  int32_t outputs;    // not padded
};

// The input rows of a linear layer, quantised once.
struct Activations {
  // int8 or int4 weights: int8, behind which a set may keep the same in another form; bf16 weights: bf16, or fp32
  // rounded to bf16 where the ISA lacks bf16.
  uint8_t* data;
  size_t stride;  // bytes from row to row
  float* scales;  // per row and group of 64
  int32_t* sums;  // int8 weights: -128 times the sum of each group of 64; int4: the sum of each of the weights' groups
  size_t scale_stride, sum_stride;
  // The rows from `first` on, as the first ones of another set.
  Activations from_row(int first) const {
    const size_t at = static_cast<size_t>(first);
    return {data + stride * at, stride, scales + scale_stride * at, sums + sum_stride * at, scale_stride, sum_stride};
  }
};

struct LinearCall {
  const Linear* linear;
  Activations input;
  int rows;
  Epilogue epilogue;
  float* out;
  size_t out_stride;
  float limit = 0.0f;  // of kCap
  const float* const* changes = nullptr;  // per row: numbers to add to its outputs before the epilogue, or null; or null for all rows
  const float* shape = nullptr;           // of kXielu: its four numbers
};

// An RMS norm, or with a bias a layer norm.
struct Norm {
  const float* weight;  // padded with zeros
  int width;            // not padded
  float epsilon;
  const float* bias = nullptr;  // padded with zeros
};

struct Rotary {
  const float* cosine;  // [positions][half]
  const float* sine;
  int half;
  int64_t positions;
};

// Slots of the keys that a tree's token sees: positions below `from` at their own slots, then position p at slots[p -
// from].
struct Path {
  int64_t from, last;  // `last`: the token's own position
  const int64_t* slots;
};

// A row's keys and values of one head.
struct RowHead {
  int64_t row;
  int kv_head;
};

// Keys or values of the layers of one shape, or of one layer: PagedVectors of src/paceline/core/pages.py.
struct CacheVectors {
  uint8_t* data;         // by layer, page, head and position of the page; or null
  const int32_t* pages;  // [row][blocks_for(capacity)]: the page of each block of kPagePositions positions
  int64_t layer_stride, page_stride, head_stride, position_stride;  // in elements
};

// One layer's attention over the shared cache.
struct Attention {
  float* qkv;  // [tokens][qkv_stride]: all heads of q, then of k, then of v
  size_t qkv_stride;
  float* out;  // [tokens][out_stride]
  size_t out_stride;
  const int64_t* positions;
  const int64_t* slots;  // null: equal to positions
  const int64_t* ends;   // per token, the last position that it sees; null: its own
  const Path* paths;     // per token; null: keys lie at their positions
  CacheVectors keys, values;  // of this layer; without values in rotate_and_write: none are written
  size_t blocks;              // of a row's pages
  int32_t element;  // CacheElement
  int heads, kv_heads, dim;
  int value_dim;     // width of a value
  int64_t capacity;  // usable positions; writes beyond it go to this one, which is never read
  int64_t window;    // 0: unlimited
  float scale;
  const float* q_norm;  // [dim], or [heads * dim] if `norm_all`; or null
  const float* k_norm;
  const float* v_norm;  // [dim], or null
  float epsilon;
  size_t gates;  // place of the output's gates in a row of qkv, head after head; 0: none
  bool norm_all;  // whether the norms are over all heads together instead of each head
  const float* sinks;  // [heads], one more score of each head, without a value; or null
  bool norm_after;  // whether the norms stand behind the rotation
  float cap;        // scores are cap * tanh(score / cap); 0: they are not capped
  const float* balance;  // [kv_heads * dim], powers of 2: keys are stored divided by it, and queries multiplied; or null
};

enum RecurrentKind : int32_t { kNotRecurrent = 0, kDeltaNet = 1, kShortConv = 2, kMamba2 = 3 };

// A model's recurrent layers, which are all of one kind and shape; all 0: it has none.
struct RecurrentShape {
  int32_t kind;                           // RecurrentKind
  int32_t taps, channels, gates, state;  // StateShape of src/paceline/core/recurrent_state.py; numbers of the state
  // For gated delta nets: value heads value_heads / key_heads * i and following share key head i. For Mamba-2 a group is a
  // key head, whose key is B and whose query is C; a head is a value head, whose value is x.
  int32_t key_heads, value_heads, key_dim, value_dim;
  int input_width() const { return channels + gates; }
  int output_width() const { return kind == kShortConv ? channels : value_heads * value_dim; }
};

constexpr int kHeadsOfPart = 4;  // of Mamba-2: heads that share B and C are cut into parts of this many

constexpr int kMostTaps = 8;

// The nodes of one slot in a pass; see RowsPass of src/paceline/core/recurrent_state.py, and SlotPass of
// tests/kernels/reference.py.
struct SlotRun {
  int first, count;        // its nodes among the pass's tokens
  int64_t slot;
  int applied, certain;
  bool fresh;              // whether the nodes begin the text
  const int64_t* parents;  // of these nodes, less `offset`: their indices among them; below 0: the text; null: chains
  int64_t offset;
};

// One recurrent layer, over the states of all slots.
struct RecurrentCall {
  RecurrentShape shape;
  int parts;  // into which its channels are cut: key heads of a gated delta net; some heads of Mamba-2; any number of a
              // short convolution
  const float* conv;  // [taps][channels]
  const float *rate, *bias, *norm;  // of a gated delta net or Mamba-2; the norm of Mamba-2 may be null
  const float *conv_bias, *skip;    // of Mamba-2: [channels] or null, and [value_heads]
  float epsilon, least_step;        // least_step: of Mamba-2
  float* mixed;  // [tokens][mixed_stride]: of a gated delta net and Mamba-2, inputs of the convolution, then the output's
                 // gates; of a short convolution, B, C and x: B is overwritten
  size_t mixed_stride;
  const float* gates;  // [tokens][gates_stride]: of a gated delta net, beta of each value head before its sigmoid, then inputs
                       // of the decays; of Mamba-2, inputs of the heads' steps
  size_t gates_stride;
  float* out;  // [tokens][out_stride]: value heads side by side, or channels
  size_t out_stride;
  float *state, *tail, *inputs;  // of this layer, slot after slot; see RecurrentStates
  int64_t window;                // inputs of a slot
};

constexpr int kWalkTokens = 64;   // tokens that go through a recurrent state together; a slot's window is no longer
constexpr int kWidestBlock = 64;  // columns that they go through before the next ones: 16 * kStateBlock on AVX-512

// A part's channels of a token, and the gates of all; of Mamba-2, the steps and decays of the part's heads.
static inline int recurrent_token_floats(const RecurrentShape& s) {
  if (s.kind == kMamba2) return (2 * s.key_dim + kHeadsOfPart * (s.value_dim + 2) + 15) / 16 * 16;
  return s.key_heads ? (s.channels / s.key_heads + s.gates + 15) / 16 * 16 : 0;
}

// A block of a state, and the tokens that go through it.
static inline int recurrent_walk_floats(const RecurrentShape& s) {
  return kWidestBlock * s.key_dim + kWalkTokens * recurrent_token_floats(s);
}

// The same, and the convolution's last inputs.
static inline size_t recurrent_scratch_floats(const RecurrentShape& s) {
  return static_cast<size_t>(recurrent_walk_floats(s) + s.taps * s.channels) + 64;
}

// A thread's memory for lists of tokens: each of draw_scratch_items() items.
struct DrawScratch {
  int32_t* tokens;
  float* depths;
  float* rest;  // and their weights: the entries that a search has not decided yet
  int32_t* weights;
  float* logits;  // a copy without the tokens that truncation cuts
};

// Cuts by the shape of the distribution (src/paceline/core/truncation.py); 0 is none, for typical_p 1.
struct Truncation {
  float typical_p = 1.0f, epsilon_cutoff = 0.0f, eta_cutoff = 0.0f, top_n_sigma = 0.0f;

  bool any() const { return typical_p < 1.0f || epsilon_cutoff > 0.0f || eta_cutoff > 0.0f || top_n_sigma > 0.0f; }
};

// One row of logits to draw a token from. A token's depth is its distance below the largest logit, after temperature.
struct Draw {
  const float* logits;
  int64_t vocabulary;
  float temperature;  // 0: the largest logit's token, whatever the other settings
  uint32_t key[2];    // of the noise
  float deepest;      // deeper tokens are cut (min-p); infinity: none
  int64_t top_k;      // a token stays if fewer than top_k tokens are less deep; 0: all
  float top_p;        // a remaining token stays if less than this fraction of the mass is less deep; 1: all
  DrawScratch scratch;
  Truncation truncation = {};  // comes before the other cuts
};

constexpr int kMaxQueries = 64;  // queries per call of Kernels::attend

struct Kernels {
  const char* name;

  void (*linear)(const LinearCall& call, int first_panel, int last_panel);
  // Quantises rows of x, after a norm or without (null), for a linear layer. A row has as many values as the layer has
  // padded inputs; its padding holds zeros.
  void (*quantise)(const float* x, const Norm* norm, const Linear& consumer, const Activations& to, Range rows);
  void (*apply_norm)(const float* x, const Norm& norm, int padded, float* out);
  // Norm (if any), rotary and cache write of one token.
  void (*rotate_and_write)(const Attention& attention, const Rotary& rotary, int token, int64_t row);
  // Attention of tokens [first, first + count) of one row over one kv head. Scratch: attend_scratch_floats(). then: the
  // keys that this thread reads next, to be prefetched, or null.
  void (*attend)(const Attention& attention, RowHead keys, int first, int count, float* scratch, const RowHead* then);
  // A recurrent layer: all nodes of one slot, one of the call's parts. Scratch: recurrent_scratch_floats().
  void (*recurrent)(const RecurrentCall& call, const SlotRun& run, int part, float* scratch);
  // What Mamba-2's parts share, once all of them have run: the inputs that a slot keeps, and the norm of a token's output.
  void (*keep_inputs)(const RecurrentCall& call, const SlotRun& run, float* scratch);
  void (*gate_output)(const RecurrentCall& call, int token);
  void (*embed)(const Linear& table, int64_t token, float* out);
  // Scores of a panel of experts: x [rows][stride] -> out [rows][outputs padded to kRouterPanel]. One chain of additions
  // over the inputs for each score.
  void (*route)(const Router& router, const float* x, int rows, size_t stride, int panel, float* out);
  // out += weight * x.
  void (*accumulate)(const float* x, float weight, int padded_width, float* out);
  int64_t (*draw)(const Draw& draw);
  // The softmax of the logits (temperature 1) at one token; 0 if the largest logit is not finite.
  float (*likelihood)(const Draw& draw, int64_t token);
  // Probabilities of the whole vocabulary after temperature and cuts.
  void (*probabilities)(const Draw& draw, float* out);
  // Log-softmax at one token (returned), and ids and log-probabilities of the `count` most likely tokens, best first.
  float (*logprobs)(const Draw& draw, int64_t token, int64_t count, int64_t* ids, float* values);
};

static inline uint32_t mix(uint32_t x) {  // Wellons' lowbias32, a 32-bit finaliser: the source of all noise
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// For a whole vocabulary or a search's first list; whole vectors are written at the end of a list.
static inline size_t draw_scratch_items(int64_t vocabulary) { return static_cast<size_t>(vocabulary > 1024 ? vocabulary : 1024) + 32; }

// Pages of a row's positions and the one behind them, which writes beyond the capacity go to.
static inline size_t blocks_for(int64_t capacity) { return static_cast<size_t>(capacity) / kPagePositions + 1; }

static inline int64_t bytes_of(int32_t element) { return element == kCacheFloat32 ? 4 : element == kCacheBf16 ? 2 : 1; }

static inline int padded(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }
static inline int panels(int columns) { return (columns + kPanel - 1) / kPanel; }

static inline size_t panel_bytes(const Linear& l) {
  const size_t inputs = static_cast<size_t>(l.inputs);
  if (l.format == kInt8) return inputs * kPanel;
  if (l.format == kBf16) return inputs * kPanel * 2;
  return inputs / static_cast<size_t>(l.group) * (static_cast<size_t>(l.group) * kPanel / 2 + 4 * kPanel);
}

// Scores of every query, its running sums and those of a block, one tile of 32 keys or values.
static inline size_t attend_scratch_floats(int dim) {
  return kMaxQueries * (kKeyBlock + 2 * static_cast<size_t>(dim) + 16) + 32 * static_cast<size_t>(dim) + 64;
}

const Kernels* avx2_kernels();
const Kernels* avxvnni_kernels();           // in builds with PL_WITH_NEWER
const Kernels* emulated_avxvnni_kernels();  // with AVX-512's instruction, for tests
const Kernels* avx512bw_kernels();          // without VNNI
const Kernels* avx512_kernels();            // VNNI, without bf16 instructions
const Kernels* avx512bf16_kernels();
const Kernels* amx_kernels();           // in builds with PL_WITH_NEWER
const Kernels* emulated_amx_kernels();  // tiles in memory, for tests
const Kernels* dotprod_kernels();       // 64-bit Arm, like the next
const Kernels* i8mm_kernels();

}  // namespace paceline
