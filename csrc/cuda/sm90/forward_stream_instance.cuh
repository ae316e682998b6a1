// sm90/forward_stream_instance.cuh: the kernel of streams and the body of launch_stream, included by the instances alone.
#pragma once
#include "cuda/common/attributes.cuh"
#include "cuda/sm90/forward_stream_consumer.cuh"
#include "cuda/sm90/forward_stream_feed.cuh"

namespace flash::sm90 {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) stream_kernel(const __grid_constant__ StreamArguments p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = ptx::shared_address(shared);
  const Barriers<C> barriers{base + C::kBarriersAt};
  if (threadIdx.x == 0) {
    ptx::prefetch_map(&p.call.query);
    ptx::prefetch_map(&p.call.key);
    ptx::prefetch_map(&p.call.value);
    ptx::prefetch_map(&p.call.out);
    barriers.init();
  }
  for (uint32_t at = 4 * threadIdx.x; at < C::kOverflowBytes; at += 4 * C::kThreads)
    ptx::store_shared(base + C::kOverflowsAt + at, 0u);
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    ptx::give_registers<C::kProducerRegisters>();
    if (threadIdx.x == 0) StreamProducer<C>{p, base, barriers}.run();
    if (threadIdx.x == 32) StreamScheduler<C>{p, base, barriers}.run();
  } else {
    ptx::take_registers<C::kConsumerRegisters>();
    StreamConsumer<C>(p.call, base, barriers, warpgroup - 1).run();
  }
}

template <class T, int kVariant>
cudaError_t launch_stream(const StreamArguments& arguments, cudaStream_t stream) {
  using Config = StreamConfig<T, kVariant>;
  constexpr auto kKernel = stream_kernel<Config>;
  if (const cudaError_t error = cuda::allow_shared_memory<kKernel>(Config::kSharedBytes); error != cudaSuccess) return error;
  const int blocks = arguments.stream.teams * arguments.stream.lag;
  kKernel<<<blocks, Config::kThreads, Config::kSharedBytes, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace flash::sm90
