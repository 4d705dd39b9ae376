// The instruction sets of 64-bit Arm, by what the operating system says of the CPU.
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "cpu.h"

namespace paceline {
namespace {

struct Features {
  bool dotprod, i8mm, bf16;
};

#if defined(__linux__)

Features read_cpu() {
  constexpr unsigned long kDotprod = 1ul << 20, kI8mm = 1ul << 13, kBf16 = 1ul << 14;  // of hwcap, hwcap2, hwcap2
  const unsigned long second = getauxval(AT_HWCAP2);
  return {(getauxval(AT_HWCAP) & kDotprod) != 0, (second & kI8mm) != 0, (second & kBf16) != 0};
}

#elif defined(__APPLE__)

bool has(const char* name) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
Features read_cpu() { return {has("hw.optional.arm.FEAT_DotProd"), has("hw.optional.arm.FEAT_I8MM"), has("hw.optional.arm.FEAT_BF16")}; }

#else

Features read_cpu() { return {false, false, false}; }

#endif

// These kernels ran under emulation only: a CPU must multiply correctly before they are used.
const char* obstacle(bool has, const Kernels* (*kernels)()) {
  if (!has) return "the processor has none";
  return multiplies_correctly(*kernels()) ? "" : "it did not pass its self-check";
}

std::vector<InstructionSet> find_sets() {
  const Features cpu = read_cpu();
  return {
      {"neon-i8mm-bf16", obstacle(cpu.dotprod && cpu.i8mm && cpu.bf16, i8mm_kernels), i8mm_kernels},
      {"neon-dotprod", obstacle(cpu.dotprod, dotprod_kernels), dotprod_kernels},
  };
}

}  // namespace

const std::vector<InstructionSet>& instruction_sets() {
  static const std::vector<InstructionSet> sets = find_sets();
  return sets;
}

}  // namespace paceline
