// decode/append.cu: copies new keys and values behind those that a cache holds. A warp takes one row of one head.
#include "cuda/decode/launch.h"
#include "problem/coords.h"

namespace flash::decode {
namespace {

using problem::Append;

constexpr int kWarps = 4;

// Unit: what is copied at a time; dims and strides are counted in it.
template <class Unit>
__global__ void __launch_bounds__(kWarps * 32) append_kernel(const __grid_constant__ Append a) {
  const int lane = threadIdx.x % 32;
  const int64_t task = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (task >= a.batch * a.rows * a.kv_heads) return;
  const int64_t head = task % a.kv_heads, row = task / a.kv_heads % a.rows, batch = task / a.kv_heads / a.rows;
  const int64_t key = problem::length_of(a.cache, a.keys, batch) + row;
  if (key >= a.keys) return;
  const int64_t entry = problem::entry_of(a.cache, batch, key), slot = problem::slot_of(a.cache, key);
  const auto copy = [&](const problem::Array& from, const problem::Array& to, int64_t dim) {
    const Unit* source = static_cast<const Unit*>(from.data) + problem::offset(from, batch, head, row);
    Unit* target = static_cast<Unit*>(to.data) + problem::offset(to, entry, head, slot);
    for (int64_t i = lane; i < dim; i += 32) target[i] = source[i];
  };
  copy(a.new_key, a.key, a.head_dim);
  copy(a.new_value, a.value, a.value_dim);
}

template <class Unit>
bool divides(const problem::Array& x, int64_t dim, int64_t bytes) {
  constexpr int64_t kUnit = sizeof(Unit);
  const auto fits = [&](int64_t elements) { return elements * bytes % kUnit == 0; };
  return reinterpret_cast<uintptr_t>(x.data) % kUnit == 0 && fits(x.batch) && fits(x.head) && fits(x.row) && fits(dim);
}

template <class Unit>
cudaError_t launch_in(Append a, int64_t bytes, cudaStream_t stream) {
  for (problem::Array* x : {&a.new_key, &a.new_value, &a.key, &a.value})
    for (int64_t* stride : {&x->batch, &x->head, &x->row}) *stride = *stride * bytes / static_cast<int64_t>(sizeof(Unit));
  a.head_dim = a.head_dim * bytes / static_cast<int64_t>(sizeof(Unit));
  a.value_dim = a.value_dim * bytes / static_cast<int64_t>(sizeof(Unit));
  const int64_t blocks = (a.batch * a.rows * a.kv_heads + kWarps - 1) / kWarps;
  append_kernel<Unit><<<static_cast<unsigned>(blocks), kWarps * 32, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace

cudaError_t append(const Append& a, cudaStream_t stream) {
  const int64_t bytes = problem::size_of(a.dtype);
  const bool wide = divides<uint4>(a.new_key, a.head_dim, bytes) && divides<uint4>(a.key, a.head_dim, bytes) &&
                    divides<uint4>(a.new_value, a.value_dim, bytes) && divides<uint4>(a.value, a.value_dim, bytes);
  if (wide) return launch_in<uint4>(a, bytes, stream);
  return bytes == 2   ? launch_in<uint16_t>(a, bytes, stream)
         : bytes == 4 ? launch_in<uint32_t>(a, bytes, stream)
                      : launch_in<uint64_t>(a, bytes, stream);
}

}  // namespace flash::decode
