// sm90/forward.cu: a plan becomes arguments and one launch. The kernels are in instances/.
#include "cuda/sm90/counters.h"
#include "cuda/sm90/forward.h"
#include "cuda/sm90/forward_arguments.h"
#include "cuda/sm90/forward_launch.cuh"
#include "cuda/sm90/tensor_map.h"
#include "problem/softmax.h"

namespace flash::sm90 {
namespace {

using problem::Problem;

constexpr int64_t kSectionBytes = 32 << 20;  // K and V of the heads that are worked on at the same time stay in L2

cudaError_t encode_maps(ForwardArguments* arguments, const Problem& p, const ForwardTile& tile) {
  const bool packed = p.packed();
  const int64_t rows = packed ? p.total_rows : p.rows, keys = packed ? p.total_keys : p.keys;
  cudaError_t error = encode(&arguments->query, p.query, p.dtype, p.head_dim, rows, p.heads, p.batch, packed, rows_of(tile));
  if (error == cudaSuccess)
    error = encode(&arguments->key, p.key, p.dtype, p.head_dim, keys, p.kv_heads, p.batch, packed, tile.keys);
  if (error == cudaSuccess)
    error = encode(&arguments->value, p.value, p.dtype, p.value_dim, keys, p.kv_heads, p.batch, packed, tile.keys);
  if (error == cudaSuccess) error = encode(&arguments->out, p.out, p.dtype, p.value_dim, rows, p.heads, p.batch, packed, 16);
  return error;
}

}  // namespace

cudaError_t forward(const Problem& p, const problem::Plan& plan, void* workspace, cudaStream_t stream) {
  const ForwardTile& tile = kForwardTiles[plan.variant];
  ForwardArguments arguments{};
  if (const cudaError_t error = encode_maps(&arguments, p, tile); error != cudaSuccess) return error;
  set_row_work(&arguments, p, forward_tiles(p, plan.variant), kSectionBytes);
  arguments.sinks = static_cast<const float*>(p.sinks);
  if (p.packed()) {
    const int64_t bytes = problem::size_of(p.dtype);
    arguments.gaps = static_cast<char*>(p.out.data);
    arguments.gap_row = p.out.row * bytes;
    arguments.gap_head = p.out.head * bytes;
    arguments.gap_chunks = static_cast<int>(p.value_dim * bytes / 16);
  }
  arguments.edges = p.packed() || p.right < problem::kOpen || p.left < problem::kOpen || p.keys % tile.keys != 0;
  const bool capped = p.softcap > 0;
  arguments.scale_log2 = static_cast<float>((capped ? p.softcap : p.scale) * problem::Softmax<double>::kLog2e);
  arguments.cap_scale = capped ? static_cast<float>(p.scale / p.softcap) : 0.f;
  if (const cudaError_t error = counters(stream, workspace, &arguments.counter); error != cudaSuccess) return error;
  const unsigned blocks = static_cast<unsigned>(plan.blocks);
  return p.dtype == problem::DType::kFloat16 ? launch_forward<__half>(plan.variant, capped, arguments, blocks, stream)
                                             : launch_forward<__nv_bfloat16>(plan.variant, capped, arguments, blocks, stream);
}

}  // namespace flash::sm90
