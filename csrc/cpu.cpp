#include "cpu.h"

#include <cstring>
#include <vector>

#include "model.h"

namespace paceline {
namespace {

// --- the self-check ------------------------------------------------------------------------------------------------------

constexpr int kRows = 37, kInputs = 192, kOutputs = 64;  // two blocks of rows, one with two tiles of them

uint16_t to_bf16(float x) {  // for values that are exact in bf16
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}

// Whole numbers; 127 in every group makes the scale of its row 1.
float value_of(int row, int input) { return input % 64 == 0 ? 127.0f : static_cast<float>((row * 31 + input * 17) % 255 - 127); }
int weight_of(int output, int input) { return (output * 13 + input * 29 + output * input) % 255 - 127; }

struct Problem {
  Linear linear;
  std::vector<uint8_t> weights;
  std::vector<float> scales = std::vector<float>(kOutputs, 1.0f);

  explicit Problem(Format format) : weights(static_cast<size_t>(kOutputs) * kInputs * 2) {
    for (int output = 0; output < kOutputs; ++output) for (int input = 0; input < kInputs; ++input) pack(format, output, input);
    linear = {weights.data(), scales.data(), nullptr, kInputs, kOutputs, format, 0, nullptr};
  }

 private:
  void pack(Format format, int output, int input) {
    const int in_word = format == kInt8 ? 4 : 2, panel = output / kPanel, column = output % kPanel;
    const size_t at = static_cast<size_t>(((panel * (kInputs / in_word) + input / in_word) * kPanel + column) * in_word + input % in_word);
    if (format == kInt8) {
      weights[at] = static_cast<uint8_t>(weight_of(output, input) + kInt8Zero);
    } else {
      const uint16_t bits = to_bf16(static_cast<float>(weight_of(output, input)));
      std::memcpy(weights.data() + 2 * at, &bits, sizeof bits);
    }
  }
};

std::vector<float> multiply(const Kernels& kernels, const Linear& linear, int first, int rows) {
  Quantised input;
  input.grow(rows, kInputs);
  std::vector<float> x, out(static_cast<size_t>(rows) * kOutputs);
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < kInputs; ++i) x.push_back(value_of(first + row, i));
  }
  kernels.quantise(x.data(), nullptr, linear, input.view, {0, rows});
  kernels.linear(LinearCall{&linear, input.view, rows, Epilogue::kStore, out.data(), kOutputs}, 0, panels(kOutputs));
  return out;
}

// All products and sums here are whole numbers below 2^24: the order of additions does not matter.
bool right(const std::vector<float>& out) {
  for (int row = 0; row < kRows; ++row) {
    for (int output = 0; output < kOutputs; ++output) {
      int64_t sum = 0;
      for (int i = 0; i < kInputs; ++i) sum += static_cast<int64_t>(value_of(row, i)) * weight_of(output, i);
      if (out[static_cast<size_t>(row * kOutputs + output)] != static_cast<float>(sum)) return false;
    }
  }
  return true;
}

}  // namespace

bool multiplies_correctly(const Kernels& kernels) {
  for (const Format format : {kInt8, kBf16}) {
    const Problem problem(format);
    if (!right(multiply(kernels, problem.linear, 0, kRows))) return false;
  }
  return true;
}

const char* obstacle_to(const char* name) {
  for (const InstructionSet& set : instruction_sets()) {
    if (!std::strcmp(name, set.name)) return set.obstacle;
  }
  return "this library has no kernels of this name";
}

const Kernels* kernels_named(const char* name) {
  for (const InstructionSet& set : instruction_sets()) {
    if (!std::strcmp(name, set.name) && !*set.obstacle) return set.kernels();
  }
  return nullptr;
}

}  // namespace paceline
