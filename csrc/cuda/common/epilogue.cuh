// common/epilogue.cuh: the end of a forward block: from (maximum, sum, unnormalised output) of each row to out and lse, or to the
// partial results of split keys.
#pragma once
#include <cstdint>

#include "problem/coords.h"
#include "problem/softmax.h"

namespace flash::common {

// Where the results of a block's rows go. Real: the type of sums.
template <class Real>
struct RowsOut {
  const Real* sink;     // logit of this head, null: none
  Real keep_scale;      // 1 / (1 - p) of dropout
  Real* lse;            // of the block's first row; null: not wanted
  float* part;          // fp32 partial out of the block's first row, [rows, value_dim]; null: keys are not split
  int rows, value_dim;  // that exist
};

// splits == 1: writes problem.out and lse, else the partial results. A sink joins the first part only.
template <class Real, class Call, class Block>
__device__ __forceinline__ RowsOut<Real> rows_out(const Call& call, const Block& block) {
  const problem::Problem& p = call.problem;
  const int64_t at = problem::lse_offset(p, block.sequence.batch, block.head, block.sequence.row + block.row);
  RowsOut<Real> out;
  out.sink = p.sinks != nullptr && block.split == 0 ? static_cast<const Real*>(p.sinks) + block.head : nullptr;
  out.keep_scale = call.modifiers.keep_scale;
  if constexpr (sizeof(Real) == sizeof(double)) out.keep_scale = p.dropout_p < 1 ? 1 / (1 - p.dropout_p) : 0;
  out.lse = p.lse != nullptr ? static_cast<Real*>(p.lse) + at : nullptr;
  out.part = nullptr;
  out.rows = block.rows;
  out.value_dim = static_cast<int>(p.value_dim);
  if constexpr (sizeof(Real) == sizeof(float)) {
    if (call.splits > 1) {
      const int64_t part = block.split * call.part_count + at;
      out.lse = call.part_lse + part;
      out.part = call.part_out + part * p.value_dim;
    }
  }
  return out;
}

// Closes one row; returns what its accumulated output must be multiplied by. max in log2 units; store: this lane writes lse.
template <class Real>
__device__ __forceinline__ Real finish_row(const RowsOut<Real>& out, int row, Real max, Real sum, bool store) {
  problem::Softmax<Real> state{max, sum};
  const Real factor = out.sink != nullptr ? state.fold_sink(*out.sink) : Real(1);
  if (store && row < out.rows && out.lse != nullptr) out.lse[row] = state.lse();
  return factor * state.normaliser() * out.keep_scale;
}

// Two neighbouring columns of a partial result.
__device__ __forceinline__ void store_part(const RowsOut<float>& out, int row, int column, float low, float high) {
  if (row >= out.rows || column >= out.value_dim) return;
  float* to = out.part + int64_t{row} * out.value_dim + column;
  to[0] = low;
  if (column + 1 < out.value_dim) to[1] = high;
}

}  // namespace flash::common
