// cuda/dropout_mask.cu: the mask that dropout uses, as a tensor: for second derivatives and as the oracle of the tests.
#include "cuda/launch.cuh"
#include "problem/philox.h"

namespace flash::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    dropout_mask_kernel(const uint64_t* seed, double p, int64_t count, int64_t rows, int64_t keys, uint8_t* keep) {
  const problem::Dropout dropout = problem::dropout(seed, p);
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step)
    keep[i] = dropout.keeps(i / keys / rows, i / keys % rows, i % keys);
}

}  // namespace

Error dropout_mask(const uint64_t* seed, double p, int64_t batch, int64_t heads, int64_t rows, int64_t keys, uint8_t* keep,
                   Stream stream) {
  const int64_t count = batch * heads * rows * keys;
  if (count == 0) return nullptr;
  dropout_mask_kernel<<<blocks_for(count, kThreads), kThreads, 0, stream>>>(seed, p, count, rows, keys, keep);
  return sentence(cudaGetLastError(), "flash.dropout_mask on CUDA");
}

}  // namespace flash::cuda
