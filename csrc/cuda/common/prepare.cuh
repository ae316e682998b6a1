// common/prepare.cuh: what backward needs of every row before its main kernel.
//   delta = rowsum(dout * out) - dlse, written to gradients.delta and, padded, to the scratch;
//   lse2 = lse in log2 units, +inf for a row that sees nothing, so that every P = 2^(score - lse2) of it is 0 without a test;
//   the sums of dQ become zero, in the scratch or in dq itself.
// One read of out and dout: bound by memory bandwidth.
#pragma once
#include "cuda/common/divisor.h"
#include "cuda/common/element.cuh"
#include "cuda/common/locate.cuh"
#include "cuda/common/scratch.h"
#include "problem/coords.h"
#include "problem/softmax.h"

namespace flash::common {

inline constexpr int kPrepareThreads = 256;
inline constexpr int kPrepareLanes = 8;  // of a warp share a row
static_assert(kPrepareRows * kPrepareLanes == kPrepareThreads && kPrepareRows % kBlockRows == 0);

struct PrepareArguments {
  problem::Problem problem;
  problem::Gradients gradients;
  Scratch scratch;     // lse2 null: the kernels read lse and gradients.delta themselves
  int64_t pieces = 0;  // of kPrepareRows rows, per plane
  Divisor by_pieces{}, by_heads{};
  bool vectors = false;  // out and dout are read 16 bytes at a time
  bool clear_dquery = false;
};

// This lane's share of dout . out in one row, added up in the same order however the rows are aligned.
template <class T>
__device__ __forceinline__ Sum<T> row_product(const T* gOut, const T* gGradient, int64_t columns, int lane, bool vectors) {
  constexpr int kWidth = 16 / sizeof(T);
  Sum<T> sum = 0;
  if (vectors) {
#pragma unroll 2
    for (int64_t c = lane * kWidth; c < columns; c += kPrepareLanes * kWidth) {
      const uint4 o = __ldg(reinterpret_cast<const uint4*>(gOut + c)), g = __ldg(reinterpret_cast<const uint4*>(gGradient + c));
      const T* out = reinterpret_cast<const T*>(&o);
      const T* gradient = reinterpret_cast<const T*>(&g);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum += widen(out[e]) * widen(gradient[e]);
    }
  } else {
    for (int64_t c = lane * kWidth; c < columns; c += kPrepareLanes * kWidth)
#pragma unroll
      for (int e = 0; e < kWidth; ++e)
        if (c + e < columns) sum += widen(gOut[c + e]) * widen(gGradient[c + e]);
  }
  return sum;
}

// Of an lse this large fp32 keeps less than its whole part, and a P above 1 could grow without bound: moved up by its rounding.
__device__ __forceinline__ float bounded(float lse2) {
  return fabsf(lse2) < 0x1p24f ? lse2 : fmaf(fabsf(lse2), 0x1p-22f, lse2);
}

template <class T>
__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(const __grid_constant__ PrepareArguments a) {
  const problem::Problem& p = a.problem;
  uint32_t slot, head;
  int64_t batch = a.by_heads.divide(a.by_pieces.divide(blockIdx.x, &slot), &head);  // packed: plane is the head
  const int64_t piece = find_piece(p.cu_seqlens_q, p.batch, kPrepareRows, slot, &batch);
  const problem::Sequence s = problem::sequence(p, batch);
  const int64_t first = piece * kPrepareRows;
  if (piece < 0 || first >= s.rows) return;

  const int64_t block = a.scratch.first_block(s, head) + first / kBlockRows;
  const int64_t row = first + threadIdx.x / kPrepareLanes;
  const int lane = threadIdx.x % kPrepareLanes;
  Sum<T> delta = 0, lse = -INFINITY;
  if (row < s.rows) {
    const problem::Array& out = p.out;
    const problem::Array& dout = a.gradients.dout;
    delta = row_product(static_cast<const T*>(out.data) + problem::offset(out, batch, head, s.row + row),
                        static_cast<const T*>(dout.data) + problem::offset(dout, batch, head, s.row + row), p.value_dim, lane,
                        a.vectors);
  }
#pragma unroll
  for (int i = kPrepareLanes / 2; i > 0; i /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, i);
  if (row < s.rows && lane == 0) {
    const int64_t place = problem::lse_offset(p, batch, head, s.row + row);
    if (a.gradients.dlse != nullptr) delta -= static_cast<const Sum<T>*>(a.gradients.dlse)[place];
    lse = static_cast<const Sum<T>*>(p.lse)[place];
    static_cast<Sum<T>*>(a.gradients.delta)[place] = delta;
  }
  if (a.clear_dquery && row < s.rows) {
    const problem::Array& dq = a.gradients.dquery;
    T* gRow = static_cast<T*>(dq.data) + problem::offset(dq, batch, head, s.row + row);
    for (int64_t c = lane; c < p.head_dim; c += kPrepareLanes) gRow[c] = T(0.f);
  }
  if (a.scratch.lse2 == nullptr) return;

  const int64_t blocks = min(static_cast<int64_t>(kPrepareRows / kBlockRows), (s.rows - first + kBlockRows - 1) / kBlockRows);
  if (lane == 0 && row - first < blocks * kBlockRows) {
    const int64_t place = block * kBlockRows + row - first;
    a.scratch.delta[place] = static_cast<float>(delta);
    a.scratch.lse2[place] = bounded(static_cast<float>(problem::Softmax<Sum<T>>::lse2(lse)));
  }
  if (a.scratch.dquery == nullptr) return;
  float4* gSum = reinterpret_cast<float4*>(a.scratch.dquery_block(block));
  const int64_t count = blocks * a.scratch.columns * (kBlockElements / 4);
  for (int64_t i = threadIdx.x; i < count; i += kPrepareThreads) gSum[i] = float4{0, 0, 0, 0};
}

}  // namespace flash::common
