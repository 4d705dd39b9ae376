// Loads the compiled kernels without Python: library PATH SET ... Prints the hashes of their sources and of
// their interface, and the sets that multiply correctly. Returns 1 if the library does not load, 2 if it lacks a function.
// tests/test_install.py runs it under qemu with the library of a wheel for 64-bit Arm.
#include <dlfcn.h>

#include <cstdio>

namespace {

template <class Function>
Function* named(void* library, const char* name) {
  return reinterpret_cast<Function*>(dlsym(library, name));
}

}  // namespace

int main(int count, char** arguments) {
  void* library = count > 1 ? dlopen(arguments[1], RTLD_NOW) : nullptr;
  if (!library) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  auto* hash = named<const char*()>(library, "pl_source_hash");
  auto* interface = named<const char*()>(library, "pl_interface");
  auto* kernels = named<const void*(const char*)>(library, "pl_kernels");
  auto* multiplies = named<int(const void*)>(library, "pl_multiplies_correctly");
  if (!hash || !interface || !kernels || !multiplies) return 2;
  std::printf("%s\n%s\n", hash(), interface());
  for (int i = 2; i < count; ++i) {
    const void* set = kernels(arguments[i]);
    if (set && multiplies(set)) std::printf("%s\n", arguments[i]);
  }
  return 0;
}
