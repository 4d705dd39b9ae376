#include "system.h"

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <malloc.h>
#include <windows.h>
#else
#include <sys/mman.h>
#endif

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>

#include "old_glibc.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {
namespace {

constexpr size_t kHuge = size_t{2} << 20;

size_t whole_pages(size_t bytes) { return (bytes + kHuge - 1) / kHuge * kHuge; }

}  // namespace

#if defined(_WIN32)

// Ordinary pages: large ones need a privilege that users do not have. The system gives zeros, 64 KiB aligned.
void* new_huge_pages(size_t bytes) { return VirtualAlloc(nullptr, whole_pages(bytes), MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE); }
void free_huge_pages(void* memory, size_t) { VirtualFree(memory, 0, MEM_RELEASE); }
void* new_aligned(size_t bytes) { return _aligned_malloc(bytes, 64); }
void free_aligned(void* memory) { _aligned_free(memory); }

#else

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
void* new_aligned(size_t bytes) { return std::aligned_alloc(64, bytes); }
void free_aligned(void* memory) { std::free(memory); }

#endif

#if defined(__linux__) && !defined(PL_WITHOUT_FUTEX)

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}
void sleep_beside_ranks(std::atomic<uint32_t>& word, uint32_t value) {
  const timespec most = {0, 50'000'000};  // 50 ms
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &most, nullptr, 0);
}
void wake_all_ranks(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

#else

namespace {

// Where all threads sleep, whatever word they wait for. Never destroyed: threads may sleep when the process ends.
struct Bed {
  std::mutex lock;
  std::condition_variable changed;
};

Bed& bed() {
  static Bed* const only = new Bed;
  return *only;
}

}  // namespace

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  std::unique_lock<std::mutex> lock(bed().lock);
  bed().changed.wait(lock, [&] { return word.load() != value; });
}
void wake_all(std::atomic<uint32_t>&) {
  { const std::lock_guard<std::mutex> after_their_last_look(bed().lock); }
  bed().changed.notify_all();
}
void sleep_beside_ranks(std::atomic<uint32_t>&, uint32_t) { std::this_thread::sleep_for(std::chrono::microseconds(100)); }
void wake_all_ranks(std::atomic<uint32_t>&) {}  // they do not sleep for long

#endif

#if defined(__linux__)

namespace {

cpu_set_t system_set(const CpuSet& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int cpu = 0; cpu < kMostCpus && cpu < CPU_SETSIZE; ++cpu) if (cpus.has(cpu)) CPU_SET(cpu, &set);
  return set;
}

}  // namespace

bool pin(std::thread& thread, const CpuSet& cpus) {
  const cpu_set_t set = system_set(cpus);
  return pthread_setaffinity_np(thread.native_handle(), sizeof set, &set) == 0;
}

NearCpus::NearCpus(const CpuSet* cpus) {
  if (!cpus || cpus->has(sched_getcpu())) return;
  const cpu_set_t set = system_set(*cpus);
  cpu_set_t own;
  if (sched_getaffinity(0, sizeof own, &own) != 0) return;
  for (int cpu = 0; cpu < kMostCpus; ++cpu) callers_.words[cpu / 64] |= uint64_t{CPU_ISSET(cpu, &own) != 0} << (cpu % 64);
  moved_ = sched_setaffinity(0, sizeof set, &set) == 0;
}

NearCpus::~NearCpus() {
  if (!moved_) return;
  const cpu_set_t own = system_set(callers_);
  sched_setaffinity(0, sizeof own, &own);
}

int bind_pages(uint8_t* first, uint8_t* last, int node) {
  constexpr int kPreferred = 1, kNodes = 1024;  // MPOL_PREFERRED: a full node is no reason to fail
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto nearest = [&](uint8_t* at) { return (reinterpret_cast<uintptr_t>(at) + page / 2) / page * page; };
  const uintptr_t start = nearest(first), end = nearest(last);
  if (node < 0 || node >= kNodes) return EINVAL;
  if (start == end) return 0;
  unsigned long mask[kNodes / (8 * sizeof(unsigned long))] = {};
  mask[static_cast<size_t>(node) / (8 * sizeof(unsigned long))] = 1UL << (static_cast<size_t>(node) % (8 * sizeof(unsigned long)));
  return syscall(SYS_mbind, start, end - start, kPreferred, mask, kNodes + 1UL, 0) == 0 ? 0 : errno;
}

#else

bool pin(std::thread&, const CpuSet&) { return false; }
NearCpus::NearCpus(const CpuSet*) {}
NearCpus::~NearCpus() {}
int bind_pages(uint8_t*, uint8_t*, int) { return ENOSYS; }

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
