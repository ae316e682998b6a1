// sm90/forward.cuh: attention forward on Hopper. One thread claims tiles, one feeds (TMA), two to four warpgroups compute (wgmma), blocks
// are persistent. Dao et al. 2023 (FlashAttention-2) for the algorithm, Shah et al. 2024 (FlashAttention-3) for the roles; what is ours
// is below.
//
// Schedule of a consumer warpgroup. n: key blocks of tile t, walked from the last to the first; ' marks the next tile.
//   start          S(t, n-1)                        | wait | softmax with exact row maxima
//   steps j = n-2  S(t, j) ; P V(t, j+1)            | wait S | first half of exp | wait P V | second half, P as operand
//   cross          P V(t, 0) ; S(t', n'-1)          | wait P V | store O of t | wait S | softmax of t'
//   end            P V(t, 0)                        | wait | store
// The pipeline never drains between tiles: while O of one tile is stored, S of the next is computed, and the other warpgroups go on.
// With one buffer of Q (dim 256, narrow windows) a tile ends before the next starts: Q comes while the last P V runs and O is stored.
//
// A tile is 64 rows a warpgroup. Blocks of keys that some warpgroup sees and another does not are passed over by that one: it waits for
// them, releases them, takes its turn. So the size of a tile costs nothing at the edges of a mask or at the end of the rows.
//
// Optimistic softmax: the row maximum of the first block of a tile (and of blocks in which a row may see its first key) is the reference
// of the whole tile, so the steps between have no maximum, no shuffles and no rescaling of O. Any reference is exact as long as
// 2^(score - reference) stays in range, which the row sum shows at the end. A tile where it did not is done again, following the
// maximum: never wrong, and free when unused (a score 44 nats above the first block's maximum triggers it; fp16: 11). Each tile decides
// for itself: once one had to be done again, to do later ones safely at once would make their bits depend on which block took them.
//
// What was measured on the way (H200, 16k tokens): exact maximum in every step -10 %; polynomial 2^x on the FMA pipe -3 to -8 %;
// P V woven into the exponentials -6 %; 176 keys -25 % at 512; Q in registers 0; clusters of 2 with multicast +2 % at 16k, -2 % at 2k.
// Warps share a scheduler, so what stands between a warp's products counts in full: loop bounds made uniform (ptx::uniform), which keeps
// ring stages and descriptors in uniform registers, +3 to 9 %; masks as one bit per key, applied by R2P, instead of two comparisons a
// score, and a finish of tiles without branches, +4 % to +12 % at 512 and 1k. Short tiles wait for the thread that loads: claiming and
// describing tiles in another thread +2 % (dim 128) to +8 % (dim 256) at 512. Fetching the next tiles' keys into L2 by TMA prefetches
// -6 to -15 % at 512, for they queue before loads; by loads of an idle warp -2 to -50 %. Asking for tiles three blocks earlier 0. What
// tiles and their order gave is in tiles.h and forward.cu.
//
// What a window of 1024 keys costs, in cycles of a tile (dim 64 / 128 / 256): 17 / 9 / 17 steps of 1480 / 2060 / 2040, and 4800 / 3400 /
// 4700 for its end and the start of the next: output 1300 / 1300 / 3000, first softmax 500 to 1100 more than a step, the next tile's
// description 500. It is latency of code that runs once a tile: 300 instructions take as long as 1300 cycles. Tried for it: masked row
// maxima without the detour over integers, which some lane leaves nearly always, +0.5 to 2 % (kept); Q released at the last S instead of
// the end of the last softmax (one buffer) +1 to 3 % (kept); output from registers through shared memory to global memory instead of
// TMA -2 %; one fence for all panels of the output 0; S of the next tile before the output with one buffer of Q too 0 to -5 %; Q fetched
// into L2 ahead +1 % at best, -6 % at 512; the first keys of the next tile fetched into L2 0 to -1 %; unseen blocks passed over by a lane
// each instead of in a loop 0; all heads in one section 0 to -2 %; warpgroups at different places of their tiles, past which the keys
// stream, each with rows of its own (ae81ed9 in the history): dim 64 -5 %, 128 -2 %. The bound of tiles of 64 rows, the least of wgmma, is
// 1024 of 1088 keys: 0.94 of the dense rate.
// Watch after every change: R2UR in the loops of a step (0), C75xx, spills of the consumers. A branch around scores that hangs on
// anything but an argument of the kernel makes ptxas serialise the products (C7514).
#pragma once
#include "cuda/sm90/forward_consumer.cuh"
#include "cuda/sm90/forward_gaps.cuh"
#include "cuda/sm90/forward_producer.cuh"
#include "cuda/sm90/forward_scheduler.cuh"

namespace flash::sm90 {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) forward_kernel(const __grid_constant__ ForwardArguments p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = ptx::shared_address(shared);
  const Barriers<C> barriers{base + C::kBarriersAt};
  if (threadIdx.x == 0) {
    ptx::prefetch_map(&p.query);
    ptx::prefetch_map(&p.key);
    ptx::prefetch_map(&p.value);
    ptx::prefetch_map(&p.out);
    barriers.init();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    ptx::give_registers<C::kProducerRegisters>();
    if (threadIdx.x == 0) Producer<C>{p, base, barriers}.run();
    if (threadIdx.x == 32) Scheduler<C>{p, base, barriers}.run();
    if (threadIdx.x / 32 == 2 && p.gaps != nullptr) clear_gaps(p);
  } else {
    ptx::take_registers<C::kConsumerRegisters>();
    Consumer<C>(p, base, barriers, warpgroup - 1).run();
  }
}

}  // namespace flash::sm90
