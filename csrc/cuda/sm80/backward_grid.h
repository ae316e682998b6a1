// sm80/backward_grid.h: the flat grids of the backward kernels, see Owner in backward_block.cuh. Host only.
#pragma once
#include <cstdint>

#include "cuda/sm80/backward_block.cuh"

namespace flash::sm80 {

// Fills the grid fields of `call` for blocks of `tile` keys or rows and returns the number of blocks.
// walked_bytes: what the blocks of one plane read again and again.
unsigned set_grid(BackwardCall& call, bool rows, int tile, int64_t walked_bytes);

}  // namespace flash::sm80
