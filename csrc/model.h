// A llama-like decoder as the C interface hands it over: plain pointers into memory that the caller keeps alive.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace paceline {

// These structures mirror src/paceline/kernels/abi.py; kAbiVersion changes with them.
constexpr int kAbiVersion = 6;

struct Layer {
  Linear qkv, attention_out, gate_up, down;
  const float* input_norm;
  const float* post_norm;
  const float* q_norm;  // or null
  const float* k_norm;
  int64_t window;       // 0: unlimited
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
};

// Blocks of logits, one row of the batch after the other.
struct DrawCall {
  const float* logits;  // [rows][block], `stride` floats from one to the next
  const float* temperature;  // of each row
  const int64_t* seeds;
  const int64_t* first;  // position of each row's first token, before `offset`
  int64_t rows, block, stride, vocabulary, offset;
  uint32_t purpose;
};

// Guesses, and the logits that judge them: of each row's unseen token and of every guess.
struct AcceptCall {
  const float* logits;     // `vocabulary` floats a place; a row's places follow each other
  const int64_t* guesses;  // [rows][most]
  const int64_t* counts;   // real guesses of each row
  const float* temperature;
  const int64_t* seeds;
  const int64_t* first;    // position of the token after each row's unseen one
  int64_t rows, most, vocabulary;
  int32_t packed;          // whether only the real guesses have logits, not all `most` of every row
  uint32_t purpose;
};

struct Cache {
  uint8_t* keys;  // [layer][row][head][position][dim]
  uint8_t* values;
  int64_t layer_stride, row_stride, head_stride, position_stride;  // in elements
  int64_t rows, capacity;
  int32_t bf16;
};

struct Tokens {
  const int64_t* tokens;
  const int64_t* rows;
  const int64_t* positions;
  int count;
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

  void forward(Pool& pool, const Tokens& tokens, const Cache& cache, float* hidden, double* seconds);
  void logits(Pool& pool, const float* hidden, int rows, float* out);
  int64_t vocabulary() const { return spec.head.outputs; }

  const ModelSpec spec;
  const Kernels& kernels;
  const std::vector<Layer> layers;
  const int padded_width, padded_qkv, padded_attention, padded_ffn;

 private:
  friend class Pass;
  friend class HeadPass;
  void forward_chunk(Pool& pool, const Tokens& tokens, const Cache& cache, float* hidden, double* seconds);
  void grow(int threads, int tokens);

  std::mutex one_call_at_a_time_;
  Buffer residual_, qkv_, attended_, activated_, padded_hidden_;
  Quantised shared_;
  std::vector<std::unique_ptr<Scratch>> scratch_;
  std::vector<std::atomic<int>> next_unit_;
};

// The share of `thread` in `count` things.
struct Share : Range {
  Share(int count, int thread, int threads)
      : Range{static_cast<int>(static_cast<int64_t>(count) * thread / threads),
              static_cast<int>(static_cast<int64_t>(count) * (thread + 1) / threads)} {}
};

}  // namespace paceline
