// sm90/backward_instance.cuh: the bodies of the launches of backward_launch.cuh, included by the instances alone.
#pragma once
#include "cuda/common/attributes.cuh"
#include "cuda/sm90/backward.cuh"
#include "cuda/sm90/backward_launch.cuh"
#include "cuda/sm90/backward_rows.cuh"

namespace flash::sm90 {

// A launch that may begin while the kernel before it in the stream ends: kKernel waits for it where it needs to. Graphs are captured
// with ordinary edges, which every tool that walks them knows.
template <auto kKernel, class Arguments>
cudaError_t launch_behind(const Arguments& arguments, unsigned blocks, int threads, size_t shared_bytes, cudaStream_t stream) {
  cudaStreamCaptureStatus capture;
  if (const cudaError_t error = cudaStreamIsCapturing(stream, &capture); error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = capture == cudaStreamCaptureStatusNone ? 1 : 0;
  return cudaLaunchKernelEx(&config, kKernel, arguments);
}

template <class T, int kDim, int kRows>
cudaError_t launch_backward_prepare(const PrepareArguments& arguments, unsigned blocks, cudaStream_t stream) {
  backward_prepare_kernel<T, kDim, kRows>
      <<<blocks*(kRows / prepare_rows(kDim)) + arguments.gap_blocks, kRowKernelThreads, 0, stream>>>(arguments);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_backward_prepare(int variant, const PrepareArguments& arguments, unsigned blocks, cudaStream_t stream) {
  const BackwardTile& tile = kBackwardTiles[variant];
  if (tile.rows == 128) return launch_backward_prepare<T, 64, 128>(arguments, blocks, stream);
  return tile.bucket <= 64    ? launch_backward_prepare<T, 64, 64>(arguments, blocks, stream)
         : tile.bucket <= 128 ? launch_backward_prepare<T, 128, 64>(arguments, blocks, stream)
                              : launch_backward_prepare<T, 256, 64>(arguments, blocks, stream);
}

template <class T, int kDim>
cudaError_t launch_backward_convert(const ConvertArguments& arguments, unsigned blocks, cudaStream_t stream) {
  return arguments.scratch.columns == kDim / 8
             ? launch_behind<backward_convert_kernel<T, kDim, true>>(arguments, blocks, kRowKernelThreads, 0, stream)
             : launch_behind<backward_convert_kernel<T, kDim, false>>(arguments, blocks, kRowKernelThreads, 0, stream);
}

template <class T>
cudaError_t launch_backward_convert(int variant, const ConvertArguments& arguments, unsigned blocks, cudaStream_t stream) {
  const int dim = kBackwardTiles[variant].bucket;
  return dim <= 64    ? launch_backward_convert<T, 64>(arguments, blocks, stream)
         : dim <= 128 ? launch_backward_convert<T, 128>(arguments, blocks, stream)
                      : launch_backward_convert<T, 256>(arguments, blocks, stream);
}

template <class T, int kVariant, bool kCapped>
cudaError_t launch_backward(const BackwardArguments& arguments, unsigned blocks, cudaStream_t stream) {
  using Config = BackwardConfig<T, kVariant, kCapped>;
  constexpr auto kKernel = backward_kernel<Config>;
  if (const cudaError_t error = cuda::allow_shared_memory<kKernel>(Config::kSharedBytes); error != cudaSuccess) return error;
  return launch_behind<kKernel>(arguments, blocks, Config::kThreads, Config::kSharedBytes, stream);
}

template <class T, int kVariant>
cudaError_t launch_backward_rows(const RowArguments& arguments, unsigned blocks, cudaStream_t stream) {
  using Config = RowConfig<T, kVariant>;
  constexpr auto kKernel = backward_rows_kernel<Config>;
  if (const cudaError_t error = cuda::allow_shared_memory<kKernel>(Config::kSharedBytes); error != cudaSuccess) return error;
  return launch_behind<kKernel>(arguments, blocks, Config::kThreads, Config::kSharedBytes, stream);
}

}  // namespace flash::sm90
