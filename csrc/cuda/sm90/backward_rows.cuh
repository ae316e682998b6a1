// sm90/backward_rows.cuh: dQ by itself, where it must be deterministic: a block owns some rows of one head at a time and walks over the
// keys they see, newest first, so every sum has one order. Two or three warpgroups compute, 64 rows each; one thread feeds (TMA).
//   S = Q K^T, dP = dO V^T; P = 2^(c S - lse2), dS = P (dP - delta), an A operand as it comes; dQ += dS K
// Products under way while a warpgroup does arithmetic:
//   issue  S(j-1) | dP(j-1) | dQ += dS(j) K    wait S: P under dP;    wait dP: dS under dQ;    wait dQ, pack dS
#pragma once
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/backward_rows_config.cuh"
#include "cuda/sm90/backward_rows_producer.cuh"
#include "cuda/sm90/backward_work.cuh"
#include "cuda/sm90/forward_softmax.cuh"
#include "cuda/sm90/key_walk.cuh"
#include "cuda/sm90/panels.cuh"
#include "cuda/sm90/ring.cuh"

namespace flash::sm90 {

template <class C>
struct RowGradients {
  using T = typename C::T;
  const RowArguments& p;
  const uint32_t base;
  const RowBarriers<C> barriers;
  const int group;  // warpgroup
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  Ring<C::kKeyStages> key;
  Ring<C::kValueStages> value;
  Ring<C::kSlots> slot;
  Ring<1> rows;
  float score[C::kKeys / 2], gradient[C::kKeys / 2];                             // [64 rows, keys]: S, P; dP, dS
  uint32_t operand[C::kKeys / 16][4];                                            // dS as A operands
  float sum[C::kDim / 128 == 2 ? 2 : 1][C::kDim / 128 == 2 ? 64 : C::kDim / 2];  // [64 rows, dim]
  float lse2[2], delta[2];                                                       // of this lane's rows
  int row, keys;  // this lane's first row on the axis of keys; keys of the sequence

  __device__ __forceinline__ RowGradients(const RowArguments& p, uint32_t base, int group)
      : p(p), base(ptx::uniform(base)), barriers{this->base + C::kBarriersAt}, group(group) {}

  __device__ __forceinline__ void release(uint32_t barrier) {
    if (lane == 0) ptx::arrive(barrier);
  }

  // to [64 rows, keys] = a b^T, as one batch.
  __device__ __forceinline__ void multiply(float (&to)[C::kKeys / 2], uint64_t a, uint64_t b) const {
    multiply_panels<T, C::kDim, C::kRowPanel, C::kKeyPanel>(to, a, b);
    ptx::commit_products();
  }
  // S and dP of the current stages, two batches.
  __device__ __forceinline__ void multiply_both() {
    // `zero` keeps ptxas from holding the descriptors of all steps, more than there are uniform registers.
    const uint32_t zero = C::kDim > 64 ? ptx::uniform(ptx::opaque_zero()) : 0;
    const uint32_t rows_at = base + group * 64 * 128 + zero;
    const uint32_t values_at = base + C::kValueAt + (C::kValueStages > 1 ? value.stage * C::kKeyBytes : zero);
    multiply(score, ptx::describe_matrix(rows_at + C::kQueryAt, 16, 1024),
             ptx::describe_matrix(base + C::kKeyAt + key.stage * C::kKeyBytes, 16, 1024));
    multiply(gradient, ptx::describe_matrix(rows_at + C::kGradientAt, 16, 1024), ptx::describe_matrix(values_at, 16, 1024));
  }
  // sum += dS K of a stage, one batch.
  __device__ __forceinline__ void accumulate(uint32_t stage) {
    const uint64_t b = ptx::describe_matrix(base + C::kKeyAt + stage * C::kKeyBytes, C::kKeyPanel, 1024);
#pragma unroll
    for (int i = 0; i < C::kKeys / 16; ++i)
#pragma unroll
      for (int part = 0; part < (C::kDim > 128 ? 2 : 1); ++part)
        ptx::multiply_async<T, 1>(sum[part], operand[i], b + i * (16 * 128 / 16) + part * (2 * C::kKeyPanel / 16));
    ptx::commit_products();
  }

  // operand = dS of `block`, whose products are under way; with kBehind that of dQ of the block before is behind them.
  template <bool kMask, bool kBehind>
  __device__ __forceinline__ void differentiate(int block) {
    ptx::wait_products<kBehind ? 2 : 1>();
    if constexpr (kMask) mask(score, row, block * C::kKeys + (lane & 3) * 2, p.left, p.right, keys);
#pragma unroll
    for (int i = 0; i < C::kKeys / 2; ++i) score[i] = ptx::exp2(fmaf(score[i], p.scale_log2, -lse2[(i >> 1) & 1]));
    ptx::pin(score);
    ptx::wait(barriers.value_full(value.stage), value.parity);  // complete already: ends a basic block
    ptx::wait_products<kBehind ? 1 : 0>();
    release(barriers.value_empty(value.stage));
#pragma unroll
    for (int i = 0; i < C::kKeys / 2; ++i) score[i] *= gradient[i] - delta[(i >> 1) & 1];
    if constexpr (kBehind) {
      ptx::pin(score);
      ptx::wait(barriers.key_full(key.stage), key.parity);  // likewise
      ptx::wait_products<0>();
      release(barriers.key_empty(key.stage_before()));
    }
    value.next();
#pragma unroll
    for (int i = 0; i < C::kKeys / 4; ++i) operand[i / 4][i % 4] = ptx::pack(score[2 * i], score[2 * i + 1], T());
  }

  __device__ __forceinline__ void wait_stages() {
    ptx::wait(barriers.key_full(key.stage), key.parity);
    ptx::wait(barriers.value_full(value.stage), value.parity);
    ptx::fence_products();
  }

  // dS of `block` beside the product of the block before.
  template <bool kMask>
  __device__ __forceinline__ void step(int block) {
    key.next();
    wait_stages();
    multiply_both();
    accumulate(key.stage_before());
    differentiate<kMask, true>(block);
  }

  // Blocks of keys that this warpgroup does not use.
  __device__ __forceinline__ void pass(int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      ptx::wait(barriers.key_full(key.stage), key.parity);
      release(barriers.key_empty(key.stage));
      key.next();
      ptx::wait(barriers.value_full(value.stage), value.parity);
      release(barriers.value_empty(value.stage));
      value.next();
    }
  }

  __device__ __forceinline__ void load_statistics(const uint4& place, const uint4& sequence) {
    const int length = static_cast<int>(sequence.x), head = static_cast<int>(place.y);
    const int64_t first =
        p.cu_seqlens_q != nullptr ? static_cast<int>(sequence.w) - length : static_cast<int>(sequence.w) * p.lse_batch;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = static_cast<int>(place.x) + group * 64 + warp * 16 + lane / 4 + 8 * r;
      lse2[r] = INFINITY;  // P = 0
      delta[r] = 0;
      if (row < length) {
        const int64_t at = head * p.lse_head + first + row;
        lse2[r] = bounded(problem::Softmax<float>::lse2(p.lse[at]));
        delta[r] = __ldcg(p.delta + at);  // past L1: what wrote it may have ended after this block's L1 was last emptied
      }
    }
  }

  // dQ of this warp's rows through their place in the buffer of Q.
  __device__ __forceinline__ void store(Slot tile) {
    ptx::sync_named(1 + group, 128);  // the warpgroup has read its rows of Q
    const uint4 place = ptx::load_shared_16(tile.place()), sequence = ptx::load_shared_16(tile.sequence());
    const int row = group * 64 + warp * 16;
    const uint32_t staging = base + C::kQueryAt + row * 128;
#pragma unroll
    for (int j = 0; j < C::kDim / 16; ++j) {  // 16 rows x 16 columns
      const float* x = C::kDim > 128 ? sum[j / 8] + j % 8 * 8 : sum[0] + j * 8;
      const uint32_t chunk = ((2 * j & 7) + lane / 16) ^ (lane & 7);
      store_block<T>(staging + (j / 4) * C::kRowPanel + (lane & 15) * 128 + chunk * 16, x, p.scale, p.scale);
    }
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int panel = 0; panel < C::kPanels; ++panel)
        ptx::store_box(&p.out, staging + panel * C::kRowPanel,
                       {64 * panel, static_cast<int>(sequence.z + place.x) + row, static_cast<int>(place.y),
                        static_cast<int>(sequence.w), p.cu_seqlens_q != nullptr ? kWrap : 0});
      ptx::commit_stores();
      ptx::wait_stores_read<0>();
    }
    __syncwarp();
    release(barriers.rows_empty());
  }

  // The blocks of a tile: `ahead` and `behind` are those of which only other warpgroups see something, newer and older ones.
  struct Walk : KeyWalk {
    int ahead, behind;
    __device__ __forceinline__ bool empty() const { return this->block < 0; }
  };
  __device__ __forceinline__ Walk plan_walk(const uint4& place, const uint4& sequence) {
    const int length = static_cast<int>(sequence.x), diagonal = p.bottom_right ? keys - length : 0;
    const int first = static_cast<int>(place.z), last = static_cast<int>(place.w);
    const int from = static_cast<int>(place.x) + group * 64, top = from + diagonal;
    const int bottom = min(from + 64, length) - 1 + diagonal;
    row = top + warp * 16 + lane / 4;
    const int key = min(bottom + p.right, keys - 1), begin = from < length && key >= 0 ? min(key / C::kKeys, last) : -1;
    const int end = max(first, oldest_seen<C::kKeys>(p, top));
    if (begin < end) return {{-1, 0, 0, 0}, ptx::uniform(last - first + 1), 0};
    const int masked_end = max(min(keys, top + p.right + 1), 0) / C::kKeys;
    const int unmasked_end = oldest_unmasked<C::kKeys>(p, top);
    const int ahead = ptx::uniform(last - begin);
    const KeyWalk seen{ptx::uniform(begin), ptx::uniform(max(masked_end, end)), ptx::uniform(max(unmasked_end, end)),
                       ptx::uniform(end)};
    return {seen, ahead, ptx::uniform(end - first)};
  }

  __device__ __forceinline__ void walk(Walk walk) {
    wait_stages();
    multiply_both();
    differentiate<true, false>(walk.block);
    --walk.block;
    walk.run([&](int block) { step<true>(block); }, [&](int block) { step<false>(block); },
             [&](int block) { step<true>(block); });
    ptx::fence_products();
    accumulate(key.stage);
    ptx::wait_products<0>();
    release(barriers.key_empty(key.stage));
    key.next();
  }

  __device__ __forceinline__ void run() {
    while (true) {
      ptx::wait(barriers.work_full(slot.stage), slot.parity);
      const Slot tile{base + C::kWorkAt + C::kWorkBytes * slot.stage};
      ptx::fence_products();  // tells ptxas that the warp is together: what REDUX gives then stays uniform
      if (static_cast<Kind>(ptx::uniform(static_cast<int>(ptx::load_shared_volatile(tile.kind())))) == Kind::kEnd) break;
      const uint4 place = ptx::load_shared_16(tile.place()), sequence = ptx::load_shared_16(tile.sequence());
      keys = static_cast<int>(sequence.y);
      load_statistics(place, sequence);
      const Walk steps = plan_walk(place, sequence);
#pragma unroll
      for (int i = 0; i < C::kDim / 2; ++i) (C::kDim > 128 ? sum[i / 64][i % 64] : sum[0][i]) = 0;
      ptx::wait(barriers.rows_full(), rows.parity);
      pass(steps.ahead);
      if (!steps.empty()) walk(steps);
      pass(steps.behind);
      store(tile);
      rows.next();
      ptx::arrive(barriers.work_empty(slot.stage));
      slot.next();
    }
    if (lane == 0) ptx::wait_stores<0>();
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) backward_rows_kernel(const __grid_constant__ RowArguments p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = ptx::shared_address(shared);
  const RowBarriers<C> barriers{base + C::kBarriersAt};
  if (threadIdx.x == 0) {
    ptx::prefetch_map(&p.query);
    ptx::prefetch_map(&p.gradient);
    ptx::prefetch_map(&p.key);
    ptx::prefetch_map(&p.value);
    barriers.init();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    ptx::give_registers<C::kProducerRegisters>();
    if (threadIdx.x == 0) RowProducer<C>{p, base, barriers}.run();
  } else {
    ptx::take_registers<C::kConsumerRegisters>();
    RowGradients<C>(p, base, warpgroup - 1).run();
  }
}

}  // namespace flash::sm90
