// The instruction sets of 64-bit x86, by cpuid and by the state that the operating system saves (XCR0).
#include <cpuid.h>

#include "cpu.h"
#include "system.h"

namespace paceline {
namespace {

constexpr unsigned kVectorState = 0x6;       // of XCR0: SSE and AVX
constexpr unsigned kWideState = 0xe6;        // with AVX-512
constexpr unsigned kTileState = 0x600e6;     // with AMX
constexpr unsigned kOsSavesState = 1u << 27; // of cpuid 1, ecx: XCR0 can be read

// Feature bits: ecx of leaf 1; ebx, ecx and edx of leaf 7; eax of its subleaf 1.
struct Features {
  unsigned basic_c = 0, b = 0, c = 0, d = 0, one_a = 0;
  bool has(const Features& wanted) const {
    return !(wanted.basic_c & ~basic_c) && !(wanted.b & ~b) && !(wanted.c & ~c) && !(wanted.d & ~d) && !(wanted.one_a & ~one_a);
  }
};

constexpr Features kAvx2 = {1u << 12 | 1u << 29, 1u << 5, 0, 0, 0};  // FMA, F16C, AVX2
constexpr Features kAvxVnni = {kAvx2.basic_c, kAvx2.b, 0, 0, 1u << 4};
constexpr Features kAvx512 = {kAvx2.basic_c, kAvx2.b | 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31, 0, 0, 0};  // F, DQ, BW, VL
constexpr Features kAvx512Vnni = {kAvx512.basic_c, kAvx512.b, 1u << 11, 0, 0};
constexpr Features kAvx512Bf16 = {kAvx512.basic_c, kAvx512.b, 1u << 11, 0, 1u << 5};
constexpr Features kAmx = {kAvx512.basic_c, kAvx512.b, 1u << 11, 1u << 22 | 1u << 24 | 1u << 25, 1u << 5};  // bf16, tiles, bytes

struct Cpu {
  Features features;
  unsigned saved = 0;  // XCR0
};

Cpu read_cpu() {
  Cpu cpu;
  unsigned a, b, c, d, subleaves;
  if (!__get_cpuid(1, &a, &b, &cpu.features.basic_c, &d)) return cpu;
  if (__get_cpuid_count(7, 0, &subleaves, &cpu.features.b, &cpu.features.c, &cpu.features.d) && subleaves > 0) {
    __get_cpuid_count(7, 1, &cpu.features.one_a, &b, &c, &d);
  }
  unsigned high;
  if (cpu.features.basic_c & kOsSavesState) asm volatile("xgetbv" : "=a"(cpu.saved), "=d"(high) : "c"(0));
  return cpu;
}

const char* obstacle(const Cpu& cpu, const Features& wanted, unsigned state, bool built = true) {
  if (!cpu.features.has(wanted)) return "the processor has none";
  if (!built) return "the compiler of this build does not know the instructions";
  if ((cpu.saved & state) != state) return "the operating system does not save its registers";
  return "";
}

#ifdef PL_WITH_NEWER
constexpr bool kNewer = true;
#else
constexpr bool kNewer = false;
const Kernels* amx_kernels() { return nullptr; }
const Kernels* avxvnni_kernels() { return nullptr; }
#endif

const char* obstacle_to_amx(const Cpu& cpu) {
  const char* plain = obstacle(cpu, kAmx, kTileState, kNewer);
  if (*plain) return plain;
  if (!allow_tiles()) return "the operating system does not grant it to this process";
  return multiplies_correctly(*amx_kernels()) ? "" : "it did not pass its self-check";
}

std::vector<InstructionSet> find_sets() {
  const Cpu cpu = read_cpu();
  return {
      {"amx", obstacle_to_amx(cpu), amx_kernels},
      {"avx512-vnni-bf16", obstacle(cpu, kAvx512Bf16, kWideState), avx512bf16_kernels},
      {"avx512-vnni", obstacle(cpu, kAvx512Vnni, kWideState), avx512_kernels},
      {"avx-vnni", obstacle(cpu, kAvxVnni, kVectorState, kNewer), avxvnni_kernels},
      {"avx512-bw", obstacle(cpu, kAvx512, kWideState), avx512bw_kernels},
      {"avx2", obstacle(cpu, kAvx2, kVectorState), avx2_kernels},
      {"amx-emulated", obstacle(cpu, kAvx512Bf16, kWideState), emulated_amx_kernels},
      {"avx-vnni-emulated", obstacle(cpu, kAvx512Vnni, kWideState), emulated_avxvnni_kernels},
  };
}

}  // namespace

const std::vector<InstructionSet>& instruction_sets() {
  static const std::vector<InstructionSet> sets = find_sets();
  return sets;
}

}  // namespace paceline
