// The instruction sets of this CPU without Python: every matrix product against plain loops, and all functions against
// each other. Prints "set function hash" for each; where two machines or two sets print another hash for a function that
// must be the same to the bit, something is wrong. Returns 1 after a wrong product. tests/kernels/test_sets.py runs it,
// for 64-bit Arm under qemu.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cpu.h"
#include "model.h"

using namespace paceline;

namespace {

bool failed = false;

struct Random {
  uint32_t state;
  uint32_t next() { return mix(++state); }
  float uniform() { return static_cast<float>(next() >> 8) * 0x1p-23f - 1.0f; }
  float outlying() { return uniform() * (next() % 29 ? 1.0f : 40.0f); }
};

uint64_t hash_of(const void* data, size_t bytes, uint64_t hash = 0xcbf29ce484222325u) {
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3u;
  return hash;
}

void say(const Kernels& kernels, const char* function, uint64_t hash) {
  std::printf("%s %s %016llx\n", kernels.name, function, static_cast<unsigned long long>(hash));
}

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
uint16_t to_bf16(float x) { return static_cast<uint16_t>((bits_of(x) + 0x7fff + ((bits_of(x) >> 16) & 1)) >> 16); }
float from_bf16(uint16_t x) { return from_bits(static_cast<uint32_t>(x) << 16); }
float from_fp16(uint16_t x) {  // normal numbers
  return from_bits((x & 0x8000u) << 16 | (((x >> 10) & 31u) + 112u) << 23 | (x & 1023u) << 13);
}

// Random packed weights, and the number at an output and an input.
struct Weights {
  Linear linear;
  std::vector<uint8_t> packed;
  std::vector<float> scales, bias;

  Weights(Format format, int inputs, int outputs, int group, bool with_bias) {
    Random random{static_cast<uint32_t>(inputs * 131 + outputs * 7 + format)};
    linear = {nullptr, nullptr, nullptr, inputs, outputs, format, format == kInt4 ? group : 0};
    packed.resize(panel_bytes(linear) * static_cast<size_t>(panels(outputs)));
    for (uint8_t& byte : packed) byte = static_cast<uint8_t>(random.next());
    const size_t columns = static_cast<size_t>(padded(outputs, kPanel));
    for (size_t i = 0; i < columns; ++i) scales.push_back(0.01f + std::fabs(random.uniform())), bias.push_back(random.uniform());
    linear.weights = packed.data();
    linear.scales = scales.data();
    linear.bias = with_bias ? bias.data() : nullptr;
    if (format == kInt8) for (uint8_t& byte : packed) byte = byte ? byte : 1;
    if (format == kBf16) fill_bf16(random);
    if (format == kInt4) fill_heads(random);
  }

  const uint8_t* panel_of(int output) const { return packed.data() + panel_bytes(linear) * static_cast<size_t>(output / kPanel); }
  int int8_at(int output, int input) const {
    return panel_of(output)[(input / 4 * kPanel + output % kPanel) * 4 + input % 4] - kInt8Zero;
  }
  float bf16_at(int output, int input) const {
    uint16_t bits;
    std::memcpy(&bits, panel_of(output) + ((input / 2 * kPanel + output % kPanel) * 2 + input % 2) * 2, sizeof bits);
    return from_bf16(bits);
  }
  const uint8_t* group_of(int output, int input) const {
    return panel_of(output) + input / linear.group * (linear.group * kPanel / 2 + 4 * kPanel);
  }
  int nibble_at(int output, int input) const {
    const int within = input % linear.group;
    const uint8_t byte = group_of(output, input)[4 * kPanel + (within / 8 * kPanel + output % kPanel) * 4 + within % 4];
    return within % 8 < 4 ? byte & 15 : byte >> 4;
  }
  float head_at(int output, int input, int which) const {  // 0: scale, 1: low
    uint16_t bits;
    std::memcpy(&bits, group_of(output, input) + 2 * (which * kPanel + output % kPanel), sizeof bits);
    return from_fp16(bits);
  }

 private:
  void fill_bf16(Random& random) {
    for (size_t i = 0; i + 1 < packed.size(); i += 2) {
      const uint16_t bits = to_bf16(random.uniform());
      std::memcpy(packed.data() + i, &bits, sizeof bits);
    }
  }
  void fill_heads(Random& random) {  // fp16 of normal size
    for (int output = 0; output < padded(linear.outputs, kPanel); ++output) {
      for (int input = 0; input < linear.inputs; input += linear.group) {
        for (int which = 0; which < 2; ++which) {
          const uint16_t bits = static_cast<uint16_t>((random.next() & 0x83ff) | (8 + random.next() % 6) << 10);
          std::memcpy(const_cast<uint8_t*>(group_of(output, input)) + 2 * (which * kPanel + output % kPanel), &bits, sizeof bits);
        }
      }
    }
  }
};

// One output as the kernels define it: exact sums of a group, then the scales in this order.
float expected(const Weights& w, const Activations& x, int row, int output) {
  const Linear& l = w.linear;
  const int8_t* a = reinterpret_cast<const int8_t*>(x.data + x.stride * static_cast<size_t>(row));
  const float* scales = x.scales + x.scale_stride * static_cast<size_t>(row);
  float total = 0.0f;
  const int span = l.format == kInt4 ? l.group : kActivationGroup;
  for (int start = 0; start < l.inputs; start += span) {
    int32_t sum = 0, plain = 0;
    for (int i = start; i < start + span; ++i) {
      sum += a[i] * (l.format == kInt4 ? w.nibble_at(output, i) : w.int8_at(output, i));
      plain += a[i];
    }
    float exact = static_cast<float>(sum);
    if (l.format == kInt4) exact = std::fmaf(exact, w.head_at(output, start, 0), static_cast<float>(plain) * w.head_at(output, start, 1));
    total = std::fmaf(exact, scales[start / kActivationGroup], total);
  }
  if (l.format == kInt8) total *= l.scales[output];
  return l.bias ? total + l.bias[output] : total;
}

float expected_bf16(const Weights& w, const float* x, int output, float& size) {
  double total = 0.0, sizes = 0.0;
  for (int i = 0; i < w.linear.inputs; ++i) {
    const double product = static_cast<double>(from_bf16(to_bf16(x[i]))) * w.bf16_at(output, i);
    total += product;
    sizes += std::fabs(product);
  }
  size = static_cast<float>(sizes) + 1.0f;
  return static_cast<float>(total + (w.linear.bias ? w.linear.bias[output] : 0.0f));
}

struct Case {
  Format format;
  int rows, inputs, outputs, group;
};

std::vector<float> run(const Kernels& kernels, const Weights& w, const float* x, int rows, Epilogue epilogue) {
  Quantised input;
  input.grow(rows, w.linear.inputs);
  kernels.quantise(x, nullptr, w.linear, input.view, {0, rows});
  const size_t stride = static_cast<size_t>(padded(w.linear.outputs, 64));
  std::vector<float> out(stride * static_cast<size_t>(rows), 0.5f);
  kernels.linear(LinearCall{&w.linear, input.view, rows, epilogue, out.data(), stride}, 0, panels(w.linear.outputs));
  return out;
}

void check(const Kernels& kernels, const Case& c, const Weights& w, const std::vector<float>& x, const std::vector<float>& out) {
  Quantised input;
  input.grow(c.rows, c.inputs);
  kernels.quantise(x.data(), nullptr, w.linear, input.view, {0, c.rows});
  const size_t stride = out.size() / static_cast<size_t>(c.rows);
  for (int row = 0; row < c.rows && !failed; ++row) {
    for (int output = 0; output < c.outputs && !failed; ++output) {
      const float got = out[stride * static_cast<size_t>(row) + static_cast<size_t>(output)];
      float size = 0.0f;
      const float want = c.format == kBf16 ? expected_bf16(w, x.data() + static_cast<size_t>(row * c.inputs), output, size)
                                           : expected(w, input.view, row, output);
      if (c.format == kBf16 ? std::fabs(got - want) <= 3e-6f * size : bits_of(got) == bits_of(want)) continue;
      std::printf("%s: format %d, %d rows, %d inputs, %d outputs: row %d, output %d is %.9g, not %.9g\n", kernels.name, c.format,
                  c.rows, c.inputs, c.outputs, row, output, got, want);
      failed = true;
    }
  }
}

// Every number of rows up to two blocks of any set; rows alone give the bits that they give together.
void test_products(const Kernels& kernels) {
  const char* const names[] = {"int8", "bf16", "int4"};
  for (const Format format : {kInt8, kBf16, kInt4}) {
    uint64_t hash = 1;
    for (int rows = 1; rows <= 17; ++rows) {
      const Case c = {format, rows, 64 * (1 + rows % 5), rows % 2 ? 77 : 96, rows % 3 ? 32 : 64};
      const Weights w(format, c.inputs, c.outputs, c.group, rows % 2 == 0);
      Random random{static_cast<uint32_t>(rows)};
      std::vector<float> x(static_cast<size_t>(c.rows * c.inputs));
      for (float& value : x) value = random.outlying();
      const std::vector<float> out = run(kernels, w, x.data(), rows, Epilogue::kStore);
      check(kernels, c, w, x, out);
      hash = hash_of(out.data(), out.size() * sizeof(float), hash);
      for (const Epilogue epilogue : {Epilogue::kAdd, Epilogue::kSwiglu}) {
        const std::vector<float> other = run(kernels, w, x.data(), rows, epilogue);
        hash = hash_of(other.data(), other.size() * sizeof(float), hash);
      }
      const std::vector<float> alone = run(kernels, w, x.data() + (rows - 1) * c.inputs, 1, Epilogue::kStore);
      if (std::memcmp(alone.data(), out.data() + alone.size() * static_cast<size_t>(rows - 1), static_cast<size_t>(c.outputs) * sizeof(float))) {
        std::printf("%s: %s: row %d of %d has other bits alone\n", kernels.name, names[format], rows - 1, rows);
        failed = true;
      }
    }
    say(kernels, names[format], hash);
  }
}

void test_norm(const Kernels& kernels) {
  uint64_t hash = 1;
  for (int width = 1; width < 300; width += 13) {
    const int inputs = padded(width, kInputMultiple);
    std::vector<float> x(static_cast<size_t>(inputs)), weight(x), out(x);
    Random random{static_cast<uint32_t>(width)};
    for (int i = 0; i < width; ++i) x[static_cast<size_t>(i)] = random.outlying(), weight[static_cast<size_t>(i)] = random.uniform();
    const Norm norm = {weight.data(), width, 1e-6f};
    kernels.apply_norm(x.data(), norm, inputs, out.data());
    hash = hash_of(out.data(), out.size() * sizeof(float), hash);
  }
  say(kernels, "norm", hash);
}

// Fills caches with random vectors of `dim` numbers, behind which lie their scales if they are int8.
void fill_caches(Random& random, CacheElement element, size_t dim, std::vector<uint8_t>& keys, std::vector<uint8_t>& values) {
  const size_t bytes = static_cast<size_t>(bytes_of(element)), stride = dim + (element == kCacheInt8 ? sizeof(float) : 0);
  for (size_t i = 0; i * bytes < keys.size(); ++i) {
    const bool scale = i % stride == dim;
    for (std::vector<uint8_t>* cache : {&keys, &values}) {
      const float x = random.uniform();
      const uint16_t half = to_bf16(x);
      const int8_t byte = static_cast<int8_t>(127.0f * x);
      const void* from[] = {&x, &half, &byte};
      std::memcpy(cache->data() + bytes * i, scale ? &x : from[element], scale ? sizeof x : bytes);
    }
    if (scale) i += sizeof(float) - 1;
  }
}

// One row of `count` tokens over a cache, with and without a window, head widths with a remainder of the transposition.
uint64_t attend(const Kernels& kernels, CacheElement element, int64_t window) {
  constexpr int kHeads = 6, kKvHeads = 2, kPositions = 400, kCount = 4, kStart = 371;
  const int kDim = element == kCacheInt8 ? 80 : 48;
  const size_t stride = static_cast<size_t>(kDim) + (element == kCacheInt8 ? sizeof(float) : 0);
  const size_t kQkv = (kHeads + 2 * kKvHeads) * static_cast<size_t>(kDim);
  const int64_t kPage = kKvHeads * kPagePositions * static_cast<int64_t>(stride);
  const std::vector<int32_t> pages = {3, 0, 6, 1, 5, 2, 4};
  const size_t elements = pages.size() * static_cast<size_t>(kPage);
  Random random{77};
  const size_t dim = static_cast<size_t>(kDim);
  std::vector<float> qkv(kQkv * kCount), out(kHeads * dim * kCount), cosine(kPositions * dim / 2), sine(cosine), norm(dim);
  std::vector<uint8_t> keys(elements * static_cast<size_t>(bytes_of(element))), values(keys);
  for (float& x : qkv) x = random.uniform();
  for (float& x : norm) x = random.uniform();
  for (size_t i = 0; i < cosine.size(); ++i) cosine[i] = random.uniform(), sine[i] = random.uniform();
  fill_caches(random, element, dim, keys, values);
  std::vector<int64_t> positions;
  for (int i = 0; i < kCount; ++i) positions.push_back(kStart + i);
  Attention a = {};
  a.qkv = qkv.data(), a.qkv_stride = kQkv, a.out = out.data(), a.out_stride = kHeads * dim;
  a.positions = positions.data(), a.blocks = pages.size();
  a.keys = {keys.data(), pages.data(), 0, kPage, kPagePositions * static_cast<int64_t>(stride), static_cast<int64_t>(stride)};
  a.values = a.keys;
  a.values.data = values.data();
  a.element = element, a.heads = kHeads, a.kv_heads = kKvHeads, a.dim = a.value_dim = kDim, a.capacity = kPositions, a.window = window;
  std::vector<float> balance(kKvHeads * dim);
  for (size_t i = 0; i < balance.size(); ++i) balance[i] = static_cast<float>(1 << i % 5);
  if (element == kCacheInt8) a.balance = balance.data();
  a.scale = 0.3f, a.q_norm = norm.data(), a.epsilon = 1e-6f;
  const Rotary rotary = {cosine.data(), sine.data(), kDim / 2, kPositions};
  for (int token = 0; token < kCount; ++token) kernels.rotate_and_write(a, rotary, token, 0);
  std::vector<float> scratch(attend_scratch_floats(kDim));
  for (int head = 0; head < kKvHeads; ++head) kernels.attend(a, {0, head}, 0, kCount, scratch.data(), nullptr);
  return hash_of(out.data(), out.size() * sizeof(float), hash_of(keys.data(), keys.size()));
}

void test_attention(const Kernels& kernels) {
  const uint64_t windowed = attend(kernels, kCacheBf16, 100);
  say(kernels, "attention", attend(kernels, kCacheBf16, 0) ^ attend(kernels, kCacheFloat32, 0) << 1 ^ windowed << 2);
  say(kernels, "attention-int8", attend(kernels, kCacheInt8, 0) ^ attend(kernels, kCacheInt8, 100) << 1);
}

// Five tokens of a slot, two of which may be rejected, after three that its last pass kept; in several cuts.
std::vector<float> short_convolution(const Kernels& kernels, int parts) {
  constexpr int kChannels = 80, kTaps = 4, kCount = 5, kWindow = 8, kStride = 3 * kChannels;
  Random random{9};
  std::vector<float> mixed(kStride * kCount), conv(kTaps * kChannels), tail((kTaps - 1) * kChannels), inputs(kWindow * kChannels);
  for (std::vector<float>* each : {&mixed, &conv, &tail, &inputs}) for (float& x : *each) x = random.outlying();
  std::vector<float> out(kChannels * kCount);
  RecurrentCall call = {};
  call.shape.kind = kShortConv, call.shape.taps = kTaps, call.shape.channels = kChannels;
  call.parts = parts, call.conv = conv.data(), call.mixed = mixed.data(), call.mixed_stride = kStride;
  call.out = out.data(), call.out_stride = kChannels, call.tail = tail.data(), call.inputs = inputs.data(), call.window = kWindow;
  std::vector<float> scratch(recurrent_scratch_floats(call.shape));
  const SlotRun run = {0, kCount, 0, 3, 3, false, nullptr, 0};
  for (int part = 0; part < parts; ++part) kernels.recurrent(call, run, part, scratch.data());
  for (const std::vector<float>* each : {&tail, &inputs}) out.insert(out.end(), each->begin(), each->end());
  return out;
}

void test_short_convolution(const Kernels& kernels) {
  const std::vector<float> whole = short_convolution(kernels, 1);
  for (const int parts : {2, 3, 7}) {
    if (short_convolution(kernels, parts) == whole) continue;
    std::printf("%s: a short convolution in %d parts has other bits\n", kernels.name, parts);
    failed = true;
  }
  say(kernels, "recurrent", hash_of(whole.data(), whole.size() * sizeof(float)));
}

void test_draws(const Kernels& kernels) {
  constexpr int64_t kVocabulary = 3001;
  Random random{5};
  std::vector<float> logits(kVocabulary), depths(draw_scratch_items(kVocabulary)), rest(depths), chances(logits);
  std::vector<int32_t> tokens(depths.size()), weights(tokens);
  uint64_t drawn = 1, chance = 1;
  for (int i = 0; i < 24; ++i) {
    for (float& x : logits) x = 6.0f * random.outlying() / 40.0f + random.uniform();
    Draw draw = {logits.data(), kVocabulary, 0.4f * static_cast<float>(i % 4), {random.next(), random.next()}, INFINITY, 0, 1.0f, {}};
    draw.top_k = i % 3 == 1 ? 20 : 0;
    draw.top_p = i % 3 == 2 ? 0.9f : 1.0f;
    draw.scratch = {tokens.data(), depths.data(), rest.data(), weights.data()};
    const int64_t token = kernels.draw(draw);
    drawn = hash_of(&token, sizeof token, drawn);
    const float likelihood = kernels.likelihood(draw, token);
    chance = hash_of(&likelihood, sizeof likelihood, chance);
    if (draw.temperature > 0.0f) kernels.probabilities(draw, chances.data());
    chance = hash_of(chances.data(), chances.size() * sizeof(float), chance);
  }
  say(kernels, "draw", drawn);
  say(kernels, "probabilities", chance);
}

}  // namespace

int main() {
  for (const InstructionSet& set : instruction_sets()) {
    if (*set.obstacle) {
      std::printf("%s: %s\n", set.name, set.obstacle);
      continue;
    }
    const Kernels& kernels = *set.kernels();
    if (!multiplies_correctly(kernels)) failed = true, std::printf("%s: the self-check failed\n", set.name);
    test_products(kernels);
    test_norm(kernels);
    test_attention(kernels);
    test_short_convolution(kernels);
    test_draws(kernels);
  }
  return failed ? 1 : 0;
}
