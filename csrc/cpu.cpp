#include "cpu.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "model.h"

namespace paceline {
namespace {

constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
constexpr int kTileData = 18;               // the component of the CPU's state that Linux grants on request
constexpr unsigned kTileState = 3u << 17;   // of XCR0: configuration and data

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}
bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }

bool has_amx() {
  unsigned a, b, c, d;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kBytes = 1u << 25, kWanted = kBf16 | kTile | kBytes;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kWanted) == kWanted && has_avx512bf16();
}

bool system_saves_tiles() {
  unsigned a, b, c, d;
  constexpr unsigned kOsXsave = 1u << 27;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & kOsXsave)) return false;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTileState) == kTileState;
}

const char* find_amx_obstacle() {
  if (!has_amx()) return "";
#ifndef PL_WITH_AMX
  return "this build has no AMX kernels: the compiler does not know the instructions";
#else
  if (!system_saves_tiles()) return "the operating system does not save AMX tiles";
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return "the operating system does not grant AMX to this process";
  if (!multiplies_correctly(*amx_kernels())) return "AMX did not pass its self-check";
  return "";
#endif
}

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
    linear = {weights.data(), scales.data(), nullptr, kInputs, kOutputs, format, 0};
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

const char* amx_obstacle() {
  __builtin_cpu_init();
  static const char* const obstacle = find_amx_obstacle();
  return obstacle;
}

const Kernels* kernels_named(const char* name) {
  __builtin_cpu_init();
  const auto is = [name](const char* other) { return !std::strcmp(name, other); };
  if (is("avx2") && has_avx2()) return avx2_kernels();
  if (is("avx512-vnni") && has_avx512()) return avx512_kernels();
  if (is("avx512-vnni-bf16") && has_avx512bf16()) return avx512bf16_kernels();
#ifdef PL_WITH_AMX
  if (is("amx") && has_amx() && !*amx_obstacle()) return amx_kernels();
#endif
  if (is("amx-emulated") && has_avx512bf16()) return emulated_amx_kernels();
  return nullptr;
}

}  // namespace paceline
