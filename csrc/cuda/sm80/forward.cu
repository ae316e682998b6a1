// sm80/forward.cu: from a Problem and its Plan to a kernel call.
#include <array>
#include <utility>

#include "cuda/common/element.cuh"
#include "cuda/sm80/forward.h"
#include "cuda/sm80/forward_block.cuh"
#include "cuda/tiles.h"

namespace flash::sm80 {

// Defined by the files of instances/ for the types that a row of the table serves.
template <class T, int kVariant>
cudaError_t launch_forward(const ForwardCall& call, int64_t blocks, cudaStream_t stream);

namespace {

using problem::DType;
using problem::Plan;
using problem::Problem;

using Launch = cudaError_t (*)(const ForwardCall&, int64_t, cudaStream_t);

template <class T, int kVariant>
constexpr Launch launch_of() {
  if constexpr (cuda::serves(cuda::kForwardTiles[kVariant], sizeof(T))) return launch_forward<T, kVariant>;
  return nullptr;
}

template <class T, size_t... kVariants>
Launch launch_of(int variant, std::index_sequence<kVariants...>) {
  static constexpr std::array<Launch, sizeof...(kVariants)> kLaunches{launch_of<T, kVariants>()...};
  return kLaunches[variant];
}

Launch launch_of(DType dtype, int variant) {
  constexpr std::make_index_sequence<cuda::kForwardVariants> kAll;
  switch (dtype) {
    case DType::kFloat16:
      return launch_of<__half>(variant, kAll);
    case DType::kBFloat16:
      return launch_of<__nv_bfloat16>(variant, kAll);
    case DType::kFloat32:
      return launch_of<float>(variant, kAll);
    case DType::kFloat64:
      return launch_of<double>(variant, kAll);
    default:
      return nullptr;
  }
}

}  // namespace

cudaError_t forward(const Problem& p, const Plan& plan, void* workspace, cudaStream_t stream) {
  if (plan.variant < 0 || plan.variant >= cuda::kForwardVariants) return cudaErrorInvalidDeviceFunction;
  const Launch launch = launch_of(p.dtype, plan.variant);
  if (launch == nullptr) return cudaErrorInvalidDeviceFunction;
  const cuda::ForwardTile& tile = cuda::kForwardTiles[plan.variant];

  const int64_t planes = common::planes(p, p.heads);
  const int64_t row_tiles = common::pieces(p.cu_seqlens_q, p.rows, p.total_rows, p.batch, tile.rows);
  const int64_t blocks = planes * row_tiles * plan.splits;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;

  const int64_t plane_bytes = (p.packed() ? p.total_keys : p.keys) * (p.head_dim + p.value_dim) * problem::size_of(p.dtype);
  ForwardCall call;
  call.problem = p;
  call.modifiers = common::modifiers(p);
  call.load_bytes = plan.load_bytes;
  call.store_bytes = plan.store_bytes;
  call.sections = common::Sections(planes, row_tiles * plan.splits, plane_bytes);
  call.row_tiles = static_cast<int>(row_tiles);
  call.splits = plan.splits;
  call.by_splits = common::Divisor(plan.splits);
  call.by_heads = common::Divisor(p.heads);
  call.by_group = common::Divisor(p.heads / p.kv_heads);
  call.part_count = p.heads * (p.packed() ? p.total_rows : p.batch * p.rows);
  call.part_out = static_cast<float*>(workspace);
  call.part_lse = call.part_out + plan.splits * call.part_count * p.value_dim;
  return launch(call, blocks, stream);
}

}  // namespace flash::sm80
