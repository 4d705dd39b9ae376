#include "pool.h"

#include <algorithm>
#include <new>
#include <system_error>

namespace paceline {
namespace {

constexpr int kGroup = 8;     // threads that arrive at one line
constexpr int kSpins = 2000;  // about 20 to 80 us, by the CPU's pause: longer than most waits at a barrier without a preemption
constexpr int kSpinsAYield = 64;
// Waking a thread takes 50 to 90 us in a virtual machine, and Python takes up to 2 ms between a round's calls.
constexpr auto kBeforeSleep = std::chrono::milliseconds(2);

thread_local int number = 0;  // of this thread in its pool; a caller is thread 0 of any pool

bool changes(const std::atomic<uint32_t>& word, uint32_t value, int spins) {
  for (int i = 0; i < spins; ++i) {
    if (word.load(std::memory_order_acquire) != value) return true;
    pause_spinning();
  }
  return false;
}

// Returns when word no longer holds value: spins, then yields, then sleeps. Sleepers are counted, so that waking skips
// the system call when no thread sleeps.
void wait_while(std::atomic<uint32_t>& word, uint32_t value, std::atomic<int>& sleepers, std::chrono::steady_clock::duration before_sleep) {
  if (changes(word, value, kSpins)) return;
  const auto began = std::chrono::steady_clock::now();
  do {
    if (changes(word, value, kSpinsAYield)) return;
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() - began < before_sleep);
  sleepers.fetch_add(1);
  while (word.load() == value) sleep_while(word, value);
  sleepers.fetch_sub(1);
}

}  // namespace

Barrier::Barrier(int threads) : groups_((threads + kGroup - 1) / kGroup), group_(std::make_unique<Group[]>(static_cast<size_t>(groups_))) {
  for (int thread = 0; thread < threads; ++thread) ++group_[static_cast<size_t>(thread / kGroup)].threads;
}

bool Barrier::arrive(int thread) {
  Group& group = group_[static_cast<size_t>(thread / kGroup)];
  const uint32_t generation = group.generation.load(std::memory_order_relaxed);
  if (group.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == group.threads) {
    group.arrived.store(0, std::memory_order_relaxed);
    if (groups_ == 1 || arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == groups_) return true;
  }
  wait_while(group.generation, generation, group.sleepers, kBeforeSleep);
  return false;
}

void Barrier::release() {
  arrived_.store(0, std::memory_order_relaxed);
  const uint32_t next = group_[0].generation.load(std::memory_order_relaxed) + 1;
  for (Group* group = group_.get(); group < group_.get() + groups_; ++group) {
    group->generation.store(next);
    if (group->sleepers.load() > 0) wake_all(group->generation);
  }
}

Pool::Pool(int threads, const std::vector<Node>& nodes)
    : threads_(threads),
      nodes_(nodes),
      teams_(std::clamp(static_cast<int>(nodes.size()), 1, threads)),
      team_(std::make_unique<Team[]>(static_cast<size_t>(teams_))),
      barrier_(threads) {
  for (int t = 0; t < teams_; ++t) {
    const Share share(threads, t, teams_);
    Team& team = team_[static_cast<size_t>(t)];
    team.first = share.first;
    team.last = share.last;
    team.node = nodes_.empty() ? nullptr : &nodes_[static_cast<size_t>(t)];
    team.taken.store(share.last - share.first);
  }
  try {
    for (int thread = 1; thread < threads; ++thread) {
      workers_.emplace_back([this, thread] { work(thread); });
      const Node* node = team_of(thread).node;
      if (node && !pin(workers_.back(), node->cpus)) throw std::system_error(std::make_error_code(std::errc::invalid_argument));
    }
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

Pool::Team& Pool::team_of(int thread) const {
  Team* team = team_.get();
  while (thread >= team->last) ++team;
  return *team;
}

void Pool::run(Job job, void* context) {
  std::lock_guard<std::mutex> lock(one_job_at_a_time_);
  job_ = job;
  context_ = context;
  if (threads_ > 1) announce();
  {
    const DefaultFloatMode mode;
    const NearCpus near(team_[0].node ? &team_[0].node->cpus : nullptr);
    run_part(0);
  }
  meet();
  if (failed_.exchange(false)) throw std::bad_alloc();
}

void Pool::meet() {
  if (!barrier_.arrive(number)) return;
  for (Team* team = team_.get(); team < team_.get() + teams_; ++team) team->taken.store(team->last - team->first, std::memory_order_relaxed);
  barrier_.release();
}

void Pool::run_part(int thread) {
  try {
    job_(context_, thread);
  } catch (const std::exception&) {
    failed_.store(true);
  }
}

// Spins for the next job, because Python often follows with one soon, but for no longer than it worked before: where Python is
// the slow part, it sleeps most of the time.
void Pool::work(int thread) {
  const DefaultFloatMode mode;
  number = thread;
  Clock::duration credit{0};
  auto ended = Clock::now();
  for (uint32_t seen = 0;; ++seen) {
    wait_while(jobs_, seen, idle_, credit);
    if (stopping_.load()) return;
    const auto began = Clock::now();
    credit = std::max(credit - (began - ended), Clock::duration{0});
    run_part(thread);
    meet();
    ended = Clock::now();
    credit = std::min<Clock::duration>(credit + (ended - began), kBeforeSleep);
  }
}

int Pool::place(uint8_t* memory, int items, size_t item_bytes) const {
  for (const Team* team = team_.get(); team->node && team < team_.get() + teams_; ++team) {
    const Range share = team->share(items, threads_);
    const int error = bind_pages(memory + item_bytes * static_cast<size_t>(share.first), memory + item_bytes * static_cast<size_t>(share.last), team->node->number);
    if (error) return error;
  }
  return 0;
}

}  // namespace paceline
