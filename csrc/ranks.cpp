#include "ranks.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "exports.h"

namespace paceline {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSpins = 2000;
constexpr auto kBeforeSleep = std::chrono::milliseconds(2);

void copy_columns(const float* from, size_t from_stride, float* to, size_t to_stride, Range rows, size_t columns) {
  for (int i = rows.first; i < rows.last; ++i) {
    std::memcpy(to + to_stride * static_cast<size_t>(i), from + from_stride * static_cast<size_t>(i), sizeof(float) * columns);
  }
}

}  // namespace

// Where a rank writes a part. There are two places: other ranks may still read part n - 1 while part n is written. They have
// read part n - 2, which it overwrites, because a rank begins part n only after all others have published n - 1.
float* Exchange::numbers(int rank, uint32_t part) const {
  const size_t place = static_cast<size_t>(2 * rank) + part % 2;
  return reinterpret_cast<float*>(ranks_.memory + kLine * static_cast<size_t>(1 + ranks_.count)) + place * static_cast<size_t>(ranks_.floats);
}

void Exchange::publish(uint32_t part) {
  Published& own = of(ranks_.rank);
  own.part.store(part);
  if (own.sleepers.load() > 0) wake_all_ranks(own.part);
}

void Exchange::wait_for(int rank, uint32_t part) const {
  Published& other = of(rank);
  const auto is_there = [&] { return static_cast<int32_t>(other.part.load(std::memory_order_acquire) - part) >= 0; };
  for (int i = 0; i < kSpins; ++i) {
    if (is_there()) return;
    pause_spinning();
  }
  const auto began = Clock::now();
  while (!is_there() && !ended()) {
    const auto waited = Clock::now() - began;
    if (waited < kBeforeSleep) {
      std::this_thread::yield();
      continue;
    }
    if (waited > std::chrono::duration<float>(ranks_.patience)) end().store(1);
    other.sleepers.fetch_add(1);
    const uint32_t seen = other.part.load();
    if (static_cast<int32_t>(seen - part) < 0) sleep_beside_ranks(other.part, seen);
    other.sleepers.fetch_sub(1);
  }
}

void Exchange::gather(Pool& pool, int thread, float* rows, int count, size_t stride, const int32_t* edges, bool leader_only) {
  const auto columns = [&](int rank) { return static_cast<size_t>(edges[rank + 1] - edges[rank]); };
  size_t widest = 1;
  for (int rank = 0; rank < ranks_.count; ++rank) widest = std::max(widest, columns(rank));
  const int most = std::max(1, static_cast<int>(std::min<int64_t>(count, ranks_.floats / static_cast<int64_t>(widest))));
  for (int first = 0; first < count; first += most) {
    float* from = rows + stride * static_cast<size_t>(first);
    const Range share = Share(std::min(most, count - first), thread, pool.threads());
    const uint32_t part = part_ + 1;
    copy_columns(from + edges[ranks_.rank], stride, numbers(ranks_.rank, part), columns(ranks_.rank), share, columns(ranks_.rank));
    pool.meet();
    if (thread == 0) {
      part_ = part;
      publish(part);
    }
    for (int rank = 0; rank < ranks_.count; ++rank) {
      if (rank == ranks_.rank) continue;
      wait_for(rank, part);
      if (ended() || (leader_only && ranks_.rank != 0)) continue;
      copy_columns(numbers(rank, part), columns(rank), from + edges[rank], stride, share, columns(rank));
    }
    pool.meet();
  }
}

}  // namespace paceline

using namespace paceline;

PL_EXPORT size_t pl_exchange_bytes(int ranks, size_t floats) { return exchange_bytes(ranks, floats); }
