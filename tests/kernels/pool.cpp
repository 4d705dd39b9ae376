// The pool of threads without Python: many threads on few CPUs, shared items, a slow thread, sleep; and the exchange between
// ranks. Prints nothing if all holds. tests/kernels/test_pool.py builds it as it is, without futexes, and under sanitizers.
#include "pool.h"

#include "ranks.h"

#include <sys/resource.h>

#include <cstdio>
#include <string>

using namespace paceline;
using Clock = std::chrono::steady_clock;

namespace {

int problems = 0;

void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::printf("%s\n", what.c_str());
  ++problems;
}

double since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

std::vector<Node> nodes(int count) {
  std::vector<Node> all(static_cast<size_t>(count), Node{0, {}});
  for (Node& node : all) node.cpus.add(0);
  return all;
}

// Every item is computed once by any thread, then once by a certain one: without a lock, so that ThreadSanitizer sees a
// barrier that lets a thread through.
void share_items(int threads, int node_count, int phases) {
  Pool pool(threads, nodes(node_count));
  const int sizes[] = {1, 2, 3, 18, 48, 257};
  std::vector<int> values(257, 0);
  for (int job = 0; job < 3; ++job) {
    in_parallel(pool, [&](int thread) {
      for (int phase = 0; phase < phases; ++phase) {
        const int items = sizes[phase % 6];
        pool.share_out(items, thread, [&](Range chunk) {
          for (int i = chunk.first; i < chunk.last; ++i) ++values[static_cast<size_t>(i)];
        });
        pool.meet();
        const Share share(items, threads - 1 - thread, threads);
        for (int i = share.first; i < share.last; ++i) ++values[static_cast<size_t>(i)];
        pool.meet();
      }
    });
  }
  for (int i = 0; i < 257; ++i) {
    int expected = 0;
    for (int phase = 0; phase < phases; ++phase) expected += 6 * (i < sizes[phase % 6]);
    if (values[static_cast<size_t>(i)] == expected) continue;
    return expect(false, std::to_string(threads) + " threads on " + std::to_string(node_count) + " nodes: item " + std::to_string(i) + " was computed " +
                             std::to_string(values[static_cast<size_t>(i)]) + " times, not " + std::to_string(expected));
  }
}

double turn_with_a_slow_thread(Pool& pool, bool dynamic) {
  const auto work = [](int thread, Range items) {
    std::this_thread::sleep_for(std::chrono::milliseconds((thread == 2 ? 12 : 3) * (items.last - items.first)));
  };
  const auto began = Clock::now();
  in_parallel(pool, [&](int thread) {
    if (dynamic) pool.share_out(64, thread, [&](Range chunk) { work(thread, chunk); });
    else work(thread, Share(64, thread, 4));
  });
  return since(began);
}

// Seconds of 64 items of 3 ms on four threads, of which one takes 12 ms: shared out, or in equal shares. They sleep, so
// that this needs no CPUs; the faster of two, because a busy machine wakes them late.
double with_a_slow_thread(bool dynamic) {
  Pool pool(4, {});
  double fastest = 1e9;
  for (int turn = 0; turn < 2; ++turn) fastest = std::min(fastest, turn_with_a_slow_thread(pool, dynamic));
  return fastest;
}

// Ranks, each with a pool of its own, complete rows of which they have some columns, a few rows at a time. One rank is late.
void exchange(int ranks, int turns) {
  const std::vector<int32_t> edges = {0, 32, 32, 96, 131};  // rank 1 has none
  const int32_t count = static_cast<int32_t>(edges.size()) - 1, columns = edges.back(), rows = 7;
  const size_t floats = 3 * 64;  // of three rows
  std::vector<std::atomic<uint64_t>> memory(exchange_bytes(count, floats) / 8 + 1);
  std::atomic<int> wrong{0};
  const auto follow = [&](int32_t rank) {
    Pool pool(rank % 2 + 1, {});
    const Ranks own = {rank, count, edges.data(), edges.data(), reinterpret_cast<uint8_t*>(memory.data()), floats, 60.0f};
    Exchange exchange(own);
    std::vector<float> all(static_cast<size_t>(rows * columns));
    for (int turn = 0; turn < turns; ++turn) {
      const auto number = [&](int i) { return static_cast<float>(turn * rows * columns + i); };
      for (int i = 0; i < rows * columns; ++i) all[static_cast<size_t>(i)] = i % columns >= edges[rank] && i % columns < edges[rank + 1] ? number(i) : -1.0f;
      if (rank == 2 && turn % 16 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(4));  // the others sleep meanwhile
      in_parallel(pool, [&](int thread) { exchange.gather(pool, thread, all.data(), rows, static_cast<size_t>(columns), edges.data()); });
      for (int i = 0; i < rows * columns; ++i) wrong += all[static_cast<size_t>(i)] != number(i);
    }
  };
  std::vector<std::thread> others;
  for (int32_t rank = 1; rank < ranks; ++rank) others.emplace_back(follow, rank);
  follow(0);
  for (std::thread& other : others) other.join();
  expect(wrong == 0, std::to_string(wrong) + " numbers of " + std::to_string(ranks) + " ranks are wrong");
}

// One of three ranks never comes. The first whose patience ends, ends the exchange for both of the others: no thread is left
// waiting, and rows stay as they are.
void exchange_without_a_rank() {
  const std::vector<int32_t> edges = {0, 32, 64, 96};
  const size_t floats = 96;
  std::vector<std::atomic<uint64_t>> memory(exchange_bytes(3, floats) / 8 + 1);
  const auto began = Clock::now();
  const auto follow = [&](int32_t rank, float patience) {
    Pool pool(2, {});
    const Ranks own = {rank, 3, edges.data(), edges.data(), reinterpret_cast<uint8_t*>(memory.data()), floats, patience};
    Exchange exchange(own);
    std::vector<float> row(96, 1.0f);
    for (int turn = 0; turn < 2; ++turn) {
      in_parallel(pool, [&](int thread) { exchange.gather(pool, thread, row.data(), 1, row.size(), edges.data()); });
      expect(exchange.ended() && row == std::vector<float>(96, 1.0f), "rank " + std::to_string(rank) + " went on without another one");
    }
  };
  std::thread other(follow, 1, 600.0f);
  follow(0, 0.1f);
  other.join();
  expect(since(began) < 60, "ranks waited " + std::to_string(since(began)) + " s for one that never comes");
}

// CPU seconds of `seconds` in which a pool of eight threads has nothing to do.
double idle_cpu_seconds(double seconds) {
  Pool pool(8, {});
  in_parallel(pool, [](int) {});
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // until all sleep
  const auto used = [] {
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) + 1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
  };
  const double before = used();
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  const double cpu = used() - before;
  in_parallel(pool, [](int) {});  // sleepers wake
  return cpu;
}

}  // namespace

int main() {
  for (const int threads : {1, 2, 3, 4, 8, 9, 16, 17, 33, 64}) share_items(threads, threads % 3, 6);
  exchange(4, 100);
  exchange_without_a_rank();
  double equal = 0, dynamic = 0;
  for (int tries = 0; tries < 5 && dynamic >= 0.8 * equal; ++tries) {  // a busy machine wakes threads late
    equal = with_a_slow_thread(false);
    dynamic = with_a_slow_thread(true);
  }
  expect(dynamic < 0.8 * equal, "with one slow thread: " + std::to_string(dynamic) + " s shared out, " + std::to_string(equal) + " s in equal shares");
  const double idle = idle_cpu_seconds(0.5);
  expect(idle < 0.01, "an idle pool took " + std::to_string(idle) + " s of CPU in half a second");
  return problems ? 1 : 0;
}
