// decode/tickets.cu: see tickets() in launch.h.
#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>

#include "cuda/decode/launch.h"

namespace flash::decode {
namespace {

constexpr int kOwners = 512, kTickets = 1024;
__device__ unsigned stored[kOwners * kTickets];

// The slot of a stream (its id, which CUDA never gives twice), or of a capture on it (the capture's id, and the stream while it lasts).
// -1 where all are taken.
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

// `stored` on the current device; null where it is not known yet and a capture forbids to ask.
cudaError_t find_stored(int device, bool capturing, unsigned** found) {
  static std::array<std::atomic<unsigned*>, 64> known{};
  *found = nullptr;
  if (device >= static_cast<int>(known.size())) return cudaSuccess;
  std::atomic<unsigned*>& mine = known[static_cast<size_t>(device)];
  *found = mine.load(std::memory_order_acquire);
  if (*found != nullptr || capturing) return cudaSuccess;
  void* address = nullptr;
  const cudaError_t error = cudaGetSymbolAddress(&address, stored);
  if (error == cudaSuccess) mine.store(*found = static_cast<unsigned*>(address), std::memory_order_release);
  return error;
}

cudaError_t find_own(cudaStream_t stream, unsigned** found) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0, id = 0;
  int device = 0;
  if (const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &capture); error != cudaSuccess) return error;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const bool capturing = status != cudaStreamCaptureStatusNone;
  if (const cudaError_t error = find_stored(device, capturing, found); error != cudaSuccess || *found == nullptr) return error;
  if (capturing) {
    id = reinterpret_cast<uintptr_t>(stream);
  } else if (const cudaError_t error = cudaStreamGetId(stream, &id); error != cudaSuccess) {
    return error;
  }
  const int mine = slot(device, id, capturing ? capture : 0);
  *found = mine < 0 ? nullptr : *found + int64_t{mine} * kTickets;
  return cudaSuccess;
}

}  // namespace

cudaError_t tickets(cudaStream_t stream, int64_t count, void* workspace, unsigned** found) {
  *found = nullptr;
  if (count <= kTickets && stream != cudaStreamPerThread) {
    if (const cudaError_t error = find_own(stream, found); error != cudaSuccess || *found != nullptr) return error;
  }
  *found = static_cast<unsigned*>(workspace);
  return cudaMemsetAsync(workspace, 0, static_cast<size_t>(count) * sizeof(unsigned), stream);
}

}  // namespace flash::decode
