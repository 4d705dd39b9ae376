// A persistent pool of threads for one forward pass at a time.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "range.h"
#include "system.h"

namespace paceline {

constexpr int kGroup = 8;  // threads that arrive at one line of a barrier, and that help each other

// A barrier in two levels: threads arrive at the line of their group of eight, and the last one of each group at a common
// line. On one line, the last of 64 threads would wait until it has moved between 63 cores (python -m benchmarks.cores).
class Barrier {
 public:
  explicit Barrier(int threads);
  // Returns true to the thread that arrives last, which must call release(). The others wait for that, and get false.
  bool arrive(int thread);
  void release();

 private:
  struct alignas(64) Group {
    int threads = 0;
    std::atomic<int> arrived{0};
    alignas(64) std::atomic<uint32_t> generation{0};
    std::atomic<int> sleepers{0};
  };

  const int groups_;
  const std::unique_ptr<Group[]> group_;
  alignas(64) std::atomic<int> arrived_{0};  // groups
};

// What is left of a thread's items: the thread takes them from the front, a quarter at a time and half of the last sixteen,
// because each time costs a small product. Others that have none left take half from the back. A thread that is slow, or
// whose core is busy, so computes fewer of them; without one, each thread reads the same weights in every pass, one after
// the other. phase: the number of times that items were shared out.
class ItemsLeft {
 public:
  // Some of `items` items, for their thread; empty if none is left. Called once in every phase at least.
  Range take(uint16_t phase, int items) {
    if (!items) word_.store(Word{phase, 0, 0}.packed(), std::memory_order_relaxed);
    return remove(phase, items, [](int left) { return left > 16 ? (left + 3) / 4 : (left + 1) / 2; }, true);
  }
  // The same for another thread.
  Range steal(uint16_t phase, int items) {
    return remove(phase, items, [](int left) { return (left + 1) / 2; }, false);
  }

 private:
  // Of the items, those that were taken from the front and from the back; none if it is of an earlier phase.
  struct Word {
    uint16_t phase;
    int front, back;

    static Word of(uint64_t packed) {
      return {static_cast<uint16_t>(packed >> 48), static_cast<int>(packed >> 24 & kMost), static_cast<int>(packed & kMost)};
    }
    uint64_t packed() const { return static_cast<uint64_t>(phase) << 48 | static_cast<uint64_t>(front) << 24 | static_cast<uint64_t>(back); }
  };
  static constexpr uint64_t kMost = (1 << 24) - 1;  // items of a thread

  template <class Size>
  Range remove(uint16_t phase, int items, Size size_of, bool front) {
    for (uint64_t seen = word_.load(std::memory_order_relaxed);;) {
      Word word = Word::of(seen);
      if (word.phase != phase) word = {phase, 0, 0};
      const int left = items - word.front - word.back, size = size_of(left);
      if (left == 0) return {0, 0};
      const Range removed = front ? Range{word.front, word.front + size} : Range{items - word.back - size, items - word.back};
      (front ? word.front : word.back) += size;
      if (word_.compare_exchange_weak(seen, word.packed(), std::memory_order_relaxed)) return removed;
    }
  }

  std::atomic<uint64_t> word_{0};
};

// Memory that is near to some CPUs.
struct Node {
  int number;  // the system's
  CpuSet cpus;
};

class Pool {
 public:
  using Job = void (*)(void* context, int thread);

  // nodes: between which the threads are divided; empty: the system places them. Throws std::system_error or
  // std::bad_alloc if the system refuses a thread.
  Pool(int threads, const std::vector<Node>& nodes);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Runs job(context, thread) on every thread, the caller's being thread 0; returns when all are done. Throws std::bad_alloc
  // if any of them threw. A job that calls meet() must not throw: the others would wait for the thread that did.
  void run(Job job, void* context);
  // Every thread of a job waits for all others.
  void meet();
  // The items of this thread's node: an equal share for each thread.
  Range of_node(int items, int thread) const { return of_team(items, team(thread)); }
  // Calls work(Range) for some of the node's items. Its threads share them out: each has an equal part, and helps those of its
  // group that have some left. All threads of a job call it, at most once between two meetings.
  template <class Work>
  void share_out(Range items_of_node, int thread, Work work) {
    const Team& team = team_of(thread);
    const int items = items_of_node.last - items_of_node.first, count = team.last - team.first;
    const auto part = [&](int of) { return Share(items, of - team.first, count); };
    const auto compute = [&](int of, Range some) {  // numbers within a thread's part
      const int first = items_of_node.first + part(of).first;
      work(Range{first + some.first, first + some.last});
    };
    Worker& own = worker_[thread];
    const uint16_t phase = ++own.phase;
    const auto left_to = [&](int of) { return part(of).last - part(of).first; };
    for (Range some; !(some = own.left.take(phase, left_to(thread))).empty();) compute(thread, some);
    const int first = std::max(team.first, thread / kGroup * kGroup), last = std::min(team.last, (thread / kGroup + 1) * kGroup);
    for (int other = next(thread, first, last); other != thread;) {
      const Range some = worker_[other].left.steal(phase, left_to(other));
      if (some.empty()) other = next(other, first, last);
      else compute(other, some);
    }
  }
  // The same for items that all nodes share.
  template <class Work>
  void share_out(int items, int thread, Work work) {
    share_out(of_node(items, thread), thread, work);
  }
  // Places the pages of items, one behind the other, on the nodes whose threads share them out. Returns 0 or the system's
  // error number; without nodes there is nothing to do.
  int place(uint8_t* memory, int items, size_t item_bytes) const;
  int threads() const { return threads_; }
  // Nodes between which the threads are divided, at least 1; and that of a thread.
  int teams() const { return teams_; }
  int team(int thread) const { return static_cast<int>(&team_of(thread) - team_.get()); }
  Range of_team(int items, int team) const { return team_[static_cast<size_t>(team)].share(items, threads_); }

 private:
  using Clock = std::chrono::steady_clock;

  // The threads of one node, or all threads.
  struct Team {
    int first = 0, last = 0;  // last is exclusive
    const Node* node = nullptr;

    Range share(int items, int threads) const { return {Share(items, first, threads).first, Share(items, last, threads).first}; }
  };

  // A line of its own for each thread.
  struct alignas(64) Worker {
    ItemsLeft left;
    uint16_t phase = 0;  // of its thread
  };

  static int next(int thread, int first, int last) { return thread + 1 < last ? thread + 1 : first; }
  const Team& team_of(int thread) const;
  void work(int thread);
  void run_part(int thread);
  void announce();
  void stop();

  const int threads_;
  const std::vector<Node> nodes_;
  const int teams_;
  const std::unique_ptr<Team[]> team_;
  const std::unique_ptr<Worker[]> worker_;
  Barrier barrier_;
  std::mutex one_job_at_a_time_;
  Job job_ = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> jobs_{0};
  std::atomic<int> idle_{0};
  std::atomic<bool> stopping_{false}, failed_{false};
  std::vector<std::thread> workers_;
};

// Calls work(thread) on every thread.
template <class Work>
void in_parallel(Pool& pool, Work work) {
  pool.run([](void* context, int thread) { (*static_cast<Work*>(context))(thread); }, &work);
}

}  // namespace paceline
