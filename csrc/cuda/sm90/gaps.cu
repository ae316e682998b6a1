// sm90/gaps.cu: rows of packed tensors that belong to no sequence.
#include "cuda/sm90/gaps.h"

namespace flash::sm90 {
namespace {

constexpr int kThreads = 256, kShares = 8;  // blocks per gap

struct Gaps {
  char* out;  // 16-byte aligned, as all that the Hopper forward takes
  int64_t row, head;
  float* lse;  // may be null
  int64_t lse_head;
  const int32_t* cu_seqlens;
  int batch, rows, total, heads, chunks;  // chunks of 16 bytes in a row of a head
};

__device__ __forceinline__ int start_of(const Gaps& g, int sequence) { return min(max(g.cu_seqlens[sequence], 0), g.total); }

// Gap i lies before sequence i; the last one behind all of them.
__global__ void __launch_bounds__(kThreads) clear_kernel(const Gaps g) {
  const int gap = blockIdx.x / kShares, share = blockIdx.x % kShares;
  int from = 0;
  if (gap > 0) {
    const int start = start_of(g, gap - 1);
    from = start + min(max(min(g.cu_seqlens[gap], g.total) - start, 0), g.rows);
  }
  const int count = (gap < g.batch ? start_of(g, gap) : g.total) - from;
  const int64_t stride = kThreads * kShares, mine = share * kThreads + threadIdx.x;
  for (int64_t i = mine; i < int64_t{count} * g.heads * g.chunks; i += stride) {
    const int64_t plane = i / g.chunks, row = from + plane / g.heads, head = plane % g.heads;
    *reinterpret_cast<uint4*>(g.out + row * g.row + head * g.head + i % g.chunks * 16) = uint4{};
  }
  if (g.lse == nullptr) return;
  for (int64_t i = mine; i < int64_t{count} * g.heads; i += stride)
    g.lse[i / count * g.lse_head + from + i % count] = -INFINITY;
}

}  // namespace

cudaError_t clear_gaps(const problem::Problem& p, cudaStream_t stream) {
  const int64_t bytes = problem::size_of(p.dtype);
  const Gaps gaps{static_cast<char*>(p.out.data),
                  p.out.row * bytes,
                  p.out.head * bytes,
                  static_cast<float*>(p.lse),
                  p.lse_head,
                  p.cu_seqlens_q,
                  static_cast<int>(p.batch),
                  static_cast<int>(p.rows),
                  static_cast<int>(p.total_rows),
                  static_cast<int>(p.heads),
                  static_cast<int>(p.value_dim * bytes / 16)};
  clear_kernel<<<static_cast<unsigned>((p.batch + 1) * kShares), kThreads, 0, stream>>>(gaps);
  return cudaGetLastError();
}

}  // namespace flash::sm90
