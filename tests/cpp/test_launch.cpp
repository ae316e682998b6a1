// The CUDA door: how errors leave it.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <string>

#include "cuda/launch.h"

namespace flash::cuda {
namespace {

TEST(Launch, AnErrorIsReportedOnce) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "needs a GPU";
  problem::Device found;
  const Error error = device(count, &found);
  ASSERT_NE(error, nullptr);
  EXPECT_NE(std::string(error).find("cudaErrorInvalidDevice"), std::string::npos) << error;
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);  // else the next launch of somebody else would fail
  EXPECT_EQ(device(0, &found), nullptr);
}

}  // namespace
}  // namespace flash::cuda
