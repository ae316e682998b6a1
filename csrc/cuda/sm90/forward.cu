// sm90/forward.cu: a plan becomes arguments and one launch. The kernels are in instances/.
#include <algorithm>

#include "cuda/sm90/counters.h"
#include "cuda/sm90/forward.h"
#include "cuda/sm90/forward_arguments.h"
#include "cuda/sm90/forward_launch.cuh"
#include "cuda/sm90/tensor_map.h"
#include "problem/softmax.h"

namespace flash::sm90 {
namespace {

using problem::Problem;

// K and V of the planes that are worked on at the same time stay in L2. Short ones go in smaller sections, of about a wave of tiles: the
// longest tiles of a section run first and fetch all its keys from DRAM, which then binds, and is idle later. Causal 512 +7 % at dim 128.
int64_t section_bytes(const Problem& p, int64_t tiles, int64_t blocks) {
  constexpr int64_t kMost = 32 << 20;
  const int64_t planes = p.packed() ? p.heads : p.batch * p.heads, keys = p.packed() ? p.total_keys : p.keys;
  const int64_t waves = std::max<int64_t>(keys / 1024, 1), row_tiles = tiles / planes;
  return std::min(kMost, (waves * blocks / row_tiles + 1) * keys * (p.head_dim + p.value_dim) * 2);
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
  if (const cudaError_t error = counters(stream, workspace, &arguments.counter); error != cudaSuccess) return error;
  const unsigned blocks = static_cast<unsigned>(plan.blocks);
  return p.dtype == problem::DType::kFloat16 ? launch_forward<__half>(plan.variant, capped, arguments, blocks, stream)
                                             : launch_forward<__nv_bfloat16>(plan.variant, capped, arguments, blocks, stream);
}

}  // namespace flash::sm90
