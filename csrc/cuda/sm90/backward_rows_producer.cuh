// sm90/backward_rows_producer.cuh: the producer of dQ by itself: one thread that claims tiles and feeds Q, dO, K and V by TMA.
#pragma once
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/sm90/backward_rows_config.cuh"
#include "cuda/sm90/panels.cuh"
#include "cuda/sm90/ring.cuh"

namespace flash::sm90 {

template <class C>
struct RowProducer {
  const RowArguments& p;
  uint32_t base;
  RowBarriers<C> barriers;
  Ring<C::kKeyStages> key;
  Ring<C::kValueStages> value;
  Ring<C::kSlots> slot;
  Ring<1> rows;

  template <uint32_t kPanelBytes>
  __device__ __forceinline__ void load(uint32_t to, const CUtensorMap* map, uint32_t full, int row, int head, int sequence) {
    const int wrap = p.cu_seqlens_q != nullptr ? kWrap : 0;
    load_panels<C::kPanels>(to, kPanelBytes, map, full, row, head, sequence, wrap);
  }

  __device__ __forceinline__ void feed(Slot tile) {
    const uint4 place = ptx::load_shared_16(tile.place()), sequence = ptx::load_shared_16(tile.sequence()),
                source = ptx::load_shared_16(tile.source());
    const int head = static_cast<int>(place.y), row = static_cast<int>(sequence.z + place.x);
    ptx::wait(barriers.rows_empty(), rows.parity ^ 1);
    ptx::arrive_expecting(barriers.rows_full(), 2 * C::kRowBytes);
    load<C::kRowPanel>(base + C::kQueryAt, &p.query, barriers.rows_full(), row, head, static_cast<int>(sequence.w));
    load<C::kRowPanel>(base + C::kGradientAt, &p.gradient, barriers.rows_full(), row, head, static_cast<int>(sequence.w));
    rows.next();
    const int first = static_cast<int>(place.z);
#pragma unroll 1
    for (int block = static_cast<int>(place.w); block >= first; --block) {
      const int from = static_cast<int>(source.y) + block * C::kKeys, kv_head = static_cast<int>(source.x);
      ptx::wait(barriers.key_empty(key.stage), key.parity ^ 1);
      ptx::arrive_expecting(barriers.key_full(key.stage), C::kKeyBytes);
      load<C::kKeyPanel>(base + C::kKeyAt + key.stage * C::kKeyBytes, &p.key, barriers.key_full(key.stage), from, kv_head,
                         static_cast<int>(source.z));
      key.next();
      ptx::wait(barriers.value_empty(value.stage), value.parity ^ 1);
      ptx::arrive_expecting(barriers.value_full(value.stage), C::kKeyBytes);
      load<C::kKeyPanel>(base + C::kValueAt + value.stage * C::kKeyBytes, &p.value, barriers.value_full(value.stage), from,
                         kv_head, static_cast<int>(source.z));
      value.next();
    }
  }

  __device__ __forceinline__ void run() {
    int claimed = -1;
    if (!p.after_keys) ptx::wait_kernel_before();
    while (true) {
      const Slot to{base + C::kWorkAt + C::kWorkBytes * slot.stage};
      ptx::wait(barriers.work_empty(slot.stage), slot.parity ^ 1);
      do {
        claimed = claimed < 0 ? blockIdx.x : static_cast<int>(atomicAdd(p.counter, 1u)) + gridDim.x;
      } while (claimed < p.tiles && !decode<C::kRows, C::kKeys>(p, claimed, to));
      ptx::store_shared(to.kind(), static_cast<uint32_t>(claimed < p.tiles ? Kind::kTile : Kind::kEnd));
      ptx::arrive(barriers.work_full(slot.stage));
      slot.next();
      if (claimed >= p.tiles) break;
      feed(to);
    }
    ptx::wait_kernel_before();  // what follows this kernel finds all gradients
    __threadfence();
    if (atomicAdd(p.counter + 1, 1u) == gridDim.x - 1) p.counter[0] = p.counter[1] = 0;
  }
};

}  // namespace flash::sm90
