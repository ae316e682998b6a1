// decode/kernel.cuh: attention of few query rows over a long cache. Grid (parts of the keys, kv heads x tiles of lanes, sequences).
// Warps of a CTA share its keys chunk by chunk and meet only at the end: bound by the memory that K and V come from.
#pragma once
#include <cuda_runtime.h>

#include "cuda/common/attributes.cuh"
#include "cuda/decode/cluster.cuh"
#include "cuda/decode/launch.h"

namespace flash::decode {

// The arguments of a bare call: what it lacks as constants, which leave no code.
template <int kVariant>
__device__ __forceinline__ Arguments bare(Arguments a) {
  a.left_pad = a.batch_index = nullptr;
  a.alibi_slopes = a.sinks = nullptr;
  a.head_dim = a.value_dim = kTiles[kVariant].bucket;
  a.rows = a.row_tiles = 1;
  a.by_group.inverse = 1;  // every lane is of row 0
  a.left = a.right = 1 << 29;
  a.bottom_right = a.capped = false;
  a.first_batch = a.first_plane = a.unit = 0;
  if (kTiles[kVariant].once) {
    a.cluster = a.splits = kLargestCluster;
    a.evict_first = false;
  }
  return a;
}

template <int kVariant>
__device__ __forceinline__ decltype(auto) known(const Arguments& a) {
  if constexpr (kTiles[kVariant].bare) {
    return bare<kVariant>(a);
  } else {
    return (a);
  }
}

template <class T, int kVariant>
__global__ void __launch_bounds__(kTiles[kVariant].warps * 32, kTiles[kVariant].resident)
    decode_kernel(const __grid_constant__ Arguments arguments) {
  constexpr Tile kTile = kTiles[kVariant];
  // K's half of a stage is filled again as soon as it is multiplied: up to 2 % faster where few bytes are under way, and not at D64.
  constexpr bool kEarly = kTile.bucket > 64 && !kTile.once;
  extern __shared__ __align__(1024) char shared[];
  float* sums = reinterpret_cast<float*>(shared);
  float2* states = reinterpret_cast<float2*>(shared + ring_bytes(kTile));
  char* rest = shared + ring_bytes(kTile) + state_bytes(kTile);  // flag, barrier, inbox

  const Arguments& a = known<kVariant>(arguments);
  Ring<kVariant>::prefetch_table(a, a.first_batch + blockIdx.z);
  Warp<T, kVariant>::prefetch_query(a);
  const Segment s = Segment::find<kVariant>(a);
  if (s.idle) return;
  const int warp = threadIdx.x >> 5;
  Ring<kVariant> ring(a, s, ptx::shared_address(shared));
  int chunk = s.chunk + warp;
#pragma unroll 1
  for (int i = 0; i < kTile.stages; ++i) {
    ring.issue_keys(chunk + i * kTile.warps);
    ring.issue_values(chunk + i * kTile.warps);
  }

  const Finish<T, kVariant> finish{a, s, sums, states};
  const Ending<T, kVariant> ending{finish, rest};
  ending.announce();

  Warp<T, kVariant> lanes(a, s);
#pragma unroll 1
  for (; chunk < s.chunk_end; chunk += kTile.warps) {
    ptx::wait_copies<kTile.stages - 1>();
    __syncwarp();
    const int next = chunk + kTile.stages * kTile.warps;
    lanes.step(a, s, ring.stage, chunk * kTile.keys, [&] {
      if (!kEarly) return;
      __syncwarp();
      ring.issue_keys(next);
    });
    __syncwarp();
    if constexpr (kTile.once) {
      ring.advance();
    } else {
      if (!kEarly) ring.issue_keys(next);
      ring.issue_values(next);
    }
  }
  lanes.store(finish.sums_of(warp), states + warp * kTile.lanes);  // over its own ring, of which nothing is under way
  __syncthreads();
  ending.run();
}

template <class T, int kVariant>
cudaError_t launch(const Arguments& a, dim3 grid, cudaStream_t stream) {
  constexpr int kBytes = static_cast<int>(shared_bytes(kVariant));
  if (const cudaError_t error = cuda::allow_shared_memory<decode_kernel<T, kVariant>>(kBytes); error != cudaSuccess)
    return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(a.cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = kTiles[kVariant].warps * 32;
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = clustered(kVariant) ? 1 : 0;
  return cudaLaunchKernelEx(&config, decode_kernel<T, kVariant>, a);
}

}  // namespace flash::decode
