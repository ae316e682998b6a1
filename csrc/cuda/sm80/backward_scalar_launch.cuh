// sm80/backward_scalar_launch.cuh: launches of the plain-arithmetic backward kernels. An instance file instantiates one type of sums.
#pragma once
#include "cuda/sm80/backward_grid.h"
#include "cuda/sm80/backward_launch.h"
#include "cuda/sm80/backward_scalar.cuh"

namespace flash::sm80 {

// Blocks in y: parts of the columns of dK and dV, or dQ.
template <class Real>
unsigned output_parts(int64_t columns) {
  return static_cast<unsigned>((columns + ScalarConfig<Real>::kOutput - 1) / ScalarConfig<Real>::kOutput);
}

template <class Real>
cudaError_t launch_scalar_keys(BackwardCall call, cudaStream_t stream) {
  using Config = ScalarConfig<Real>;
  const problem::Problem& p = call.problem;
  const unsigned blocks =
      set_grid(call, false, Config::kTile, p.rows * call.group * p.head_dim * 2 * problem::size_of(p.dtype));
  const dim3 grid(blocks, output_parts<Real>(p.head_dim > p.value_dim ? p.head_dim : p.value_dim));
  backward_scalar_kernel<Real, Role::kKeys><<<grid, Config::kThreads, 0, stream>>>(call);
  return cudaGetLastError();
}

template <class Real>
cudaError_t launch_scalar_rows(BackwardCall call, cudaStream_t stream) {
  using Config = ScalarConfig<Real>;
  const problem::Problem& p = call.problem;
  const unsigned blocks = set_grid(call, true, Config::kTile, p.keys * p.head_dim * 2 * problem::size_of(p.dtype));
  backward_scalar_kernel<Real, Role::kRows>
      <<<dim3(blocks, output_parts<Real>(p.head_dim)), Config::kThreads, 0, stream>>>(call);
  return cudaGetLastError();
}

template <class Real>
cudaError_t launch_scalar_mask(BackwardCall call, cudaStream_t stream) {
  using Config = ScalarConfig<Real>;
  const problem::Problem& p = call.problem;
  const problem::Gradients& g = call.gradients;
  const auto tiles = [](int64_t lines) { return (lines + Config::kTile - 1) / Config::kTile; };
  const int64_t blocks = (g.dmask_batch == 0 ? 1 : p.batch) * (g.dmask_head == 0 ? 1 : p.heads) *
                         (g.dmask_row == 0 ? 1 : tiles(p.rows)) * (g.dmask_key == 0 ? 1 : tiles(p.keys));
  if (blocks > 2147483647) return cudaErrorInvalidConfiguration;  // a mask of 2^43 elements
  backward_scalar_kernel<Real, Role::kMask><<<static_cast<unsigned>(blocks), Config::kThreads, 0, stream>>>(call);
  return cudaGetLastError();
}

}  // namespace flash::sm80
