// cuda/launch.cu: device properties, the family a plan names, and CUDA's errors as sentences. All thinking is in problem/plan.cpp.
#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <mutex>

#include "cuda/common/attributes.cuh"
#include "cuda/decode/launch.h"
#include "cuda/launch.cuh"
#include "cuda/sm80/backward.h"
#include "cuda/sm80/forward.h"
#if defined(FLASH_ATTN_EXT_SM90)
#include "cuda/sm90/backward.h"
#include "cuda/sm90/forward.h"
#endif

namespace flash::cuda {
namespace {

using problem::Direction;
using problem::Gradients;
using problem::Plan;
using problem::Problem;

Error failure(cudaError_t error, const Plan& plan) {
  if (error == cudaSuccess) return nullptr;
  char what[160];
  std::snprintf(what, sizeof what, "flash.attention: the %s kernel for head dims up to %d (%d rows x %d keys, %lld blocks)",
                plan.family == problem::Family::kSm90
                    ? (plan.direction == Direction::kForward ? "sm90 forward" : "sm90 backward")
                : plan.family == problem::Family::kDecode ? "decode"
                : plan.direction == Direction::kForward   ? "sm80 forward"
                                                          : "sm80 backward",
                plan.head_dim, plan.tile_rows, plan.tile_keys, static_cast<long long>(plan.blocks));
  return sentence(error, what);
}

cudaError_t query(int index, problem::Device* device) {
  struct {
    cudaDeviceAttr attribute;
    int value;
  } asked[] = {{cudaDevAttrComputeCapabilityMajor, 0},
               {cudaDevAttrComputeCapabilityMinor, 0},
               {cudaDevAttrMultiProcessorCount, 0},
               {cudaDevAttrMaxSharedMemoryPerBlockOptin, 0},
               {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 0}};
  for (auto& [attribute, value] : asked)
    if (const cudaError_t error = cudaDeviceGetAttribute(&value, attribute, index); error != cudaSuccess) return error;
  device->cuda = true;
  device->major = asked[0].value;
  device->minor = asked[1].value;
  device->multiprocessors = asked[2].value;
  device->shared_memory = asked[3].value;
  device->multiprocessor_memory = asked[4].value;
#if defined(FLASH_ATTN_EXT_SM90)
  device->sm90 = device->major == 9 && device->minor == 0;
#endif
  return cudaSuccess;
}

}  // namespace

Error sentence(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // reported here: left behind, the next launch of somebody else would report it once more
  thread_local char text[512];
  std::snprintf(text, sizeof text, "%s: %s (%s).", what, cudaGetErrorString(error), cudaGetErrorName(error));
  return text;
}

Error device(int index, problem::Device* device) {
  struct Known {
    std::once_flag once;
    problem::Device device;
    cudaError_t error;
  };
  static std::array<Known, 64> known;
  if (index < 0 || index >= static_cast<int>(known.size())) return sentence(query(index, device), "flash.attention: the GPU");
  Known& entry = known[static_cast<size_t>(index)];
  std::call_once(entry.once, [&] { entry.error = query(index, &entry.device); });
  *device = entry.device;
  return sentence(entry.error, "flash.attention: the GPU");
}

cudaError_t allow_shared_memory(const void* kernel, int bytes, uint64_t& allowed) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  const std::atomic_ref<uint64_t> devices(allowed);
  if (devices.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) devices.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

Error forward(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  if (plan.family == problem::Family::kDecode) return decode(problem::as_decode(problem), plan, workspace, stream);
#if defined(FLASH_ATTN_EXT_SM90)
  if (plan.family == problem::Family::kSm90) return failure(sm90::forward(problem, plan, workspace, stream), plan);
#endif
  cudaError_t error = sm80::forward(problem, plan, workspace, stream);
  if (error == cudaSuccess && plan.splits > 1) error = combine(problem, plan.splits, workspace, stream);
  return failure(error, plan);
}

Error backward(const Problem& problem, const Gradients& gradients, const Plan& plan, void* workspace, Stream stream) {
#if defined(FLASH_ATTN_EXT_SM90)
  if (plan.family == problem::Family::kSm90) return failure(sm90::backward(problem, gradients, plan, workspace, stream), plan);
#endif
  return failure(sm80::backward(problem, gradients, plan, workspace, stream), plan);
}

Error decode(const problem::Decode& d, const Plan& plan, void* workspace, Stream stream) {
  return failure(decode::run(d, plan, workspace, stream), plan);
}

Error append(const problem::Append& a, Stream stream) {
  return sentence(decode::append(a, stream), "flash.cache_append_ on CUDA");
}

}  // namespace flash::cuda
