// common/any_element.cuh: single elements of arrays whose type is known at run time only, for kernels that are right, not fast.
#pragma once
#include "cuda/common/element.cuh"

namespace flash::common {

// Element `at` in the type of sums; double arrays hold doubles only.
template <class Real>
__device__ __forceinline__ Real read(const void* data, problem::DType dtype, int64_t at) {
  if (dtype == problem::DType::kFloat32) return static_cast<const float*>(data)[at];
  if constexpr (sizeof(Real) == 8) {
    return static_cast<const double*>(data)[at];
  } else {
    return dtype == problem::DType::kFloat16 ? widen(static_cast<const __half*>(data)[at])
                                             : widen(static_cast<const __nv_bfloat16*>(data)[at]);
  }
}

template <class Real>
__device__ __forceinline__ void write(void* data, problem::DType dtype, int64_t at, Real x) {
  if constexpr (sizeof(Real) == 8) {
    static_cast<double*>(data)[at] = x;
  } else if (dtype == problem::DType::kFloat32) {
    static_cast<float*>(data)[at] = x;
  } else if (dtype == problem::DType::kFloat16) {
    static_cast<__half*>(data)[at] = rounded<__half>(x);
  } else {
    static_cast<__nv_bfloat16*>(data)[at] = rounded<__nv_bfloat16>(x);
  }
}

}  // namespace flash::common
