// sm90/forward.cu: a plan becomes arguments and one launch. The kernels are in instances/.
#include <algorithm>

#include "cuda/sm90/counters.h"
#include "cuda/sm90/forward.h"
#include "cuda/sm90/forward_launch.cuh"
#include "cuda/sm90/gaps.h"
#include "cuda/sm90/tensor_map.h"
#include "problem/softmax.h"

namespace flash::sm90 {
namespace {

using problem::Problem;

constexpr int64_t kSectionBytes = 32 << 20;  // K and V of the heads that are worked on at the same time stay in L2

int clamp(int64_t end) { return static_cast<int>(std::min<int64_t>(std::max<int64_t>(end, -(1 << 29)), 1 << 29)); }

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
  arguments.lse = static_cast<float*>(p.lse);
  arguments.lse_batch = p.lse_batch;
  arguments.lse_head = p.lse_head;
  arguments.sinks = static_cast<const float*>(p.sinks);
  arguments.cu_seqlens_q = p.cu_seqlens_q;
  arguments.cu_seqlens_k = p.cu_seqlens_k;
  arguments.total_rows = static_cast<int>(p.total_rows);
  arguments.total_keys = static_cast<int>(p.total_keys);
  arguments.batch = static_cast<int>(p.batch);
  arguments.heads = common::Divisor(p.heads);
  arguments.group = common::Divisor(p.heads / p.kv_heads);
  arguments.rows = static_cast<int>(p.rows);
  arguments.keys = static_cast<int>(p.keys);
  arguments.left = clamp(p.left);
  arguments.right = clamp(p.right);
  arguments.bottom_right = p.bottom_right;
  arguments.edges = p.packed() || p.right < problem::kOpen || p.left < problem::kOpen || p.keys % tile.keys != 0;
  const bool capped = p.softcap > 0;
  arguments.scale_log2 = static_cast<float>((capped ? p.softcap : p.scale) * problem::Softmax<double>::kLog2e);
  arguments.cap_scale = capped ? static_cast<float>(p.scale / p.softcap) : 0.f;
  arguments.tiles = static_cast<int>(forward_tiles(p, plan.variant));
  const int planes = static_cast<int>(p.packed() ? p.heads : p.batch * p.heads);
  const int row_tiles = arguments.tiles / planes;
  arguments.row_tiles = common::Divisor(row_tiles);
  arguments.uneven = !p.packed() && p.right < problem::kOpen;  // packed sequences are ordered one by one
  if (arguments.uneven) {
    const int64_t plane_bytes = p.keys * (p.head_dim + p.value_dim) * 2;
    const int section = static_cast<int>(std::clamp<int64_t>(kSectionBytes / plane_bytes, 1, planes));
    arguments.full_sections = planes / section;
    arguments.section_tiles = common::Divisor(row_tiles * section);
    arguments.section = common::Divisor(section);
    arguments.last_section = common::Divisor(std::max(planes % section, 1));
  }
  if (const cudaError_t error = counters(stream, workspace, &arguments.counter); error != cudaSuccess) return error;
  if (p.packed())
    if (const cudaError_t error = clear_gaps(p, stream); error != cudaSuccess) return error;
  const unsigned blocks = static_cast<unsigned>(plan.blocks);
  return p.dtype == problem::DType::kFloat16 ? launch_forward<__half>(plan.variant, capped, arguments, blocks, stream)
                                             : launch_forward<__nv_bfloat16>(plan.variant, capped, arguments, blocks, stream);
}

}  // namespace flash::sm90
