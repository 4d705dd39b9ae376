// The instruction sets that csrc/sets_arm.cpp chooses on macOS, whose kernel knows the features that are this program's
// arguments: prints the names of those that can run. tests/test_platforms.py builds it as macOS would, for this machine.
#include <cstddef>
#include <cstdio>
#include <set>
#include <string>

static std::set<std::string> features;

// As <sys/sysctl.h> declares it: 0, or -1 for a name that the kernel does not know.
extern "C" int sysctlbyname(const char* name, void* value, size_t* size, void*, size_t) {
  if (*size != sizeof(int) || !features.count(name)) return -1;
  *static_cast<int*>(value) = 1;
  return 0;
}

#include "sets_arm.cpp"

namespace paceline {
static const Kernels none{};
const Kernels* dotprod_kernels() { return &none; }
const Kernels* i8mm_kernels() { return &none; }
bool multiplies_correctly(const Kernels&) { return true; }
}  // namespace paceline

int main(int count, char** arguments) {
  features.insert(arguments + 1, arguments + count);
  for (const paceline::InstructionSet& set : paceline::instruction_sets()) {
    if (!*set.obstacle) std::puts(set.name);
  }
}
