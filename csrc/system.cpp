#include "system.h"

#include <sys/mman.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <chrono>
#include <thread>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {
namespace {

constexpr size_t kHuge = size_t{2} << 20;

size_t whole_pages(size_t bytes) { return (bytes + kHuge - 1) / kHuge * kHuge; }

}  // namespace

void* new_huge_pages(size_t bytes) {
  bytes = whole_pages(bytes);
  uint8_t* raw = static_cast<uint8_t*>(mmap(nullptr, bytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (raw == MAP_FAILED) return nullptr;
  const size_t skip = (kHuge - reinterpret_cast<uintptr_t>(raw) % kHuge) % kHuge;
  if (skip) munmap(raw, skip);
  if (kHuge - skip) munmap(raw + skip + bytes, kHuge - skip);
#if defined(MADV_HUGEPAGE)
  madvise(raw + skip, bytes, MADV_HUGEPAGE);
#endif
  return raw + skip;
}

void free_huge_pages(void* memory, size_t bytes) { munmap(memory, whole_pages(bytes)); }

#if defined(__linux__)

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

#else

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  if (word.load() == value) std::this_thread::sleep_for(std::chrono::microseconds(100));
}
void wake_all(std::atomic<uint32_t>&) {}  // sleepers look again by themselves

#endif

bool allow_tiles() {
#if defined(__linux__) && defined(__x86_64__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM; the state's component
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

#if defined(__x86_64__)

DefaultFloatMode::DefaultFloatMode() : callers_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
DefaultFloatMode::~DefaultFloatMode() { _mm_setcsr(static_cast<unsigned>(callers_)); }

#else

DefaultFloatMode::DefaultFloatMode() {
  asm volatile("mrs %0, fpcr" : "=r"(callers_));
  asm volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
}
DefaultFloatMode::~DefaultFloatMode() { asm volatile("msr fpcr, %0" ::"r"(callers_)); }

#endif

}  // namespace paceline
