// sm80/backward.cu: a backward call as its launches.
//   16-bit, tensor cores:  prepare -> keys (dK, dV, sums of dQ) -> convert
//   fp32, tensor cores:    prepare -> keys (dK, dV, dQ)
//   deterministic, scalar: prepare -> keys (dK, dV) -> rows (dQ)
// A deterministic gradient of the mask is a kernel of its own; else the keys kernel adds it up.
#include "cuda/common/convert.cuh"
#include "cuda/common/prepare.cuh"
#include "cuda/sm80/backward.h"
#include "cuda/sm80/backward_grid.h"
#include "cuda/sm80/backward_launch.h"
#include "cuda/tiles.h"

namespace flash::sm80 {

unsigned set_grid(BackwardCall& call, bool rows, int tile, int64_t walked_bytes) {
  const problem::Problem& p = call.problem;
  const int64_t heads = rows ? p.heads : p.kv_heads, planes = common::planes(p, heads);
  call.pieces = static_cast<int>(rows ? common::pieces(p.cu_seqlens_q, p.rows, p.total_rows, p.batch, tile)
                                      : common::pieces(p.cu_seqlens_k, p.keys, p.total_keys, p.batch, tile));
  call.sections = common::Sections(planes, call.pieces, walked_bytes);
  call.by_heads = common::Divisor(heads);
  return static_cast<unsigned>(planes) * static_cast<unsigned>(call.pieces);
}

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
  a.clear_dquery = call.sum_dquery && call.scratch.dquery == nullptr;
  a.vectors = vectors(p.out, p.value_dim, sizeof(T)) && vectors(call.gradients.dout, p.value_dim, sizeof(T));
  a.by_pieces = common::Divisor(a.pieces);
  a.by_heads = common::Divisor(p.heads);
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
  a.by_pieces = common::Divisor(a.pieces);
  a.by_heads = common::Divisor(p.heads);
  const unsigned blocks = static_cast<unsigned>(common::planes(p, p.heads) * a.pieces);
  common::convert_kernel<T><<<blocks, common::kConvertWarps * 32, 0, stream>>>(a);
  return cudaGetLastError();
}

template <class T>
cudaError_t keys(int variant, const BackwardCall& call, cudaStream_t stream) {
  switch (variant) {
    case 0:
      return launch_keys<T, 0>(call, stream);
    case 1:
      return launch_keys<T, 1>(call, stream);
    case 2:
      return launch_keys<T, 2>(call, stream);
    case 3:
      return launch_keys<T, 3>(call, stream);
    case 4:
      return launch_keys<T, 4>(call, stream);
    case 5:
      return launch_keys<T, 5>(call, stream);
    case 6:
      return launch_keys<T, 6>(call, stream);
    case 7:
      return launch_keys<T, 7>(call, stream);
    case 8:
      return launch_keys<T, 8>(call, stream);
    case 9:
      return launch_keys<T, 9>(call, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

template <class T>
cudaError_t rows(int variant, const BackwardCall& call, cudaStream_t stream) {
  switch (variant) {
    case 0:
      return launch_rows<T, 0>(call, stream);
    case 1:
      return launch_rows<T, 1>(call, stream);
    case 2:
      return launch_rows<T, 2>(call, stream);
    case 3:
      return launch_rows<T, 3>(call, stream);
    case 4:
      return launch_rows<T, 4>(call, stream);
    case 5:
      return launch_rows<T, 5>(call, stream);
    case 6:
      return launch_rows<T, 6>(call, stream);
    case 7:
      return launch_rows<T, 7>(call, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t keys_tf32(int variant, const BackwardCall& call, cudaStream_t stream) {
  switch (variant) {
    case 10:
      return launch_tf32_keys<10>(call, stream);
    case 11:
      return launch_tf32_keys<11>(call, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t rows_tf32(int variant, const BackwardCall& call, cudaStream_t stream) {
  switch (variant) {
    case 8:
      return launch_tf32_rows<8>(call, stream);
    case 9:
      return launch_tf32_rows<9>(call, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

// dK and dV, dQ where it is summed there, the mask's gradient where it is wanted.
template <class T>
cudaError_t launch_from_keys(int variant, const BackwardCall& call, cudaStream_t stream) {
  const cuda::BackwardBody body = cuda::kBackwardTiles[variant].body;
  if (body == cuda::BackwardBody::kScalar) return launch_scalar_keys<common::Sum<T>>(call, stream);
  if constexpr (sizeof(T) == 2) return keys<T>(variant, call, stream);
  return keys_tf32(variant, call, stream);
}

// dQ by itself.
template <class T>
cudaError_t launch_from_rows(int variant, BackwardCall call, cudaStream_t stream) {
  const cuda::BackwardTile& tile = cuda::kBackwardTiles[variant];
  call.gradients.dmask = nullptr;  // the keys kernel's
  if (tile.body == cuda::BackwardBody::kScalar) return launch_scalar_rows<common::Sum<T>>(call, stream);
  if constexpr (sizeof(T) == 2) return rows<T>(tile.dquery, call, stream);
  return rows_tf32(tile.dquery, call, stream);
}

template <class T>
cudaError_t run(BackwardCall call, int variant, cudaStream_t stream) {
  if (cudaError_t error = prepare<T>(call, stream); error != cudaSuccess) return error;
  if (call.gradients.deterministic && call.gradients.dmask != nullptr) {
    if (cudaError_t error = launch_scalar_mask<common::Sum<T>>(call, stream); error != cudaSuccess) return error;
    call.gradients.dmask = nullptr;
  }
  const Gradients& g = call.gradients;
  if (g.dkey.data != nullptr || g.dvalue.data != nullptr || g.dmask != nullptr || call.sum_dquery) {
    if (cudaError_t error = launch_from_keys<T>(variant, call, stream); error != cudaSuccess) return error;
  }
  if constexpr (sizeof(T) == 2) {
    if (call.scratch.dquery != nullptr) return convert<T>(call, stream);
  }
  return g.dquery.data == nullptr || call.sum_dquery ? cudaSuccess : launch_from_rows<T>(variant, call, stream);
}

}  // namespace

cudaError_t backward(const Problem& problem, const Gradients& gradients, const Plan& plan, void* workspace,
                     cudaStream_t stream) {
  BackwardCall call{};
  call.problem = problem;
  call.gradients = gradients;
  call.modifiers = common::modifiers(problem);
  call.group = problem.heads / problem.kv_heads;
  call.by_group = common::Divisor(call.group);
  call.load_bytes = plan.load_bytes;
  call.store_bytes = plan.store_bytes;
  if (cuda::kBackwardTiles[plan.variant].body != cuda::BackwardBody::kScalar) {
    call.sum_dquery = cuda::sums_dquery(gradients);
    call.scratch = common::scratch(problem, cuda::scratch_dquery(gradients, plan.variant), workspace);
  }
  switch (problem.dtype) {
    case DType::kFloat16:
      return run<__half>(call, plan.variant, stream);
    case DType::kBFloat16:
      return run<__nv_bfloat16>(call, plan.variant, stream);
    case DType::kFloat32:
      return run<float>(call, plan.variant, stream);
    case DType::kFloat64:
      return run<double>(call, plan.variant, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace flash::sm80
