// sm90/backward_prepare.cuh: the kernels before and after the Hopper backward, both bound by memory bandwidth.
// Before, for every row: delta = rowsum(dout * out) - dlse, to gradients.delta; the statistics (below); sums of dQ become zero.
// After: dq = scale * sum, in the element type.
#pragma once
#include "cuda/common/element.cuh"
#include "cuda/common/locate.cuh"
#include "cuda/common/scratch.h"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm90/backward_work.cuh"
#include "cuda/sm90/gaps.cuh"
#include "cuda/tile/layout.cuh"
#include "problem/coords.h"
#include "problem/softmax.h"

namespace flash::sm90 {

// A float as a sum of 8 products of fixed factors and 16-bit numbers, exact to fp32: one step of a product against rows of the
// factors adds it to every element of a column. split() of NaN is NaN.
template <class T>
struct Terms;

template <>
struct Terms<__nv_bfloat16> {                                                                         // 3 x 8 bits
  static __device__ __forceinline__ uint4 factors() { return make_uint4(0x3F803F80, 0x3F80, 0, 0); }  // 1 1 1 0 0 0 0 0
  static __device__ __forceinline__ uint4 split(float x) {
    const float high = common::widen(__float2bfloat16_rn(x)), rest = x - high;
    const float middle = common::widen(__float2bfloat16_rn(rest));
    return make_uint4(ptx::pack(high, middle, __nv_bfloat16()), ptx::pack(rest - middle, 0.f, __nv_bfloat16()), 0, 0);
  }
};

template <>
struct Terms<__half> {  // the factors make up for the narrow range
  static __device__ __forceinline__ uint4 factors() { return make_uint4(0x78007800, 0x3C003C00, 0x0C000C00, 0); }
  static __device__ __forceinline__ uint4 split(float x) {
    float term[6];
#pragma unroll
    for (int i = 0; i < 6; ++i) {
      const float factor = i < 2 ? 0x1p15f : i < 4 ? 1.f : 0x1p-12f;
      float t = x * (1.f / factor);
      if (fabsf(t) > 65504.f) t = copysignf(65504.f, t);
      term[i] = common::widen(__float2half_rn(t));
      x -= term[i] * factor;
    }
    return make_uint4(ptx::pack(term[0], term[1], __half()), ptx::pack(term[2], term[3], __half()),
                      ptx::pack(term[4], term[5], __half()), 0);
  }
};

inline constexpr int kRowKernelThreads = 256;

// Blocks take their work from the end: what a kernel touches last is what the next, from the start, or the one before, from the end,
// finds in L2.
__device__ __forceinline__ unsigned from_the_end(unsigned blocks) { return blocks - 1 - blockIdx.x; }

// The plane of a block and its place there, `pieces` per plane. Packed planes are heads of all sequences: blocks that run side by side
// take the same rows of all of them, which lie side by side.
struct RowBlock {
  int plane, slot;
};
__device__ __forceinline__ RowBlock row_block(const problem::Problem& p, unsigned index, int pieces) {
  const unsigned width = p.cu_seqlens_q != nullptr ? static_cast<unsigned>(p.heads) : pieces, line = index / width,
                 place = index - line * width;
  return p.cu_seqlens_q != nullptr ? RowBlock{static_cast<int>(place), static_cast<int>(line)}
                                   : RowBlock{static_cast<int>(line), static_cast<int>(place)};
}

struct PrepareArguments {
  problem::Problem problem;
  problem::Gradients gradients;
  common::Scratch scratch;  // dquery alone
  uint4* statistics;        // see BackwardArguments
  int units;                // blocks of statistics per plane
  float lse_scale;          // 1 / scale_log2 of the main kernel, or capped 1
  float lse_raise;          // added to the lse statistic
  int cleared_planes;       // of kv heads, whose sums of dQ are cleared here; the main kernel clears the others
  // Slices that are cleared, per plane, of `slices`, then finished tiles and what tiles have passed on (BackwardArguments); null where
  // nothing is counted.
  unsigned* cleared;
  int counts, slices;
  int gap_blocks;  // the last ones clear gradients of rows and keys that belong to no packed sequence
};

// Warp `warp` of `warps`: gradients of packed rows, or keys, that belong to no sequence are 0.
template <class T>
__device__ __forceinline__ void clear_gaps(const problem::Array& gradient, int64_t heads, int64_t dim,
                                           const int32_t* cu_seqlens, int batch, int64_t total, int64_t longest, int warp,
                                           int warps) {
  if (gradient.data == nullptr) return;
  const int lane = threadIdx.x & 31;
  const auto gap = [&](int i) { return find_gap(cu_seqlens, batch, static_cast<int>(total), static_cast<int>(longest), i); };
  for_each_gap_row(batch, gap, warp, warps, [&](int row) {
    for (int head = 0; head < heads; ++head) {
      T* to = static_cast<T*>(gradient.data) + problem::offset(gradient, 0, head, row) + lane * 8;
      if (lane * 8 < dim) *reinterpret_cast<uint4*>(to) = uint4{};
    }
  });
}
template <class T>
__device__ __forceinline__ void clear_gaps(const PrepareArguments& a, int block) {
  const problem::Problem& p = a.problem;
  const problem::Gradients& g = a.gradients;
  constexpr int kWarps = kRowKernelThreads / 32;
  const int warp = block * kWarps + threadIdx.x / 32, warps = a.gap_blocks * kWarps, batch = static_cast<int>(p.batch);
  clear_gaps<T>(g.dquery, p.heads, p.head_dim, p.cu_seqlens_q, batch, p.total_rows, p.rows, warp, warps);
  clear_gaps<T>(g.dkey, p.kv_heads, p.head_dim, p.cu_seqlens_k, batch, p.total_keys, p.keys, warp, warps);
  clear_gaps<T>(g.dvalue, p.kv_heads, p.value_dim, p.cu_seqlens_k, batch, p.total_keys, p.keys, warp, warps);
}

// The lse statistic, see BackwardArguments::scale_log2. A row that saw nothing: P = 0.
__device__ __forceinline__ float lowering(float lse, float lse_scale, float lse_raise) {
  const float lse2 = problem::Softmax<float>::lse2(lse);
  if (lse2 == INFINITY && lse == -INFINITY) return -1e30f;
  return fmaf(-bounded(lse2), lse_scale, lse_raise);
}

// Rows of a block: few, so that many blocks share a multiprocessor and hide each other's waits.
constexpr int prepare_rows(int dim) { return dim <= 64 ? 64 : 32; }

// kRows: of a block of statistics.
template <class T, int kDim, int kRows>
__global__ void __launch_bounds__(kRowKernelThreads) backward_prepare_kernel(const __grid_constant__ PrepareArguments a) {
  constexpr int kPrepareRows = prepare_rows(kDim);
  constexpr int kLanes = kDim / 8, kPass = kRowKernelThreads / kLanes, kPasses = kPrepareRows / kPass;  // 16 bytes a lane
  constexpr unsigned kParts = kRows / kPrepareRows;
  const problem::Problem& p = a.problem;
  ptx::launch_kernel_behind();
  if (const int i = blockIdx.x * kRowKernelThreads + threadIdx.x; i < a.counts && a.cleared != nullptr)
    a.cleared[i] = i < a.cleared_planes ? a.slices : 0;
  if (const int block = blockIdx.x - (gridDim.x - a.gap_blocks); block >= 0) return clear_gaps<T>(a, block);
  const unsigned index = from_the_end(gridDim.x - a.gap_blocks), unit = index / kParts, part = index - unit * kParts;
  const auto [plane, slot] = row_block(p, unit, a.units);
  int64_t batch = plane / p.heads;
  const int64_t head = plane - batch * p.heads;  // packed: plane is the head
  const int64_t piece = common::find_piece(p.cu_seqlens_q, p.batch, kRows, slot, &batch);
  const problem::Sequence s = problem::sequence(p, batch);
  if (piece < 0 || piece * kRows >= s.rows) return;
  const int64_t first = piece * kRows + part * kPrepareRows;
  const int count = static_cast<int>(max(int64_t{0}, min(static_cast<int64_t>(kPrepareRows), s.rows - first)));

  const int kv_plane = static_cast<int>(batch * p.kv_heads + head / (p.heads / p.kv_heads));
  if (a.scratch.dquery != nullptr && kv_plane < a.cleared_planes && count > 0) {
    float4* gSum =
        reinterpret_cast<float4*>(a.scratch.dquery_block(a.scratch.first_block(s, head) + first / common::kBlockRows));
    const int vectors = (count + common::kBlockRows - 1) / common::kBlockRows * static_cast<int>(a.scratch.columns) *
                        (common::kBlockElements / 4);
    for (int i = threadIdx.x; i < vectors; i += kRowKernelThreads) gSum[i] = float4{0, 0, 0, 0};
  }
  const problem::Array &out = p.out, &dout = a.gradients.dout;
  const int lane = threadIdx.x % kLanes, line = threadIdx.x / kLanes;
  const bool inside = lane * 8 < p.value_dim;
  const T* gOut = static_cast<const T*>(out.data) + problem::offset(out, batch, head, s.row + first + line) + lane * 8;
  const T* gGradient = static_cast<const T*>(dout.data) + problem::offset(dout, batch, head, s.row + first + line) + lane * 8;
  uint4* gStatistics = a.statistics + (static_cast<int64_t>(plane) * a.units + slot) * (2 * kRows) + part * (2 * kPrepareRows);
  const int64_t gPlace = problem::lse_offset(p, batch, head, s.row + first + line);
  uint4 rOut[kPasses], rGradient[kPasses];
  float rLse[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const bool exists = inside && i * kPass + line < count;
    rLse[i] = lane == 0 && exists ? static_cast<const float*>(p.lse)[gPlace + i * kPass] : 0.f;
    rOut[i] = rGradient[i] = make_uint4(0, 0, 0, 0);
    if (exists) rOut[i] = __ldg(reinterpret_cast<const uint4*>(gOut + i * kPass * out.row));
    if (exists) rGradient[i] = __ldg(reinterpret_cast<const uint4*>(gGradient + i * kPass * dout.row));
  }
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int row = i * kPass + line;
    const T* o = reinterpret_cast<const T*>(&rOut[i]);
    const T* g = reinterpret_cast<const T*>(&rGradient[i]);
    float delta = 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) delta += common::widen(o[e]) * common::widen(g[e]);
#pragma unroll
    for (int j = kLanes / 2; j > 0; j /= 2) delta += __shfl_xor_sync(~0u, delta, j);
    float value = lane == 0 ? -1e30f : 0.f;  // past the end of the sequence
    if (row < count) {
      const int64_t place = gPlace + i * kPass;
      if (a.gradients.dlse != nullptr) delta -= static_cast<const float*>(a.gradients.dlse)[place];
      if (lane == 0) {
        static_cast<float*>(a.gradients.delta)[place] = delta;
        value = lowering(rLse[i], a.lse_scale, a.lse_raise);
      } else {
        value = -delta;
      }
    }
    if (lane < 2) gStatistics[row / 8 * 16 + lane * 8 + row % 8] = Terms<T>::split(value);
  }
}

struct ConvertArguments {
  problem::Problem problem;
  problem::Array dquery;
  common::Scratch scratch;
  int pieces;  // of kConvertRows rows, per plane
  float scale;
  // Tiles whose dQ is added, per plane of a kv head, of `tiles`; null: the kernel before is waited for as a whole.
  const unsigned* finished;
  unsigned tiles;
};

inline constexpr int kConvertRows = 64;  // of a block

// kFull: dq has all kDim columns, which spares divisions.
template <class T, int kDim, bool kFull>
__global__ void __launch_bounds__(kRowKernelThreads) backward_convert_kernel(const __grid_constant__ ConvertArguments a) {
  __shared__ __align__(16) uint32_t sRows[kConvertRows][kDim / 2 + 4];  // 4: rows 16 bytes apart in the banks
  const problem::Problem& p = a.problem;
  const bool early = a.finished != nullptr;  // beside the last tiles of the kernel before, in its order
  const auto [plane, slot] = row_block(p, early ? blockIdx.x : from_the_end(gridDim.x), a.pieces);
  int64_t batch = plane / p.heads;
  const int64_t head = plane - batch * p.heads;
  // The last block waits in any case: what follows this kernel follows the one before, too.
  if (!early || blockIdx.x == gridDim.x - 1) {
    ptx::wait_kernel_before();
  } else {
    const unsigned* finished = a.finished + batch * p.kv_heads + head / (p.heads / p.kv_heads);
    if (threadIdx.x == 0)
      while (ptx::load_acquire(finished) < a.tiles) __nanosleep(500);
    __syncthreads();
  }
  const int64_t piece = common::find_piece(p.cu_seqlens_q, p.batch, kConvertRows, slot, &batch);
  const problem::Sequence s = problem::sequence(p, batch);
  const int64_t first = piece * kConvertRows;
  if (piece < 0 || first >= s.rows) return;

  const float* gSum = a.scratch.dquery_block(a.scratch.first_block(s, head) + first / common::kBlockRows);
  const int rows = static_cast<int>(min(static_cast<int64_t>(kConvertRows), s.rows - first));
  const int columns = kFull ? kDim / 8 : static_cast<int>(a.scratch.columns), lane = threadIdx.x & 31;
  const int groups = (rows + common::kBlockRows - 1) / common::kBlockRows * columns;
#pragma unroll 8
  for (int group = threadIdx.x / 32; group < groups; group += kRowKernelThreads / 32) {
    const float4 v = __ldcs(reinterpret_cast<const float4*>(gSum + group * common::kBlockElements + lane * 4));
    const int block = group / columns, row = block * common::kBlockRows + tile::lane_line(lane);
    const int word = (group - block * columns) * 4 + (lane & 3);
    sRows[row][word] = ptx::pack(v.x * a.scale, v.y * a.scale, T());
    sRows[row + 8][word] = ptx::pack(v.z * a.scale, v.w * a.scale, T());
  }
  __syncthreads();
  T* gOut = static_cast<T*>(a.dquery.data) + problem::offset(a.dquery, batch, head, s.row + first);
  for (int i = threadIdx.x; i < rows * columns; i += kRowKernelThreads) {
    const int row = i / columns, chunk = i - row * columns;
    *reinterpret_cast<uint4*>(gOut + row * a.dquery.row + chunk * 8) = *reinterpret_cast<const uint4*>(&sRows[row][chunk * 4]);
  }
}

}  // namespace flash::sm90
