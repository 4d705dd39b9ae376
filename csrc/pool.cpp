#include "pool.h"

#include <chrono>
#include <new>

#include "system.h"

namespace paceline {
namespace {

constexpr int kSpins = 2000;  // about 20 to 80 us, by the CPU's pause: longer than most waits at a barrier without a preemption
constexpr int kSpinsAYield = 64;
// Waking a thread takes 50 to 90 us in a virtual machine, and Python takes up to 2 ms between a round's calls.
constexpr auto kBeforeSleep = std::chrono::milliseconds(2);

bool changes(const std::atomic<uint32_t>& word, uint32_t value, int spins) {
  for (int i = 0; i < spins; ++i) {
    if (word.load(std::memory_order_acquire) != value) return true;
    pause_spinning();
  }
  return false;
}

// Returns when word no longer holds value: spins, then yields, then sleeps. Sleepers are counted, so that waking skips
// the system call when no thread sleeps.
void wait_while(std::atomic<uint32_t>& word, uint32_t value, std::atomic<int>& sleepers) {
  if (changes(word, value, kSpins)) return;
  const auto began = std::chrono::steady_clock::now();
  do {
    if (changes(word, value, kSpinsAYield)) return;
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() - began < kBeforeSleep);
  sleepers.fetch_add(1);
  while (word.load() == value) sleep_while(word, value);
  sleepers.fetch_sub(1);
}

}  // namespace

void Barrier::wait() {
  if (threads_ == 1) return;
  const uint32_t generation = generation_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < threads_) {
    wait_while(generation_, generation, sleepers_);
    return;
  }
  arrived_.store(0, std::memory_order_relaxed);
  generation_.store(generation + 1);
  if (sleepers_.load() > 0) wake_all(generation_);
}

Pool::Pool(int threads) : threads_(threads), barrier_(threads) {
  try {
    for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
  } catch (...) {  // the system starts no more
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  stopping_.store(true);
  announce();
  for (auto& worker : workers_) worker.join();
}

void Pool::announce() {
  jobs_.fetch_add(1);
  if (idle_.load() > 0) wake_all(jobs_);
}

void Pool::run(Job job, void* context) {
  std::lock_guard<std::mutex> lock(one_job_at_a_time_);
  job_ = job;
  context_ = context;
  if (threads_ > 1) announce();
  {
    const DefaultFloatMode mode;
    run_part(0);
  }
  barrier_.wait();
  if (failed_.exchange(false)) throw std::bad_alloc();
}

void Pool::run_part(int thread) {
  try {
    job_(context_, thread);
  } catch (const std::exception&) {
    failed_.store(true);
  }
}

void Pool::work(int thread) {
  const DefaultFloatMode mode;
  for (uint32_t seen = 0;; ++seen) {
    wait_while(jobs_, seen, idle_);
    if (stopping_.load()) return;
    run_part(thread);
    barrier_.wait();
  }
}

}  // namespace paceline
