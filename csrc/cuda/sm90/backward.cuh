// sm90/backward.cuh: attention backward on Hopper. A block owns kKeys keys of one kv head at a time and walks over the rows that see
// them. Four warpgroups: threads of the first feed (TMA), clear sums of dQ, count them or keep their turns; two have 64 keys each
// (backward_keys.cuh; head dims above 128: backward_wide.cuh); the last does nothing but dQ (backward_queries.cuh). They meet at barriers
// in shared memory only. Where dQ is not wanted, or computed by itself (backward_rows.cuh), its warpgroup is missing, and there may be a
// third with keys.
//   S^T = K Q^T, dP^T = V dO^T             keys are lines, so P^T and dS^T come out as A operands
//   P = 2^(c S - lse2), dS = P (dP - delta)
//   dV += P^T dO, dK += dS^T Q             in registers for the whole walk, over all query heads of the group
//   dQ += dS K                             added to fp32 sums in global memory; deterministic: tile after tile (backward_order.cuh)
// lse and delta enter as one more step of the products: -lse / scale and -delta as sums of 16-bit numbers, against a matrix of ones.
// No thread reads them, which matters: wgmma's operands starve ordinary reads of shared memory.
//
// Watch after every change: C75xx, spills of others than the producer, R2UR between products; and in the loop over rows LDL, S2R and
// chains of instructions through one register, ptxas's answer to scarce registers: these were 5 % at dim 128.
// Tried: the main warpgroups in step, by a barrier: dim 64 -16 to -20 %, 128 -3 to -5 %, 256 -2 to -22 %. The statistics' factors as A
// operand in registers: dim 64 +0.7 %, 128 -1 to -3 %. elect.sync instead of a lane's number: 0 to -1 %.
#pragma once
#include "cuda/sm90/backward_cleaner.cuh"
#include "cuda/sm90/backward_counter.cuh"
#include "cuda/sm90/backward_keys.cuh"
#include "cuda/sm90/backward_order.cuh"
#include "cuda/sm90/backward_prepare.cuh"
#include "cuda/sm90/backward_producer.cuh"
#include "cuda/sm90/backward_queries.cuh"
#include "cuda/sm90/backward_wide.cuh"

namespace flash::sm90 {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) backward_kernel(const __grid_constant__ BackwardArguments p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = ptx::shared_address(shared);
  const BackwardBarriers<C> barriers{base + C::kBarriersAt};
  const BackwardSlot first_slot{base + C::kWorkAt};
  if (threadIdx.x < 16) {  // 8 rows of factors, which serve all rows, then 8 rows of zeros
    ptx::store_shared(base + C::kOnesAt + 16 * threadIdx.x,
                      threadIdx.x < 8 ? Terms<typename C::T>::factors() : make_uint4(0, 0, 0, 0));
    ptx::fence_async_proxy();
  }
  if (threadIdx.x < C::kZeroBytes / 16) {
    ptx::store_shared(base + C::kZeroAt + 16 * threadIdx.x, make_uint4(0, 0, 0, 0));
    ptx::fence_async_proxy();
  }
  if (threadIdx.x == 0) {
    ptx::prefetch_map(&p.query);
    ptx::prefetch_map(&p.key);
    ptx::prefetch_map(&p.value);
    ptx::prefetch_map(&p.gradient);
    barriers.init(p.cleared != nullptr, p.finished != nullptr);
    ptx::store_shared(first_slot.begin(), p.given > 0 ? blockIdx.x : atomicAdd(p.counter, 1u));
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    ptx::give_registers<C::kProducerRegisters>();
    // By way of a uniform register: a first tile of its own makes the producer spill 16 bytes more at dim 64.
    const int first = ptx::uniform(static_cast<int>(ptx::load_shared_volatile(first_slot.begin())));
    if (threadIdx.x == 0) BackwardProducer<C>{p, base, barriers}.run(first);
    if (threadIdx.x == 32 && p.cleared != nullptr) BackwardCleaner<C>{p, base, barriers}.run();
    if constexpr (C::kTurns) {
      if (threadIdx.x == 64) BackwardOrder<C>{p, base, barriers}.await();
      if (threadIdx.x == 96) BackwardOrder<C>{p, base, barriers}.pass_on();
    } else if constexpr (C::kTells) {
      if (threadIdx.x == 64 && p.finished != nullptr) BackwardCounter<C>{p, base, barriers}.run();
    }
  } else if (C::kSums && warpgroup == 3) {
    ptx::give_registers<C::kQueryRegisters>();
    QueryGradients<C>(p, base).run();
  } else {
    ptx::take_registers<C::kMainRegisters>();
    if constexpr (!C::kWide) {
      KeyGradients<C>(p, base, warpgroup - 1).run();
    } else if (warpgroup == 1) {
      WideGradients<C, true>(p, base).run();
    } else {
      WideGradients<C, false>(p, base).run();
    }
  }
}

}  // namespace flash::sm90
