// sm90/tensor_map.h: tensor maps for TMA, made on the host. CUDA Driver API, "Tensor Map Object Management".
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include "problem/problem.h"

namespace flash::sm90 {

// The map {dim, row, head, sequence, wrap} of an array (see forward_work.cuh) with boxes of 64 columns x box_rows rows, 128-byte
// swizzle, zeros outside. packed: [total, heads, dim] with sequences found by wrapping addresses. promotion: how much DRAM moves for a
// miss of L2.
cudaError_t encode(CUtensorMap* map, const problem::Array& array, problem::DType dtype, int64_t dim, int64_t rows,
                   int64_t heads, int64_t batch, bool packed, int box_rows,
                   CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B);

}  // namespace flash::sm90
