// sm90/tensor_map.cu: see tensor_map.h.
#include <cudaTypedefs.h>

#include "cuda/sm90/forward_work.cuh"
#include "cuda/sm90/tensor_map.h"

namespace flash::sm90 {
namespace {

// The driver's function, through the runtime: nothing links to libcuda.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess
               ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function)
               : nullptr;
  }();
  return found;
}

// The driver's function needs a context, which a thread has only once a call of the runtime gave it one: cudaSetDevice does.
cudaError_t bind_context() {
  thread_local int bound = -1;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess || device == bound) return error;
  const cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) bound = device;
  return error;
}

}  // namespace

cudaError_t encode(CUtensorMap* map, const problem::Array& array, problem::DType dtype, int64_t dim, int64_t rows,
                   int64_t heads, int64_t batch, bool packed, int box_rows, CUtensorMapL2promotion promotion) {
  const auto encode_tiled = encoder();
  if (encode_tiled == nullptr) return cudaErrorNotSupported;
  if (const cudaError_t error = bind_context(); error != cudaSuccess) return error;
  const int64_t bytes = problem::size_of(dtype), row = array.row * bytes;
  const auto stride = [&](int64_t elements, int64_t count) {
    return static_cast<cuuint64_t>(count > 1 ? elements * bytes : 16);
  };
  cuuint64_t sizes[5] = {static_cast<cuuint64_t>(dim), static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(heads),
                         static_cast<cuuint64_t>(batch), 1};
  cuuint64_t strides[4] = {static_cast<cuuint64_t>(row), stride(array.head, heads), stride(array.batch, batch), 16};
  if (packed) {
    sizes[1] = kWrap;
    sizes[3] = static_cast<cuuint64_t>(rows) + 1;
    sizes[4] = static_cast<cuuint64_t>(kWrap) + 1;
    strides[2] = static_cast<cuuint64_t>(row);
    strides[3] = (cuuint64_t{1} << 34) - static_cast<cuuint64_t>(row);  // kWrap * (2^34 - row) = -kWrap * row modulo 2^64
  }
  const cuuint32_t box[5] = {64, static_cast<cuuint32_t>(box_rows), 1, 1, 1}, steps[5] = {1, 1, 1, 1, 1};
  const auto type = dtype == problem::DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result = encode_tiled(map, type, 5, array.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                       CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace flash::sm90
