// sm90/backward.cu: a plan becomes arguments and launches: prepare, main, then convert or dQ by itself. The kernels are in instances/.
#include <algorithm>
#include <climits>
#include <cmath>

#include "cuda/sm90/backward.h"
#include "cuda/sm90/backward_launch.cuh"
#include "cuda/sm90/counters.h"
#include "cuda/sm90/forward_arguments.h"
#include "cuda/sm90/tensor_map.h"

namespace flash::sm90 {
namespace {

using problem::Gradients;
using problem::Problem;

// How much larger the main kernel makes a P that it cuts off at 16 bits (backward_worker.cuh): what that takes away on average, where
// logarithms of mantissas are evenly distributed.
constexpr double kRaise = 0x1p-9 * problem::Softmax<double>::kLog2e;

struct Encoder {
  const Problem& p;
  CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  cudaError_t error = cudaSuccess;

  void operator()(CUtensorMap* to, const problem::Array& array, int64_t dim, bool keys, int box) {
    if (array.data == nullptr || error != cudaSuccess) return;
    const int64_t lines = keys ? (p.packed() ? p.total_keys : p.keys) : (p.packed() ? p.total_rows : p.rows);
    error = encode(to, array, p.dtype, dim, lines, keys ? p.kv_heads : p.heads, p.batch, p.packed(), box, promotion);
  }
};

// Of the two kernels that compute dQ apart from dK and dV.
constexpr CUtensorMapL2promotion kApart = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;

// The launch of dQ by itself, after that of dK and dV.
cudaError_t set_rows(RowArguments* a, const Problem& p, const Gradients& g, const BackwardArguments& main) {
  const RowGradientTile& tile = kRowGradientTiles[row_gradient_variant(p)];
  Encoder encode_map{p, kApart};
  encode_map(&a->query, p.query, p.head_dim, false, rows_of(tile));
  encode_map(&a->gradient, g.dout, p.value_dim, false, rows_of(tile));
  encode_map(&a->key, p.key, p.head_dim, true, tile.keys);
  encode_map(&a->value, p.value, p.value_dim, true, tile.keys);
  encode_map(&a->out, g.dquery, p.head_dim, false, 16);
  // Sections of about one size: after a last one of few planes, with their longest tiles first, blocks would end far apart.
  const int64_t planes = p.heads * (p.packed() ? 1 : p.batch), plane_bytes = p.keys * (p.head_dim + p.value_dim) * 2;
  const int64_t most = std::max<int64_t>(kSectionBytes / plane_bytes, 1), sections = (planes + most - 1) / most;
  set_row_work(a, p, row_gradient_tiles(p), (planes + sections - 1) / sections * plane_bytes);
  a->delta = static_cast<const float*>(g.delta);
  a->scale = static_cast<float>(p.scale);
  a->scale_log2 = main.scale_log2;
  a->counter = main.counter + 2;
  a->after_keys = main.write_dkey || main.write_dvalue;
  return encode_map.error;
}

struct Launches {
  const Problem& p;
  const Gradients& g;
  const problem::Plan& plan;
  const BackwardTile& tile;
  const BackwardWorkspace places;
  char* const memory;
  const int64_t planes;  // (sequence, head) pairs, packed heads
  const bool capped, by_rows;
  const double raise;  // of P
  common::Scratch scratch{};
  BackwardArguments main{};
  int cleared_planes = INT_MAX;  // by the kernel before the main one

  Launches(const Problem& p, const Gradients& g, const problem::Plan& plan, void* workspace)
      : p(p),
        g(g),
        plan(plan),
        tile(kBackwardTiles[plan.variant]),
        places(backward_workspace(p, g, plan.variant)),
        memory(static_cast<char*>(workspace)),
        planes(p.heads * (p.packed() ? 1 : p.batch)),
        capped(p.softcap > 0),
        by_rows(plan.row_blocks > 0),
        raise(!capped && p.dtype == problem::DType::kBFloat16 ? kRaise : 0) {
    scratch.head_blocks = places.head_blocks;
    scratch.batch_blocks = p.packed() ? 1 : p.heads * places.head_blocks;
    scratch.columns = p.head_dim / 8;
    if (g.dquery.data != nullptr && !by_rows) scratch.dquery = reinterpret_cast<float*>(memory + places.dquery_at);
    set_work();
  }

  // All of the main kernel's arguments but the maps and the counter.
  void set_work() {
    main.statistics = reinterpret_cast<const uint4*>(memory + places.statistics_at);
    main.dquery = scratch.dquery;
    main.head_units = static_cast<int>(places.head_units);
    main.head_blocks = static_cast<int>(places.head_blocks);
    main.column_groups = static_cast<int>(scratch.columns);
    main.cu_seqlens_q = p.cu_seqlens_q;
    main.cu_seqlens_k = p.cu_seqlens_k;
    main.total_rows = static_cast<int>(p.total_rows);
    main.total_keys = static_cast<int>(p.total_keys);
    main.heads = static_cast<int>(p.heads);
    main.kv_heads = static_cast<int>(p.kv_heads);
    main.batch = static_cast<int>(p.batch);
    main.group = static_cast<int>(p.heads / p.kv_heads);
    main.rows = static_cast<int>(p.rows);
    main.keys = static_cast<int>(p.keys);
    main.left = clamp(p.left);
    main.right = clamp(p.right);
    main.bottom_right = p.bottom_right;
    main.write_dkey = g.dkey.data != nullptr;
    main.write_dvalue = g.dvalue.data != nullptr;
    main.scale = static_cast<float>(p.scale / (1 + raise));
    main.scale_log2 = static_cast<float>((capped ? p.softcap : p.scale) * problem::Softmax<double>::kLog2e);
    main.unit = 1u << 16;
    main.cap_scale = capped ? static_cast<float>(p.scale / p.softcap) : 0.f;
    main.planes = static_cast<int>(p.packed() ? p.kv_heads : p.batch * p.kv_heads);
    main.tiles = static_cast<int>(backward_tiles(p, plan.variant));
    main.key_tiles = main.tiles / main.planes;
    if (tile.turn > 0) {
      main.passed = reinterpret_cast<unsigned*>(memory + places.turns_at);
      main.turn = tile.turn;
    }
    const bool uneven = !p.packed() && p.right < problem::kOpen;
    // Tiles that run side by side are at about the same query head of their groups: one head of a plane counts.
    const int64_t head_bytes = section_bytes_of_head(p);
    // Tiles of a section, per block: measured, 1 is 2 % faster than 2 for short sequences, 1 % slower for long ones.
    const int64_t longest = divide_up(p.keys, tile.keys), waves = longest <= 8 ? 1 : 2;
    const int64_t most = std::min<int64_t>(kSectionBytes / std::max<int64_t>(head_bytes, 1), waves * plan.blocks / longest);
    // Packed, a plane is a head of all sequences: in sections, one sequence is worked on after the other.
    main.section = tile.turn > 0          ? static_cast<int>(turn_section(p))
                   : uneven || p.packed() ? static_cast<int>(std::clamp<int64_t>(most, 1, main.planes))
                                          : 0;
    // The main kernel clears the sums, but for short sequences whose sections reach far ahead: 4 % slower at 512 rows of 128.
    if (scratch.dquery != nullptr && !p.packed() && !(uneven && p.rows <= 512)) {
      main.cleared = reinterpret_cast<unsigned*>(memory + places.cleared_at);
      main.plane_bytes = main.group * places.head_blocks * scratch.columns * common::kBlockElements * 4;
      main.slice_bytes = static_cast<int>((main.plane_bytes / 512 + main.key_tiles - 1) / main.key_tiles * 512);
      // Enough that a tile waits for slices of tiles that were taken before all that run beside it, in whole sections.
      const int64_t unit = std::max(main.section, 1), tiles = unit * main.key_tiles;
      cleared_planes = static_cast<int>(std::min<int64_t>((tiles + plan.blocks + tiles - 1) / tiles * unit, main.planes));
      main.ahead = cleared_planes * main.key_tiles;
    }
    if (tile.turn > 0) cleared_planes = std::min(cleared_planes, main.planes);
    // Where blocks end far apart, dQ of finished planes is converted meanwhile.
    if (tells_finished(tile) && (tile.turn > 0 || (main.cleared != nullptr && !uneven)))
      main.finished = reinterpret_cast<unsigned*>(memory + places.finished_at);
  }

  template <class T>
  cudaError_t prepare(cudaStream_t stream) const {
    PrepareArguments a{};
    a.problem = p;
    a.gradients = g;
    a.scratch = scratch;
    a.statistics = reinterpret_cast<uint4*>(memory + places.statistics_at);
    a.units = static_cast<int>(places.head_units);
    a.lse_scale = capped ? 1.f : static_cast<float>(1 / (p.scale * problem::Softmax<double>::kLog2e));
    a.lse_raise = static_cast<float>(std::log2(1 + raise)) * a.lse_scale;
    a.cleared_planes = cleared_planes;
    a.cleared = tile.turn > 0 ? reinterpret_cast<unsigned*>(memory + places.cleared_at) : main.cleared;
    a.counts = 2 * main.planes + static_cast<int>(places.turns);
    a.slices = main.key_tiles;
    a.gap_blocks = p.packed() ? plan.blocks : 0;
    return launch_backward_prepare<T>(plan.variant, a, static_cast<unsigned>(planes * places.head_units), stream);
  }

  template <class T>
  cudaError_t keys(cudaStream_t stream) {
    if (!main.write_dkey && !main.write_dvalue && main.dquery == nullptr) return cudaSuccess;
    Encoder encode_map{p};
    if (by_rows) encode_map.promotion = kApart;
    encode_map(&main.query, p.query, p.head_dim, false, tile.rows);
    encode_map(&main.gradient, g.dout, p.value_dim, false, tile.rows);
    encode_map(&main.key, p.key, p.head_dim, true, tile.keys);
    encode_map(&main.value, p.value, p.value_dim, true, tile.keys);
    encode_map(&main.dkey, g.dkey, p.head_dim, true, 16);
    encode_map(&main.dvalue, g.dvalue, p.value_dim, true, 16);
    if (encode_map.error != cudaSuccess) return encode_map.error;
    const int blocks = static_cast<int>(std::min<int64_t>(plan.blocks, main.tiles));
    // Where tiles wait for slices that takers of others clear, or for their turn, no tile may be a block's before it runs: other work may
    // have its place.
    main.given = main.cleared == nullptr && tile.turn == 0 ? blocks : 0;
    return launch_backward<T>(plan.variant, capped, main, static_cast<unsigned>(blocks), stream);
  }

  template <class T>
  cudaError_t convert(cudaStream_t stream) const {
    const int64_t pieces = common::pieces(p.cu_seqlens_q, p.rows, p.total_rows, p.batch, kConvertRows);
    const ConvertArguments a{
        p, g.dquery, scratch, static_cast<int>(pieces), main.scale, main.finished, static_cast<unsigned>(main.key_tiles)};
    return launch_backward_convert<T>(plan.variant, a, static_cast<unsigned>(planes * pieces), stream);
  }

  template <class T>
  cudaError_t rows(cudaStream_t stream) const {
    RowArguments a{};
    if (const cudaError_t error = set_rows(&a, p, g, main); error != cudaSuccess) return error;
    return launch_backward_rows<T>(row_gradient_variant(p), a, static_cast<unsigned>(plan.row_blocks), stream);
  }

  template <class T>
  cudaError_t run(cudaStream_t stream) {
    // The counters first: a memset between two kernels would part them. Maps are made while the GPU prepares.
    if (const cudaError_t error = counters(stream, memory, &main.counter); error != cudaSuccess) return error;
    if (const cudaError_t error = prepare<T>(stream); error != cudaSuccess) return error;
    if (const cudaError_t error = keys<T>(stream); error != cudaSuccess) return error;
    if (by_rows) return rows<T>(stream);
    return scratch.dquery != nullptr ? convert<T>(stream) : cudaSuccess;
  }
};

}  // namespace

cudaError_t backward(const Problem& p, const Gradients& g, const problem::Plan& plan, void* workspace, cudaStream_t stream) {
  const int64_t slab = backward_slab(p, g, plan.variant);
  for (int64_t first = 0; first < p.kv_heads; first += slab) {
    Gradients part = g;
    const Problem call = slab_of(p, &part, first, std::min(slab, p.kv_heads - first));
    Launches launches(call, part, plan, workspace);
    const cudaError_t error =
        p.dtype == problem::DType::kFloat16 ? launches.run<__half>(stream) : launches.run<__nv_bfloat16>(stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace flash::sm90
