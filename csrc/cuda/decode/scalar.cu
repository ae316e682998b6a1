// decode/scalar.cu: decode by plain arithmetic, for what the tensor core instances do not take: fp32, fp64, head dims above 256 or not
// multiples of 8, unaligned strides. Right, not fast. A block takes one query row of one head; its warps take keys in turn, lanes the
// columns.
#include "cuda/common/element.cuh"
#include "cuda/common/single_score.cuh"
#include "cuda/decode/launch.h"
#include "cuda/tile/reduce.cuh"
#include "problem/coords.h"
#include "problem/softmax.h"

namespace flash::decode {
namespace {

using problem::Decode;

constexpr int kWarps = 8;

template <class T>
__device__ __forceinline__ common::Sum<T> dot(const T* a, const T* b, int64_t count, int lane) {
  common::Sum<T> sum = 0;
  for (int64_t i = lane; i < count; i += 32) sum += common::widen(a[i]) * common::widen(b[i]);
  for (int n = 16; n > 0; n /= 2) sum += __shfl_xor_sync(tile::kWarp, sum, n);
  return sum;
}

template <class T, int kColumns>
__global__ void __launch_bounds__(kWarps * 32) scalar_kernel(const __grid_constant__ Decode d) {
  using Real = common::Sum<T>;
  using Softmax = problem::Softmax<Real>;
  __shared__ Real sOut[kWarps][kColumns * 32];
  __shared__ Softmax sState[kWarps];
  const problem::Problem& p = d.problem;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t row = blockIdx.x % p.rows, head = blockIdx.x / p.rows % p.heads, batch = blockIdx.x / p.rows / p.heads;
  const int64_t kv_head = problem::kv_head(p, head), length = problem::length_of(d.cache, p.keys, batch);
  const problem::Interval interval = problem::interval(p, p.rows, length);
  problem::Span span = interval.row(row);
  const int64_t pad = problem::left_pad_of(d.cache, batch);
  if (span.first < pad) span.first = pad;

  const T* query = static_cast<const T*>(p.query.data) + problem::offset(p.query, batch, head, row);
  Softmax state;
  Real out[kColumns] = {};
  for (int64_t key = span.first + warp; key < span.last; key += kWarps) {
    const int64_t entry = problem::entry_of(d.cache, batch, key), slot = problem::slot_of(d.cache, key);
    const Real product =
        dot(query, static_cast<const T*>(p.key.data) + problem::offset(p.key, entry, kv_head, slot), p.head_dim, lane);
    const Real score = common::single_score(p, batch, head, row + interval.diagonal, key, product).score * Softmax::kLog2e;
    const Real factor = state.fold_max(score), weight = Softmax::exp2(score - Softmax::reference(state.max));
    state.sum += weight;
    const T* value = static_cast<const T*>(p.value.data) + problem::offset(p.value, entry, kv_head, slot);
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (c * 32 + lane < p.value_dim) out[c] = out[c] * factor + weight * common::widen(value[c * 32 + lane]);
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) sOut[warp][c * 32 + lane] = out[c];
  if (lane == 0) sState[warp] = state;
  __syncthreads();

  Softmax total;
  Real weight[kWarps];
  for (int w = 0; w < kWarps; ++w) total.fold_max(sState[w].max);
  for (int w = 0; w < kWarps; ++w) {
    weight[w] = Softmax::rescale(sState[w].max, total.max);
    total.sum += sState[w].sum * weight[w];
  }
  const Real factor = p.sinks != nullptr ? total.fold_sink(static_cast<const Real*>(p.sinks)[head]) : Real(1);
  const Real last = factor * total.normaliser();
  T* to = static_cast<T*>(p.out.data) + problem::offset(p.out, batch, head, row);
  for (int64_t column = threadIdx.x; column < p.value_dim; column += kWarps * 32) {
    Real sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += sOut[w][column] * weight[w];
    to[column] = common::rounded<T>(sum * last);
  }
  if (threadIdx.x == 0 && p.lse != nullptr) static_cast<Real*>(p.lse)[problem::lse_offset(p, batch, head, row)] = total.lse();
}

template <class T>
cudaError_t launch_as(const Decode& d, cudaStream_t stream) {
  const problem::Problem& p = d.problem;
  const unsigned blocks = static_cast<unsigned>(p.batch * p.heads * p.rows);
  if (p.value_dim <= 128) {
    scalar_kernel<T, 4><<<blocks, kWarps * 32, 0, stream>>>(d);
  } else {
    scalar_kernel<T, 16><<<blocks, kWarps * 32, 0, stream>>>(d);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_scalar(const Decode& d, cudaStream_t stream) {
  switch (d.problem.dtype) {
    case problem::DType::kFloat16:
      return launch_as<__half>(d, stream);
    case problem::DType::kBFloat16:
      return launch_as<__nv_bfloat16>(d, stream);
    case problem::DType::kFloat32:
      return launch_as<float>(d, stream);
    default:
      return launch_as<double>(d, stream);
  }
}

}  // namespace flash::decode
