// decode/run.cu: a plan becomes arguments and launches. All thinking is in problem/decode.cpp.
#include <algorithm>
#include <array>
#include <utility>

#include "cuda/decode/launch.h"
#include "problem/softmax.h"

namespace flash::decode {
namespace {

using problem::Decode;
using problem::Plan;
using problem::Problem;

constexpr int64_t kMostPlanes = 65535;  // y and z dimensions of a grid

Strides strides_of(const problem::Array& a) { return {a.batch, a.head, a.row}; }

int end_of(int64_t end) { return static_cast<int>(std::clamp<int64_t>(end, -(1 << 29), 1 << 29)); }

Arguments arguments_of(const Decode& d, const Plan& plan) {
  const Problem& p = d.problem;
  const Tile& tile = kTiles[plan.variant];
  Arguments a{};
  a.query = p.query.data;
  a.key = p.key.data;
  a.value = p.value.data;
  a.out = p.out.data;
  a.lse = static_cast<float*>(p.lse);
  a.query_strides = strides_of(p.query);
  a.key_strides = strides_of(p.key);
  a.value_strides = strides_of(p.value);
  a.out_strides = strides_of(p.out);
  a.lse_batch = p.lse_batch;
  a.lse_head = p.lse_head;
  a.lengths = d.cache.lengths;
  a.left_pad = d.cache.left_pad;
  a.batch_index = d.cache.batch_index;
  a.block_table = d.cache.block_table;
  a.table_stride = d.cache.table_stride;
  a.page_size = static_cast<int>(d.cache.page_size);
  a.entries = static_cast<int>(d.cache.entries);
  a.appended = static_cast<int>(d.cache.appended);
  a.capacity = static_cast<int>(p.keys);
  a.alibi_slopes = static_cast<const float*>(p.alibi_slopes);
  a.alibi_batch = p.alibi_batch;
  a.sinks = static_cast<const float*>(p.sinks);
  a.kv_heads = static_cast<int>(p.kv_heads);
  a.group = static_cast<int>(p.heads / p.kv_heads);
  a.rows = static_cast<int>(p.rows);
  a.head_dim = static_cast<int>(p.head_dim);
  a.value_dim = static_cast<int>(p.value_dim);
  a.left = end_of(p.left);
  a.right = end_of(p.right);
  a.bottom_right = p.bottom_right;
  a.evict_first = plan.evict_first;
  const bool capped = p.softcap > 0;
  a.scale_log2 = static_cast<float>((capped ? p.softcap : p.scale) * problem::Softmax<double>::kLog2e);
  a.cap_scale = capped ? static_cast<float>(p.scale / p.softcap) : 0.f;
  a.capped = capped;
  a.by_group = Divider(static_cast<unsigned>(a.group));
  a.by_splits = Divider(static_cast<unsigned>(plan.splits));
  const int lanes = a.rows * a.group;
  a.row_tiles = (lanes + tile.lanes - 1) / tile.lanes;
  a.planes = a.kv_heads * a.row_tiles;
  a.splits = plan.splits;
  a.unit = plan.unit;
  a.cluster = plan.cluster;
  a.cluster_share = std::min(lanes, tile.lanes) * (tile.bucket / 4) / plan.cluster;
  a.by_share = Divider(static_cast<unsigned>(a.cluster_share));
  a.by_page = common::Divisor(a.page_size);
  return a;
}

template <class T, size_t... kIndices>
cudaError_t launch_instance(int variant, const Arguments& a, dim3 grid, cudaStream_t stream, std::index_sequence<kIndices...>) {
  using Launch = cudaError_t (*)(const Arguments&, dim3, cudaStream_t);
  static constexpr std::array<Launch, sizeof...(kIndices)> kLaunches{launch<T, kIndices>...};
  return kLaunches[static_cast<size_t>(variant)](a, grid, stream);
}

#if defined(FLASH_ATTN_EXT_SM90)
constexpr int kBuilt = kVariants;
#else
constexpr int kBuilt = kFirstHopper;
#endif

}  // namespace

cudaError_t run(const Decode& d, const Plan& plan, void* workspace, cudaStream_t stream) {
  if (plan.variant < 0) return launch_scalar(d, stream);
  if (plan.variant >= kBuilt) return cudaErrorInvalidDeviceFunction;
  Arguments a = arguments_of(d, plan);
  const problem::DecodeWorkspace at = problem::decode_workspace(d, plan);
  if (at.tickets > 0) {
    char* memory = static_cast<char*>(workspace);
    a.part_sums = reinterpret_cast<float*>(memory);
    a.part_states = reinterpret_cast<float2*>(memory + at.sums_bytes);
    if (const cudaError_t error = tickets(stream, at.tickets, memory + at.sums_bytes + at.states_bytes, &a.tickets);
        error != cudaSuccess)
      return error;
  }
  for (int64_t batch = 0; batch < d.problem.batch; batch += kMostPlanes)
    for (int64_t plane = 0; plane < a.planes; plane += kMostPlanes) {
      a.first_batch = static_cast<int>(batch);
      a.first_plane = static_cast<int>(plane);
      const dim3 grid(static_cast<unsigned>(a.splits), static_cast<unsigned>(std::min(kMostPlanes, a.planes - plane)),
                      static_cast<unsigned>(std::min(kMostPlanes, d.problem.batch - batch)));
      constexpr std::make_index_sequence<kBuilt> kAll;
      const cudaError_t error = d.problem.dtype == problem::DType::kFloat16
                                    ? launch_instance<__half>(plan.variant, a, grid, stream, kAll)
                                    : launch_instance<__nv_bfloat16>(plan.variant, a, grid, stream, kAll);
      if (error != cudaSuccess) return error;
    }
  return cudaSuccess;
}

}  // namespace flash::decode
