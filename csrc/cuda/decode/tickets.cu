// decode/tickets.cu: see tickets() in launch.h.
#include <map>
#include <mutex>
#include <tuple>

#include "cuda/decode/launch.h"

namespace flash::decode {
namespace {

constexpr int kOwners = 512, kTickets = 1024;
__device__ unsigned stored[kOwners * kTickets];

// The slot of a stream, or of a capture on it: CUDA gives neither id twice. -1 where all are taken.
int slot(int device, unsigned long long stream, unsigned long long capture) {
  static std::mutex mutex;
  static std::map<std::tuple<int, unsigned long long, unsigned long long>, int> slots;
  static std::map<int, int> used;
  const std::lock_guard<std::mutex> lock(mutex);
  const std::tuple owner{device, stream, capture};
  if (const auto known = slots.find(owner); known != slots.end()) return known->second;
  int& next = used[device];
  if (next == kOwners) return -1;
  slots.emplace(owner, next);
  return next++;
}

}  // namespace

cudaError_t tickets(cudaStream_t stream, int64_t count, void* workspace, unsigned** found) {
  if (count <= kTickets && stream != cudaStreamPerThread) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long capture = 0, id = 0;
    int device = 0;
    if (const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &capture); error != cudaSuccess) return error;
    if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
    if (const cudaError_t error = cudaStreamGetId(stream, &id); error != cudaSuccess) return error;
    if (const int mine = slot(device, id, status == cudaStreamCaptureStatusNone ? 0 : capture); mine >= 0) {
      void* first = nullptr;
      if (const cudaError_t error = cudaGetSymbolAddress(&first, stored); error != cudaSuccess) return error;
      *found = static_cast<unsigned*>(first) + int64_t{mine} * kTickets;
      return cudaSuccess;
    }
  }
  *found = static_cast<unsigned*>(workspace);
  return cudaMemsetAsync(workspace, 0, static_cast<size_t>(count) * sizeof(unsigned), stream);
}

}  // namespace flash::decode
