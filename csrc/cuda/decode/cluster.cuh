// decode/cluster.cuh: parts of a cluster of CTAs. Every CTA pushes its items into the shared memory of those that finish them and then
// waits for its own: no workspace, no barrier of the whole cluster at the end. Several clusters of one plane add up by tickets, one per
// rank, so that the last step is spread over a cluster as well. sm_90.
#pragma once
#include <type_traits>

#include "cuda/decode/finish.cuh"
#include "cuda/ptx/mbarrier.cuh"

namespace flash::decode {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
template <class T, int kVariant>
struct Cluster {
  using Sums = Finish<T, kVariant>;
  static constexpr Tile kTile = kTiles[kVariant];

  const Sums& finish;
  char* rest;  // shared: flag, barrier, then the inbox: out [cluster][share] float4, states [cluster][share] float2
  uint32_t barrier = ptx::shared_address(rest + 8);
  char* inbox = rest + 16;
  unsigned rank = ptx::cluster_rank();
  // A bare tile's clusters are of 4 or 8, several per plane: their parts are added up 4 at a time.
  static constexpr bool kFours = kTile.bare_and_long();

  // Long before the first push: tells what this CTA will be sent.
  __device__ __forceinline__ void announce() const {
    const Arguments& a = finish.a;
    if (threadIdx.x == 0) {
      ptx::init_barrier(barrier, 1);
      ptx::fence_barrier_init();
      const int mine = max(0, min(a.cluster_share, finish.items() - static_cast<int>(rank) * a.cluster_share));
      ptx::arrive_expecting(barrier, mine * a.cluster * 24);
    }
    __syncwarp();
    ptx::arrive_cluster();
  }

  __device__ __forceinline__ void run() const {
    ptx::wait_cluster();
    push();
    ptx::wait(barrier, 0);
    const Arguments& a = finish.a;
    const int clusters = count();
#pragma unroll 1
    for (int mine = threadIdx.x; mine < a.cluster_share; mine += Sums::kThreads) {
      const int item = rank * a.cluster_share + mine;
      if (item >= finish.items()) break;
      const Part part = Part::sum_of<kFours ? 4 : kLargestCluster, kFours>(a.cluster, [&](int i, float4* out, float2* state) {
        *out = outs()[i * a.cluster_share + mine];
        *state = states()[i * a.cluster_share + mine];
      });
      if (clusters == 1) {
        finish.write(item / Sums::kColumns, item % Sums::kColumns * 4, part);
      } else {
        const int64_t at = published(blockIdx.x / a.cluster, item);
        __stcg(reinterpret_cast<float4*>(a.part_sums) + at, part.out);
        __stcg(a.part_states + at, make_float2(part.max, part.sum));
      }
    }
    if (clusters > 1) add_clusters(clusters);
  }

 private:
  __device__ __forceinline__ float4* outs() const { return reinterpret_cast<float4*>(inbox); }
  __device__ __forceinline__ float2* states() const {
    return reinterpret_cast<float2*>(inbox + finish.a.cluster * finish.a.cluster_share * 16);
  }
  // Clusters of a plane.
  __device__ __forceinline__ int count() const {
    return kFours ? ptx::clusters_of_row() : finish.a.splits / finish.a.cluster;  // the division is long
  }
  __device__ __forceinline__ int64_t published(int cluster, int item) const {
    return (finish.plane() * count() + cluster) * (kTile.lanes * Sums::kColumns) + item;
  }

  __device__ __forceinline__ void push() const {
    const int share = finish.a.cluster_share;
#pragma unroll 1
    for (int item = threadIdx.x; item < finish.items(); item += Sums::kThreads) {
      const Part part = finish.of_warps(item / Sums::kColumns, item % Sums::kColumns * 4);
      const int to = finish.a.by_share.quotient(item), at = rank * share + item - to * share;
      const uint32_t there = ptx::address_in(barrier, to);
      ptx::push_16(ptx::address_in(ptx::shared_address(outs() + at), to), part.out, there);
      ptx::push_8(ptx::address_in(ptx::shared_address(states() + at), to), make_float2(part.max, part.sum), there);
    }
  }

  __device__ __forceinline__ void add_clusters(int clusters) const {
    const Arguments& a = finish.a;
    if (!finish.is_last(a.tickets + finish.plane() * a.cluster + rank, clusters, reinterpret_cast<int*>(rest))) return;
    for (int mine = threadIdx.x; mine < a.cluster_share; mine += Sums::kThreads) {
      const int item = rank * a.cluster_share + mine;
      if (item >= finish.items()) break;
      const Part part = Part::sum_of<8>(clusters, [&](int i, float4* out, float2* state) {
        *out = ptx::load_l2_16(reinterpret_cast<const float4*>(a.part_sums) + published(i, item));
        *state = ptx::load_l2_8(a.part_states + published(i, item));
      });
      finish.write(item / Sums::kColumns, item % Sums::kColumns * 4, part);
    }
  }
};
#endif

// The end of a CTA that adds up by tickets.
template <class T, int kVariant>
struct Tickets {
  const Finish<T, kVariant>& finish;
  char* rest;

  __device__ __forceinline__ void announce() const {}
  __device__ __forceinline__ void run() const { finish.by_tickets(reinterpret_cast<int*>(rest)); }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
template <class T, int kVariant>
using Ending = std::conditional_t<clustered(kVariant), Cluster<T, kVariant>, Tickets<T, kVariant>>;
#else
template <class T, int kVariant>
using Ending = Tickets<T, kVariant>;
#endif

}  // namespace flash::decode
