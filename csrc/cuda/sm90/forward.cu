// sm90/forward.cu: a plan becomes arguments and one launch. The kernels are in instances/.
#include <algorithm>

#include "cuda/sm90/counters.h"
#include "cuda/sm90/forward.h"
#include "cuda/sm90/forward_arguments.h"
#include "cuda/sm90/forward_launch.cuh"
#include "cuda/sm90/forward_stream_launch.cuh"
#include "cuda/sm90/tensor_map.h"
#include "problem/softmax.h"

namespace flash::sm90 {
namespace {

using problem::Problem;

// K and V of a section, the planes that are worked on at the same time, stay in L2. Its longest tiles run first and fetch all its keys
// from DRAM, which then binds and is idle later: no more planes than give two waves of tiles. And all heads of a sequence or a divisor of
// them, since the rows of heads are neighbours in memory. Measured causal at dim 128, sections of 8, 16, 32 MB: 512 376, 381, 350 TF,
// 1k 518, 533, 523, 2k 650, 665, 659; of the same sizes, but not of whole heads: 359, 504, 637.
int64_t section_bytes(const Problem& p, int64_t tiles, int64_t blocks) {
  const int64_t planes = p.packed() ? p.heads : p.batch * p.heads, plane_bytes = p.keys * (p.head_dim + p.value_dim) * 2;
  const int64_t fit = std::max<int64_t>((32 << 20) / plane_bytes, 1), busy = 2 * blocks * planes / tiles;
  int64_t section = std::min(fit, std::max(busy, p.heads));
  if (section >= p.heads) return section / p.heads * p.heads * plane_bytes;
  while (p.heads % section != 0) --section;
  return section * plane_bytes;
}

cudaError_t encode_maps(ForwardArguments* arguments, const Problem& p, const ForwardTile& tile) {
  cudaError_t error = cudaSuccess;
  const auto encode_map = [&](CUtensorMap* map, const problem::Array& array, int64_t dim, bool keys, int box_rows) {
    const int64_t lines = keys ? (p.packed() ? p.total_keys : p.keys) : (p.packed() ? p.total_rows : p.rows);
    if (error == cudaSuccess)  // 256 bytes for a miss cost 1 to 4 % at 512 and 1k
      error = encode(map, array, p.dtype, dim, lines, keys ? p.kv_heads : p.heads, p.batch, p.packed(), box_rows,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  };
  encode_map(&arguments->query, p.query, p.head_dim, false, rows_of(tile) / query_parts(tile));
  encode_map(&arguments->key, p.key, p.head_dim, true, tile.keys);
  encode_map(&arguments->value, p.value, p.value_dim, true, tile.keys);
  encode_map(&arguments->out, p.out, p.value_dim, false, 16);
  return error;
}

}  // namespace

cudaError_t forward(const Problem& p, const problem::Plan& plan, void* workspace, cudaStream_t stream) {
  const ForwardTile& tile = kForwardTiles[plan.variant];
  ForwardArguments arguments{};
  if (const cudaError_t error = encode_maps(&arguments, p, tile); error != cudaSuccess) return error;
  const int64_t tiles = forward_tiles(p, plan.variant);
  set_row_work(&arguments, p, tiles, section_bytes(p, tiles, plan.blocks));
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
  if (tile.stream) {
    const StreamArguments streamed{arguments, stream_of(p, tile, plan.blocks)};
    return p.dtype == problem::DType::kFloat16 ? launch_stream<__half>(plan.variant, streamed, stream)
                                               : launch_stream<__nv_bfloat16>(plan.variant, streamed, stream);
  }
  if (const cudaError_t error = counters(stream, workspace, &arguments.counter); error != cudaSuccess) return error;
  const unsigned blocks = static_cast<unsigned>(plan.blocks);
  return p.dtype == problem::DType::kFloat16 ? launch_forward<__half>(plan.variant, capped, arguments, blocks, stream)
                                             : launch_forward<__nv_bfloat16>(plan.variant, capped, arguments, blocks, stream);
}

}  // namespace flash::sm90
