// What differs between operating systems: memory in huge pages, sleeping threads, places of threads and pages, the tiles'
// permission. Linux is tested; macOS is compiled only; of Windows, wine runs what tests/test_platforms.py builds.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>

namespace paceline {

// Zeroed memory in huge pages where there are any; null if there is none.
void* new_huge_pages(size_t bytes);
void free_huge_pages(void* memory, size_t bytes);

// Uninitialised memory for vector registers, bytes a multiple of 64; null if there is none.
void* new_aligned(size_t bytes);
void free_aligned(void* memory);

// Returns when the word no longer holds this value, or earlier; wake_all is called after a change.
void sleep_while(std::atomic<uint32_t>& word, uint32_t value);
void wake_all(std::atomic<uint32_t>& word);

// The same for a word in memory that processes share. The sleep also ends after a while, because a process may end without a
// word.
void sleep_beside_ranks(std::atomic<uint32_t>& word, uint32_t value);
void wake_all_ranks(std::atomic<uint32_t>& word);

constexpr int kMostCpus = 1024;

struct CpuSet {
  uint64_t words[kMostCpus / 64];

  void add(int cpu) { words[cpu / 64] |= uint64_t{1} << (cpu % 64); }  // 0 <= cpu < kMostCpus
  bool has(int cpu) const { return cpu >= 0 && cpu < kMostCpus && (words[cpu / 64] >> (cpu % 64) & 1); }
};

// Keeps a thread on these CPUs; false if the system refuses.
bool pin(std::thread& thread, const CpuSet& cpus);

// Within it this thread runs on the given CPUs, if it is on another one and the system allows it; null: anywhere. Its own
// set is restored, but it stays where it is until the system moves it.
class NearCpus {
 public:
  explicit NearCpus(const CpuSet* cpus);
  ~NearCpus();
  NearCpus(const NearCpus&) = delete;
  NearCpus& operator=(const NearCpus&) = delete;

 private:
  [[maybe_unused]] CpuSet callers_{};
  [[maybe_unused]] bool moved_ = false;
};

// Places the pages from `first` to `last` on a NUMA node: those not yet touched, and each whole page nearest to the ends.
// Returns 0 or the system's error number.
int bind_pages(uint8_t* first, uint8_t* last, int node);

// Asks for permission to use AMX tiles.
bool allow_tiles();

// A hint to the CPU that this thread spins.
inline void pause_spinning() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  asm volatile("isb" ::: "memory");  // "yield" does nothing on most Arm CPUs and lets spins end too early
#endif
}

// Within it this thread rounds to nearest even and keeps denormals: bits must not depend on the caller's mode.
class DefaultFloatMode {
 public:
  DefaultFloatMode();
  ~DefaultFloatMode();
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  uint64_t callers_;
};

}  // namespace paceline
