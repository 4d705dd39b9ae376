// A persistent pool of threads for one forward pass at a time.
#pragma once

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
  Range of_node(int items, int thread) const { return team_of(thread).share(items, threads_); }
  // Calls work(Range) for some of the node's items, which its threads share out: each takes chunks until none is left. All
  // threads of a job call it, at most once between two meetings.
  template <class Work>
  void share_out(Range items_of_node, int thread, Work work) {
    Team& team = team_of(thread);
    const Chunks chunks(items_of_node, team.last - team.first);
    for (Range chunk = chunks.at(thread - team.first); chunk.first < chunk.last; chunk = chunks.at(team.taken.fetch_add(1, std::memory_order_relaxed))) {
      work(chunk);
      if (chunks.one_each()) return;
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

 private:
  using Clock = std::chrono::steady_clock;

  // The threads of one node, or all threads.
  struct alignas(64) Team {
    int first = 0, last = 0;  // last is exclusive
    const Node* node = nullptr;
    alignas(64) std::atomic<int> taken{0};  // number of the next chunk of the items that are shared out

    Range share(int items, int threads) const { return {Share(items, first, threads).first, Share(items, last, threads).first}; }
  };

  Team& team_of(int thread) const;
  void work(int thread);
  void run_part(int thread);
  void announce();
  void stop();

  const int threads_;
  const std::vector<Node> nodes_;
  const int teams_;
  const std::unique_ptr<Team[]> team_;
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
