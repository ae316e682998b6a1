// cuda/launch.cu: device properties, the instance a plan names, and CUDA's errors as sentences. All thinking is in problem/plan.cpp.
#include <cuda_runtime.h>

#include <array>
#include <cstdio>
#include <mutex>

#include "cuda/launch.cuh"
#include "cuda/sm80/backward.h"
#include "cuda/sm80/forward.h"

namespace flash::cuda {
namespace {

using problem::Direction;
using problem::DType;
using problem::Family;
using problem::Gradients;
using problem::Plan;
using problem::Problem;

using Forward = cudaError_t(const Problem&, const Plan&, void* workspace, cudaStream_t);
using Backward = cudaError_t(const Problem&, const Gradients&, const Plan&, void* workspace, cudaStream_t);

template <DType kType, bool kPlain>
Forward* forward_instance(int head_dim) {
  switch (head_dim) {
    case 64: return sm80::forward<kType, 64, kPlain>;
    case 96: return sm80::forward<kType, 96, kPlain>;
    case 128: return sm80::forward<kType, 128, kPlain>;
    case 192: return sm80::forward<kType, 192, kPlain>;
    case 256: return sm80::forward<kType, 256, kPlain>;
    case 512: return sm80::forward<kType, 512, kPlain>;
    default: return nullptr;
  }
}

template <DType kType, bool kPlain>
Backward* backward_instance(int head_dim) {
  switch (head_dim) {
    case 64: return sm80::backward<kType, 64, kPlain>;
    case 96: return sm80::backward<kType, 96, kPlain>;
    case 128: return sm80::backward<kType, 128, kPlain>;
    case 192: return sm80::backward<kType, 192, kPlain>;
    case 256: return sm80::backward<kType, 256, kPlain>;
    case 512: return sm80::backward<kType, 512, kPlain>;
    default: return nullptr;
  }
}

template <DType kType>
Forward* forward_instance(const Plan& plan) {
  return plan.plain ? forward_instance<kType, true>(plan.head_dim) : forward_instance<kType, false>(plan.head_dim);
}

template <DType kType>
Backward* backward_instance(const Plan& plan) {
  return plan.plain ? backward_instance<kType, true>(plan.head_dim) : backward_instance<kType, false>(plan.head_dim);
}

Forward* forward_instance(DType type, const Plan& plan) {
  switch (type) {
    case DType::kFloat16: return forward_instance<DType::kFloat16>(plan);
    case DType::kBFloat16: return forward_instance<DType::kBFloat16>(plan);
    case DType::kFloat32: return forward_instance<DType::kFloat32>(plan);
    case DType::kFloat64: return forward_instance<DType::kFloat64>(plan);
    default: return nullptr;
  }
}

Backward* backward_instance(DType type, const Plan& plan) {
  switch (type) {
    case DType::kFloat16: return backward_instance<DType::kFloat16>(plan);
    case DType::kBFloat16: return backward_instance<DType::kBFloat16>(plan);
    case DType::kFloat32: return backward_instance<DType::kFloat32>(plan);
    case DType::kFloat64: return backward_instance<DType::kFloat64>(plan);
    default: return nullptr;
  }
}

Error sentence(cudaError_t error, const Plan& plan) {
  if (error == cudaSuccess) return nullptr;
  char what[160];
  std::snprintf(what, sizeof what, "flash.attention: the %s kernel for head dims up to %d (%d rows x %d keys, %lld blocks)",
                plan.direction == Direction::kForward ? "sm80 forward" : "sm80 backward", plan.head_dim, plan.tile_rows,
                plan.tile_keys, static_cast<long long>(plan.blocks));
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
  return cudaSuccess;
}

}  // namespace

Error sentence(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return nullptr;
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

Error forward(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  Forward* run = forward_instance(problem.dtype, plan);
  if (run == nullptr) return sentence(cudaErrorInvalidDeviceFunction, plan);
  cudaError_t error = run(problem, plan, workspace, stream);
  if (error == cudaSuccess && plan.splits > 1) error = combine(problem, plan.splits, workspace, stream);
  return sentence(error, plan);
}

Error backward(const Problem& problem, const Gradients& gradients, const Plan& plan, void* workspace, Stream stream) {
  Backward* run = backward_instance(problem.dtype, plan);
  if (run == nullptr) return sentence(cudaErrorInvalidDeviceFunction, plan);
  return sentence(run(problem, gradients, plan, workspace, stream), plan);
}

}  // namespace flash::cuda
