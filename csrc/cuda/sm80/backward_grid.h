// sm80/backward_grid.h: the flat grids of the backward kernels, see Owner in backward_block.cuh. Host only.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cuda/common/locate.cuh"
#include "cuda/sm80/backward_block.cuh"

namespace flash::sm80 {

inline constexpr int64_t kCacheBytes = int64_t{32} << 20;  // of L2 for what the blocks of a section walk over together

// Fills the grid fields of `call` for blocks of `tile` keys or rows and returns the number of blocks.
// walked_bytes: what the blocks of one plane read again and again.
inline unsigned set_grid(BackwardCall& call, bool rows, int tile, int64_t walked_bytes) {
  const problem::Problem& p = call.problem;
  call.planes = static_cast<int>(common::planes(p, rows ? p.heads : p.kv_heads));
  call.pieces = static_cast<int>(rows ? common::pieces(p.cu_seqlens_q, p.rows, p.total_rows, p.batch, tile)
                                      : common::pieces(p.cu_seqlens_k, p.keys, p.total_keys, p.batch, tile));
  const int64_t section = kCacheBytes / std::max<int64_t>(walked_bytes, 1);
  call.section = static_cast<int>(std::clamp<int64_t>(section, 1, call.planes));
  return static_cast<unsigned>(call.planes) * static_cast<unsigned>(call.pieces);
}

}  // namespace flash::sm80
