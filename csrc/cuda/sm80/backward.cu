// sm80/backward.cu: a backward call as its launches.
//   tensor cores:  prepare -> keys (dK, dV, sums of dQ) -> convert;   deterministic: prepare -> keys (dK, dV) -> rows (dQ)
//   scalar:        prepare -> keys (dK, dV) -> rows (dQ)
// A deterministic gradient of the mask is a kernel of its own; else the keys kernel adds it up.
#include "cuda/sm80/backward.h"

#include "cuda/common/convert.cuh"
#include "cuda/common/prepare.cuh"
#include "cuda/sm80/backward_launch.h"
#include "cuda/tiles.h"

namespace flash::sm80 {
namespace {

using problem::DType;
using problem::Gradients;
using problem::Plan;
using problem::Problem;

// Whether rows of an array can be read 16 bytes at a time.
bool vectors(const problem::Array& a, int64_t dim, int64_t element) {
  return (reinterpret_cast<uintptr_t>(a.data) | static_cast<uint64_t>((a.batch | a.head | a.row | dim) * element)) % 16 == 0;
}

template <class T>
cudaError_t prepare(const BackwardCall& call, cudaStream_t stream) {
  const Problem& p = call.problem;
  common::PrepareArguments a{p, call.gradients, call.scratch};
  a.pieces = common::pieces(p.cu_seqlens_q, p.rows, p.total_rows, p.batch, common::kPrepareRows);
  a.vectors = vectors(p.out, p.value_dim, sizeof(T)) && vectors(call.gradients.dout, p.value_dim, sizeof(T));
  const unsigned blocks = static_cast<unsigned>(common::planes(p, p.heads) * a.pieces);
  common::prepare_kernel<T><<<blocks, common::kPrepareThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

template <class T>
cudaError_t convert(const BackwardCall& call, cudaStream_t stream) {
  const Problem& p = call.problem;
  common::ConvertArguments a{p, call.gradients, call.scratch};
  a.pieces = common::pieces(p.cu_seqlens_q, p.rows, p.total_rows, p.batch, common::kConvertRows);
  a.scale = call.modifiers.scale;
  const unsigned blocks = static_cast<unsigned>(common::planes(p, p.heads) * a.pieces);
  common::convert_kernel<T><<<blocks, common::kConvertWarps * 32, 0, stream>>>(a);
  return cudaGetLastError();
}

template <class T>
cudaError_t keys(int variant, const BackwardCall& call, cudaStream_t stream) {
  switch (variant) {
    case 0: return launch_keys<T, 0>(call, stream);
    case 1: return launch_keys<T, 1>(call, stream);
    case 2: return launch_keys<T, 2>(call, stream);
    case 3: return launch_keys<T, 3>(call, stream);
    case 4: return launch_keys<T, 4>(call, stream);
    case 5: return launch_keys<T, 5>(call, stream);
    case 6: return launch_keys<T, 6>(call, stream);
    case 7: return launch_keys<T, 7>(call, stream);
    case 8: return launch_keys<T, 8>(call, stream);
    case 9: return launch_keys<T, 9>(call, stream);
    default: return cudaErrorInvalidValue;
  }
}

template <class T>
cudaError_t rows(int variant, const BackwardCall& call, cudaStream_t stream) {
  switch (variant) {
    case 0: return launch_rows<T, 0>(call, stream);
    case 1: return launch_rows<T, 1>(call, stream);
    case 2: return launch_rows<T, 2>(call, stream);
    case 3: return launch_rows<T, 3>(call, stream);
    case 4: return launch_rows<T, 4>(call, stream);
    case 5: return launch_rows<T, 5>(call, stream);
    case 6: return launch_rows<T, 6>(call, stream);
    case 7: return launch_rows<T, 7>(call, stream);
    default: return cudaErrorInvalidValue;
  }
}

// What is left to launch after the gradient of the mask.
template <class T>
cudaError_t scalar(const BackwardCall& call, cudaStream_t stream) {
  const Gradients& g = call.gradients;
  cudaError_t error = cudaSuccess;
  if (g.dkey.data != nullptr || g.dvalue.data != nullptr || g.dmask != nullptr) error = launch_scalar_keys<T>(call, stream);
  if (error == cudaSuccess && g.dquery.data != nullptr) error = launch_scalar_rows<T>(call, stream);
  return error;
}

template <class T>
cudaError_t tensor(const BackwardCall& call, int variant, cudaStream_t stream) {
  const Gradients& g = call.gradients;
  cudaError_t error = cudaSuccess;
  if (g.dkey.data != nullptr || g.dvalue.data != nullptr || g.dmask != nullptr || call.scratch.dquery != nullptr)
    error = keys<T>(variant, call, stream);
  if (error != cudaSuccess || g.dquery.data == nullptr) return error;
  if (call.scratch.dquery != nullptr) return convert<T>(call, stream);
  BackwardCall alone = call;
  alone.gradients.dmask = nullptr;  // the keys kernel's
  return rows<T>(cuda::kBackwardTiles[variant].dquery, alone, stream);
}

template <class T>
cudaError_t run(BackwardCall call, int variant, cudaStream_t stream) {
  if (cudaError_t error = prepare<T>(call, stream); error != cudaSuccess) return error;
  if (call.gradients.deterministic && call.gradients.dmask != nullptr) {
    if (cudaError_t error = launch_scalar_mask<T>(call, stream); error != cudaSuccess) return error;
    call.gradients.dmask = nullptr;
  }
  if constexpr (sizeof(T) == 2) {
    if (cuda::kBackwardTiles[variant].body == cuda::BackwardBody::kTensor) return tensor<T>(call, variant, stream);
  }
  return scalar<T>(call, stream);
}

}  // namespace

cudaError_t backward(const Problem& problem, const Gradients& gradients, const Plan& plan, void* workspace, cudaStream_t stream) {
  BackwardCall call{};
  call.problem = problem;
  call.gradients = gradients;
  call.modifiers = common::modifiers(problem);
  call.load_bytes = plan.load_bytes;
  call.store_bytes = plan.store_bytes;
  if (cuda::kBackwardTiles[plan.variant].body != cuda::BackwardBody::kScalar)
    call.scratch = common::scratch(problem, cuda::sums_dquery(gradients), workspace);
  switch (problem.dtype) {
    case DType::kFloat16: return run<__half>(call, plan.variant, stream);
    case DType::kBFloat16: return run<__nv_bfloat16>(call, plan.variant, stream);
    case DType::kFloat32: return run<float>(call, plan.variant, stream);
    case DType::kFloat64: return run<double>(call, plan.variant, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace flash::sm80
