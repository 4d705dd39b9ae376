// The C interface that src/paceline/kernels calls (bindings.py). Functions that can fail return a Problem or a NewObject.
// Those that choose an instruction set cannot report a failure: they need some hundred bytes, once.
#include <cstring>

#include "cpu.h"
#include "exports.h"
#include "layout.h"
#include "model.h"
#include "system.h"

using namespace paceline;

// What src/paceline/kernels/abi.py was written from, and where the compiler put the fields of its structs.
PL_EXPORT const char* pl_interface() { return kInterface; }
PL_EXPORT const int32_t* pl_layout() { return kLayout; }

PL_EXPORT const Kernels* pl_kernels(const char* name) { return kernels_named(name); }
PL_EXPORT const char* pl_obstacle(const char* name) { return obstacle_to(name); }
PL_EXPORT int pl_multiplies_correctly(const Kernels* kernels) { return multiplies_correctly(*kernels); }

// A pool whose threads are divided between NUMA nodes: the system's numbers of the nodes, and of the CPUs of each, node after
// node. Without nodes the system places them. Null if the system refuses a thread, or a CPU.
PL_EXPORT Pool* pl_pool_new(int threads, int nodes, const int32_t* numbers, const int32_t* cpu_counts, const int32_t* cpus) {
  try {
    std::vector<Node> of(static_cast<size_t>(nodes));
    for (Node& node : of) {
      node = {*numbers++, CpuSet{}};
      for (int i = *cpu_counts++; i > 0; --i) node.cpus.add(*cpus++);
    }
    return new Pool(threads, of);
  } catch (const std::exception&) {
    return nullptr;
  }
}
PL_EXPORT void pl_pool_free(Pool* pool) { delete pool; }

// Memory for weights in huge pages, so that reading gigabytes sequentially does not stop for address translation.
PL_EXPORT void* pl_arena_new(size_t bytes) { return new_huge_pages(bytes); }
// Places the pages of a linear layer's panels, which nobody has written yet, where this pool's threads read them. Returns 0 or
// the system's error number.
PL_EXPORT int pl_place(const Pool* pool, uint8_t* panels, int count, size_t panel_bytes) { return pool->place(panels, count, panel_bytes); }
PL_EXPORT void pl_arena_free(void* memory, size_t bytes) { free_huge_pages(memory, bytes); }

PL_EXPORT NewObject<Model> pl_model_new(const ModelSpec* spec, const Kernels* kernels) { return made<Model>(*spec, *kernels); }
PL_EXPORT void pl_model_free(Model* model) { delete model; }
PL_EXPORT int64_t pl_experts_read(const Model* model) { return model->experts_read(); }
// Whether the exchange with other ranks has ended, and the results of passes with it.
PL_EXPORT int pl_ranks_ended(const Model* model) { return model->ranks_ended(); }

PL_EXPORT Problem pl_forward(Model* model, Pool* pool, const int64_t* tokens, const int64_t* rows, const int64_t* positions,
                             const int64_t* slots, const int64_t* parents, int count, int read, int text,
                             const Cache* cache, float* hidden, const int64_t* taps, int tap_count, float* features, double* seconds,
                             const float* entering, const int64_t* ends) {
  Tokens nodes = {tokens, rows, positions, slots, parents, count};
  nodes.read = read;
  nodes.entering = entering;
  nodes.ends = ends;
  return guarded([&]() -> const char* {
    if (const char* problem = model->problem_with(nodes, *cache)) return problem;
    if (parents && !slots) return "a tree needs slots";
    if (parents && ends) return "a tree is no block";
    for (int i = 0; ends && i < count; ++i) if (ends[i] < positions[i]) return "a token does not see itself";
    if (read < 0 || read > count || (read > 0 && !parents)) return "only tokens of a tree may have been computed before";
    if (const char* problem = parents ? problem_with_trees(nodes, cache->capacity) : nullptr) return problem;
    if (text < 0 || text > count || (text > 0 && parents)) return "only a chain may begin with tokens without hidden states";
    model->forward(*pool, nodes, *cache, PassOutputs{hidden, taps, tap_count, features, text}, seconds);
    return nullptr;
  });
}

// head: the output head to use, or null for the model's own.
PL_EXPORT Problem pl_logits(Model* model, Pool* pool, const float* hidden, int rows, float* out, const Linear* head) {
  return guarded([&] { model->logits(*pool, hidden, rows, out, head ? *head : model->spec.head); });
}

// --- single kernels, for tests and benchmarks ----------------------------------------------------------------------------

// x [rows][padded inputs] -> out [rows][out_stride]; epilogue: 0 store, 1 add, 2 SwiGLU, 3 GeGLU.
PL_EXPORT Problem pl_linear(const Kernels* kernels, Pool* pool, const Linear* linear, const float* x, int rows, int epilogue,
                            float* out, size_t out_stride) {
  return guarded([&] {
    Quantised quantised;
    quantised.grow(rows, linear->inputs);
    kernels->quantise(x, nullptr, *linear, quantised.view, {0, rows});
    const LinearCall call = {linear, quantised.view, rows, static_cast<Epilogue>(epilogue), out, out_stride};
    in_parallel(*pool, [&](int thread) {
      pool->share_out(panels(linear->outputs), thread, [&](Range chunk) { kernels->linear(call, chunk.first, chunk.last); });
    });
  });
}

// int8 values [padded inputs], the scales of their groups, and the sums that the consumer needs.
PL_EXPORT Problem pl_quantise(const Kernels* kernels, const Linear* consumer, const float* x, int8_t* values, float* scales,
                              int32_t* sums) {
  const size_t inputs = static_cast<size_t>(consumer->inputs), span = consumer->format == kInt4 ? static_cast<size_t>(consumer->group) : kActivationGroup;
  return guarded([&] {
    Quantised row;
    row.grow(1, consumer->inputs);
    kernels->quantise(x, nullptr, *consumer, row.view, {0, 1});
    std::memcpy(values, row.view.data, inputs);
    std::memcpy(scales, row.view.scales, sizeof(float) * (inputs / kActivationGroup));
    std::memcpy(sums, row.view.sums, sizeof(int32_t) * (inputs / span));
  });
}

PL_EXPORT void pl_rms_norm(const Kernels* kernels, const float* x, const float* weight, int width, int padded_width, float epsilon, float* out) {
  kernels->apply_norm(x, Norm{weight, width, epsilon}, padded_width, out);
}

PL_EXPORT void pl_embed(const Kernels* kernels, const Linear* table, int64_t token, float* out) { kernels->embed(*table, token, out); }

// Rotary, cache write and attention of one layer, single-threaded; all `tokens` belong to one row.
PL_EXPORT Problem pl_attend(const Kernels* kernels, const Attention* attention, const Rotary* rotary, int64_t row, int tokens) {
  return guarded([&] {
    Buffer scratch;
    scratch.grow(sizeof(float) * attend_scratch_floats(attention->dim));
    for (int i = 0; i < tokens; ++i) kernels->rotate_and_write(*attention, *rotary, i, row);
    const int most = kMaxQueries / (attention->heads / attention->kv_heads);
    for (int head = 0; head < attention->kv_heads; ++head) {
      for (int i = 0; i < tokens; i += most) {
        kernels->attend(*attention, {row, head}, i, tokens - i < most ? tokens - i : most, scratch.as<float>(), nullptr);
      }
    }
  });
}

// Reads the memory once on all threads: an upper bound on any kernel's speed. The sum keeps the reads from being
// optimised away.
PL_EXPORT uint64_t pl_read(Pool* pool, const uint64_t* memory, size_t words) {
  std::atomic<uint64_t> total{0};
  in_parallel(*pool, [&](int thread) {
    const size_t threads = static_cast<size_t>(pool->threads()), t = static_cast<size_t>(thread);
    uint64_t a = 0, b = 0, c = 0, d = 0;
    for (size_t i = words / 8 * t / threads * 8; i < words / 8 * (t + 1) / threads * 8; i += 8) {
      a += memory[i] ^ memory[i + 4];
      b += memory[i + 1] ^ memory[i + 5];
      c += memory[i + 2] ^ memory[i + 6];
      d += memory[i + 3] ^ memory[i + 7];
    }
    total += a + b + c + d;
  });
  return total;
}

PL_EXPORT const char* pl_source_hash() { return PL_SOURCE_HASH; }
