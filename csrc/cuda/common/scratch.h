// common/scratch.h: the workspace of a backward call on tensor cores. Plain C++: plan.cpp asks for its size, kernels for its places.
// Rows are kept in blocks of 16, one run of blocks per (sequence, head), so that tiles of any multiple of 16 rows can share it:
//   dquery [blocks][columns / 8][128] fp32, sums of dS K in the order of mma accumulators (private_element below)
//   lse2, delta [blocks * 16] fp32; rows past the end of their sequence hold +inf and 0, which makes every P and dS there 0.
#pragma once
#include <cstdint>

#include "problem/coords.h"
#include "problem/portable.h"
#include "problem/problem.h"

namespace flash::common {

inline constexpr int kBlockRows = 16;
inline constexpr int kBlockElements = 128;  // 16 rows x 8 columns
inline constexpr int kPrepareRows = 32;     // of a block of prepare_kernel (prepare.cuh): no other launch has shorter ones

struct Scratch {
  int64_t head_blocks = 0;   // from one head to the next: blocks of one sequence, or of all packed ones
  int64_t batch_blocks = 0;  // from one sequence to the next
  int64_t columns = 0;       // groups of 8 columns of dquery
  float* lse2 = nullptr;
  float* delta = nullptr;
  float* dquery = nullptr;  // null: dQ is not summed up here

  // Packed sequences start at block row / 16 + index: no two share a block, whatever their lengths.
  FLASH_HD int64_t first_block(const problem::Sequence& s, int64_t head) const {
    return head * head_blocks + s.batch * batch_blocks + s.row / kBlockRows;
  }
  FLASH_HD float* dquery_block(int64_t block) const { return dquery + block * columns * kBlockElements; }
};

FLASH_HD int64_t scratch_head_blocks(const problem::Problem& p) {
  return p.cu_seqlens_q == nullptr ? (p.rows + kBlockRows - 1) / kBlockRows : p.total_rows / kBlockRows + p.batch;
}

FLASH_HD int64_t scratch_blocks(const problem::Problem& p) {
  return scratch_head_blocks(p) * p.heads * (p.cu_seqlens_q == nullptr ? p.batch : 1);
}

FLASH_HD int64_t scratch_bytes(const problem::Problem& p, bool dquery) {
  const int64_t columns = (p.head_dim + 7) / 8;
  return scratch_blocks(p) * (2 * kBlockRows + (dquery ? columns * kBlockElements : 0)) * int64_t{sizeof(float)};
}

FLASH_HD Scratch scratch(const problem::Problem& p, bool dquery, void* workspace) {
  const int64_t rows = scratch_blocks(p) * kBlockRows;
  Scratch s;
  s.head_blocks = scratch_head_blocks(p);
  s.batch_blocks = p.cu_seqlens_q == nullptr ? p.heads * s.head_blocks : 1;
  s.columns = (p.head_dim + 7) / 8;
  s.lse2 = static_cast<float*>(workspace);
  s.delta = s.lse2 + rows;
  s.dquery = dquery ? s.delta + rows : nullptr;
  return s;
}

// Where element e of lane `lane`'s accumulator lies among the 128 of a block's 8 columns: one warp writes 512 contiguous bytes,
// 16 bytes a lane where the GPU can add four floats at once (sm_90), else 4 bytes a lane.
FLASH_HD int private_element(int lane, int e, bool vectors) { return vectors ? lane * 4 + e : e * 32 + lane; }

}  // namespace flash::common
