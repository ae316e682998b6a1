// ptx/decode.cuh: what the decode kernels need beyond the rest of this room: copies with an L2 policy, tickets, shared memory of other
// CTAs of a cluster. PTX ISA, "cp.async", "createpolicy", "prefetch", "atom", "st.async", "mapa", "barrier.cluster".
#pragma once
#include <cstdint>

namespace flash::ptx {

// createpolicy.fractional.L2::evict_first
__device__ __forceinline__ uint64_t policy_evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// createpolicy.fractional.L2::evict_normal: what a copy without a policy has.
__device__ __forceinline__ uint64_t policy_evict_normal() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// cp.async.cg with a policy.
__device__ __forceinline__ void copy_16_hinted(uint32_t destination, const void* source, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "l"(policy)
               : "memory");
}

// prefetch.global.L1, .L2: the line that holds the address.
__device__ __forceinline__ void prefetch_l1(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// atom.add.acq_rel.gpu: returns the value before.
__device__ __forceinline__ unsigned take_ticket(unsigned* p) {
  unsigned before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(p) : "memory");
  return before;
}

// ld.global.cg: past L1, for what other CTAs wrote. Not volatile, so that several are under way.
__device__ __forceinline__ float4 load_l2_16(const float4* p) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ float2 load_l2_8(const float2* p) {
  float2 v;
  asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p));
  return v;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// %nclusterid.x
__device__ __forceinline__ int clusters_of_row() {
  int count;
  asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(count));
  return count;
}

// barrier.cluster.arrive.relaxed: enough behind fence_barrier_init().
__device__ __forceinline__ void arrive_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// mapa: the address of this CTA's `address` in CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t address_in(uint32_t address, unsigned rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// st.async: the bytes count towards the barrier, which lies in the same CTA as the address.
__device__ __forceinline__ void push_16(uint32_t address, float4 v, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(address),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void push_8(uint32_t address, float2 v, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(address), "f"(v.x),
               "f"(v.y), "r"(barrier)
               : "memory");
}
#endif

}  // namespace flash::ptx
