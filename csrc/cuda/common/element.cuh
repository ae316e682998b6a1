// common/element.cuh: element types of a Problem, and single values to and from the type that sums are kept in.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "problem/problem.h"

namespace flash::common {

// The C++ type of a DType.
template <problem::DType kType>
using Element = std::conditional_t<kType == problem::DType::kFloat16, __half,
                                   std::conditional_t<kType == problem::DType::kBFloat16, __nv_bfloat16,
                                                      std::conditional_t<kType == problem::DType::kFloat64, double, float>>>;

// What sums of an element type are kept in: double for double, else float.
template <class T>
using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;

__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }

// Rounded to nearest even.
template <class T>
__device__ __forceinline__ T rounded(Sum<T> x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

}  // namespace flash::common
