// The exchange of activations between the ranks of one model: processes of one machine.
//
// Every rank has some outputs of each matrix and some heads of attention, and computes them as one process would. Nothing is
// summed over ranks: before a product they copy each other's columns, so its inputs and its bits are one process's.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "pool.h"

namespace paceline {

// One rank of a divided model.
struct Ranks {
  int32_t rank, count;
  const int32_t* hidden;  // [count + 1]: rank i computes the columns hidden[i] .. hidden[i + 1] - 1 of the hidden states
  const int32_t* tokens;  // [count + 1]: and these logits; all edges but the last are multiples of kPanel
  uint8_t* memory;        // [exchange_bytes], mapped by all ranks, at first zeros
  int64_t floats;         // that a rank writes before others read them; at least one row's
  float patience;         // seconds to wait for another rank in a pass; Python notices one that has died before that
};

constexpr size_t kLine = 64;

// Bytes that the ranks exchange numbers in: a line for the end, one for each rank, and twice `floats` numbers of each.
inline size_t exchange_bytes(int ranks, size_t floats) {
  return kLine * static_cast<size_t>(1 + ranks) + 2 * static_cast<size_t>(ranks) * floats * sizeof(float);
}

// A rank's end of the exchange. All ranks must gather the same numbers of rows and columns, in the same order.
class Exchange {
 public:
  explicit Exchange(const Ranks& ranks) : ranks_(ranks) {}

  // Completes rows of which each rank i has the columns edges[i] .. edges[i + 1] - 1. All threads of a job call it after they
  // have met, and have met when it returns. If the ranks were ended, the rows stay as they are.
  // leader_only: whether only rank 0 needs the rows.
  void gather(Pool& pool, int thread, float* rows, int count, size_t stride, const int32_t* edges, bool leader_only = false);
  bool ended() const { return end().load(std::memory_order_relaxed) != 0; }

 private:
  // The last part that a rank has written, by number.
  struct Published {
    std::atomic<uint32_t> part;
    std::atomic<int32_t> sleepers;
  };

  std::atomic<uint32_t>& end() const { return *reinterpret_cast<std::atomic<uint32_t>*>(ranks_.memory); }
  Published& of(int rank) const { return *reinterpret_cast<Published*>(ranks_.memory + kLine * static_cast<size_t>(1 + rank)); }
  float* numbers(int rank, uint32_t part) const;
  void publish(uint32_t part);
  void wait_for(int rank, uint32_t part) const;

  const Ranks& ranks_;
  uint32_t part_ = 0;  // the last one that this rank has written
};

}  // namespace paceline
