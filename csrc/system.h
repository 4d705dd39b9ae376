// What differs between operating systems: memory in huge pages, sleeping threads, the tiles' permission. Linux is tested;
// elsewhere (macOS) the same functions are made of portable parts, and nothing was ever run.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace paceline {

// Zeroed memory in huge pages where there are any; null if there is none.
void* new_huge_pages(size_t bytes);
void free_huge_pages(void* memory, size_t bytes);

// Returns when the word no longer holds this value, or earlier; wake_all is called after a change.
void sleep_while(std::atomic<uint32_t>& word, uint32_t value);
void wake_all(std::atomic<uint32_t>& word);

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
