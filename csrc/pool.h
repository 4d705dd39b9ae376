// A persistent pool of threads for one forward pass at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace paceline {

// A barrier: threads spin (phases of a forward pass take microseconds), then yield, then sleep.
class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}
  void wait();

 private:
  const int threads_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  std::atomic<int> sleepers_{0};
};

class Pool {
 public:
  using Job = void (*)(void* context, int thread);

  explicit Pool(int threads);  // throws std::system_error or std::bad_alloc if the system refuses a thread
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Runs job(context, thread) on every thread, the caller's being thread 0; returns when all are done. Throws std::bad_alloc
  // if any of them threw. A job that calls meet() must not throw: the others would wait for the thread that did.
  void run(Job job, void* context);
  void meet() { barrier_.wait(); }
  int threads() const { return threads_; }

 private:
  void work(int thread);
  void run_part(int thread);
  void announce();
  void stop();

  const int threads_;
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
