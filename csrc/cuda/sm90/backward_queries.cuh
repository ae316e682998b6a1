// sm90/backward_queries.cuh: the warpgroup of dQ: dS K of every block of rows, added to fp32 sums in global memory straight from the
// accumulators, in their own order (common/scratch.h), 512 contiguous bytes per warp and instruction.
// Tried: dS as A operand in registers (ldmatrix; products of 32 columns at dim 256, 24 at 128): 0, -3 to -12 %. The next 32 columns under
// way while these are added, dim 256: -1 to -2 %. Pauses between additions: -2 to -8 %.
#pragma once
#include "cuda/sm90/backward_order.cuh"
#include "cuda/sm90/backward_worker.cuh"

namespace flash::sm90 {

template <class C>
struct QueryGradients : BackwardWorker<C> {
  using Worker = BackwardWorker<C>;
  using T = typename C::T;
  using Worker::barriers, Worker::base, Worker::key, Worker::lane, Worker::p, Worker::release, Worker::score_slot, Worker::slot,
      Worker::warp;
  static constexpr int kGroup = 128;  // floats of 16 rows x 8 columns

  float sum[32];  // [64 rows, 64 columns]
  Ring<C::kTurnStages> turn;

  // This warpgroup has uniform registers enough at every dim: causal, 1 to 2 % at dim 128.
  const uint32_t shared = held(base);
  const bool whole = held(p.column_groups == C::kDim / 8);  // all panels have all their columns

  using Worker::Worker;

  // 64 rows x 64 columns, 16 kSteps keys.
  template <int kSteps>
  __device__ __forceinline__ void multiply(uint64_t scores, uint64_t keys) {
    ptx::fence_products();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (i == 0) {
        ptx::multiply_transposed_async<T, 0>(sum, scores, keys);
      } else {
        ptx::multiply_transposed_async<T, 1>(sum, scores + i * 128, keys + i * 128);
      }
    }
    ptx::commit_products();
    ptx::wait_products<0>();
  }

  // Adds panel `panel` in `sum`, or what exists of it, to the sums at `to`.
  __device__ __forceinline__ void add_panel(float* to, int panel) const {
    const auto add = [&](int i) {
      ptx::reduce_add_4(to + (panel * 8 + i) * kGroup, sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
    };
    if (whole) {
#pragma unroll
      for (int i = 0; i < 8; ++i) add(i);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (panel * 8 + i < p.column_groups) add(i);
    }
  }

  // dQ of one block of rows from 16 kSteps keys that start `offset` bytes into panels of keys, which begin at keys_at. rows: of this
  // warp's first on, that exist; their sums are at `to`.
  template <int kSteps>
  __device__ __forceinline__ void add(uint32_t keys_at, uint32_t offset, int rows, float* to) {
    const uint64_t scores = ptx::describe_matrix(shared + C::kScoreAt + score_slot.stage * C::kScoreBytes + offset, 16, 1024);
    const uint64_t keys = ptx::describe_matrix(keys_at + offset, C::kKeyPanel, 1024);
#pragma unroll
    for (int part = 0; part < C::kRows / 64; ++part) {
#pragma unroll
      for (int panel = 0; panel < C::kPanels; ++panel) {
        multiply<kSteps>(scores + part * (C::kKeyPanel / 16), keys + panel * (C::kKeyPanel / 16));
        if (part == C::kRows / 64 - 1 && panel == C::kPanels - 1) release(barriers.score_empty(score_slot.stage));
        if (part * 64 < rows) add_panel(to, panel);
      }
      to = ptx::advance(to, 4 * p.column_groups * kGroup * 4);
    }
    score_slot.next();
  }

  template <class V>
  static __device__ __forceinline__ V held(V x) {
    return C::kUniform ? x : ptx::uniform(x);
  }
  static __device__ __forceinline__ Steps uniform(const Steps& x) { return {ptx::uniform(x.first), ptx::uniform(x.last)}; }

  __device__ __forceinline__ void ignore() {
    release(barriers.score_empty(score_slot.stage));
    score_slot.next();
  }

  __device__ __forceinline__ void run() {
    BackwardSlot tile;
    while (this->fetch(tile)) {
      const uint4 place = ptx::load_shared_16(tile.place()), sequence = ptx::load_shared_16(tile.sequence());
      const int rows = static_cast<int>(sequence.x), keys = static_cast<int>(sequence.y), begin = static_cast<int>(place.x);
      const int first = ptx::uniform(static_cast<int>(place.z)), last = ptx::uniform(static_cast<int>(place.w));
      int block = ptx::load_shared_volatile(tile.source() + 12) + static_cast<int>(place.y) * p.group * p.head_blocks;
      if (p.cleared != nullptr) ptx::wait(barriers.cleared(slot.stage_before()), slot.parity_before());
      this->release_work(tile);
      const Steps low = uniform(viewers<C::kRows>(p, rows, keys, begin, begin + 64));
      const Steps high = C::kWide ? low : uniform(viewers<C::kRows>(p, rows, keys, begin + 64, begin + 128));
      ptx::wait(barriers.key_full(key.stage), key.parity);
#pragma unroll 1
      for (int head = 0; head < p.group; ++head, block += p.head_blocks) {
        float* to =
            p.dquery + static_cast<int64_t>(block + first * (C::kRows / 16) + warp) * (p.column_groups * kGroup) + lane * 4;
        int end = first - 1;  // of a turn
#pragma unroll 1
        for (int m = first; m <= last; ++m) {
          if constexpr (C::kTurns) {
            if (m > end) {
              ptx::wait(barriers.turn(turn.stage), turn.parity);
              end = end_of_turn(p, m, last);
            }
          }
          // Per block: over all of them, the descriptors would need more uniform registers than there are.
          const uint32_t keys_at = held(shared + C::kKeyAt + key.stage * C::kKeyBytes);
          ptx::wait(barriers.score_full(score_slot.stage), score_slot.parity);
          const int left = rows - m * C::kRows - warp * 16;
          const bool in_low = low.contains(m), in_high = high.contains(m);
          if (p.dquery == nullptr || !(in_low || in_high)) {
            ignore();
          } else if (C::kWide) {
            add<4>(keys_at, 0, left, to);
          } else if (in_low && in_high) {
            add<8>(keys_at, 0, left, to);
          } else {
            add<4>(keys_at, in_low ? 0 : 64 * 128, left, to);
          }
          if constexpr (C::kTurns) {
            if (m == end) {
              ptx::arrive(barriers.added(turn.stage));
              turn.next();
            }
          }
          to = ptx::advance(to, C::kRows / 16 * p.column_groups * kGroup * 4);
        }
      }
      release(barriers.key_empty(key.stage));
      key.next();
      if (C::kTells && !C::kTurns && p.finished != nullptr) ptx::arrive(barriers.summed(slot.stage_before()));
    }
  }
};

}  // namespace flash::sm90
