// decode/finish.cuh: sums over warps, over CTAs by tickets, and the results. All sums run in the order of indices: the same bits every time.
// An item is 4 columns of the output of one query lane.
#pragma once
#include "cuda/decode/warp.cuh"
#include "problem/softmax.h"

namespace flash::decode {

// Output and softmax sum of some keys, relative to 2^max.
struct Part {
  float4 out;
  float max, sum;

  static __device__ __forceinline__ Part empty() { return {make_float4(0, 0, 0, 0), -INFINITY, 0}; }

  // What the parts [0, count) come to, kBatch of them under way at a time. load(i, &out, &state) for i < count, which kEven says to be a
  // multiple of kBatch.
  template <int kBatch, bool kEven = false, class Load>
  static __device__ __forceinline__ Part sum_of(int count, const Load& load) {
    Part total = empty();
#pragma unroll 1
    for (int i0 = 0; i0 < count; i0 += kBatch) {
      float4 out[kBatch];
      float2 state[kBatch];
      float top = total.max;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        load(kEven ? i0 + i : min(i0 + i, count - 1), &out[i], &state[i]);
        if (!kEven && i0 + i >= count) state[i].x = -INFINITY;
        top = fmaxf(top, state[i].x);
      }
      total.scale(problem::Softmax<float>::rescale(total.max, top));
      total.max = top;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) total.add(out[i], state[i]);
    }
    return total;
  }

  __device__ __forceinline__ void scale(float factor) {
    out.x *= factor, out.y *= factor, out.z *= factor, out.w *= factor;
    sum *= factor;
  }

  // max is at least state.x. An empty part adds nothing, whatever it holds.
  __device__ __forceinline__ void add(const float4& v, const float2& state) {
    if (state.x == -INFINITY) return;
    const float weight = ptx::exp2(state.x - max);
    out.x += v.x * weight, out.y += v.y * weight, out.z += v.z * weight, out.w += v.w * weight;
    sum += state.y * weight;
  }
};

template <class T, int kVariant>
struct Finish {
  static constexpr Tile kTile = kTiles[kVariant];
  static constexpr int kThreads = kTile.warps * 32, kColumns = kTile.bucket / 4;  // items of a lane

  const Arguments& a;
  const Segment& s;
  float* sums;     // shared [warps][warp_bytes], of which [lanes][bucket + 4] are used
  float2* states;  // shared [warps][lanes]

  __device__ __forceinline__ int items() const { return s.lanes * kColumns; }
  __device__ __forceinline__ int64_t plane() const { return int64_t{s.batch} * a.planes + s.plane; }

  __device__ __forceinline__ float* sums_of(int warp) const {
    static_assert(warp_bytes(kTile) >= kTile.lanes * (kTile.bucket + 4) * 4);
    return sums + warp * (warp_bytes(kTile) / 4);
  }

  __device__ __forceinline__ Part of_warps(int lane, int column) const {
    return Part::sum_of<kTile.warps>(kTile.warps, [&](int w, float4* out, float2* state) {
      *state = states[w * kTile.lanes + lane];
      *out = *reinterpret_cast<const float4*>(sums_of(w) + lane * (kTile.bucket + 4) + column);
    });
  }

  // Writes an item of out, and lse with the first one of its lane.
  __device__ __forceinline__ void write(int lane, int column, const Part& part) const {
    const int index = s.first_lane + lane, row = a.by_group.quotient(index);
    const int head = s.kv_head * a.group + index - row * a.group;
    problem::Softmax<float> state{part.max, part.sum};
    float factor = 1;
    if (a.sinks != nullptr) factor = state.fold_sink(__ldg(a.sinks + head));
    factor *= state.normaliser();
    if (column < a.value_dim) {
      T* to = static_cast<T*>(a.out) + s.batch * a.out_strides.batch + head * a.out_strides.head + row * a.out_strides.row;
      *reinterpret_cast<uint2*>(to + column) = make_uint2(ptx::pack(part.out.x * factor, part.out.y * factor, T{}),
                                                          ptx::pack(part.out.z * factor, part.out.w * factor, T{}));
    }
    if (column == 0 && a.lse != nullptr) a.lse[s.batch * a.lse_batch + head * a.lse_head + row] = state.lse();
  }

  // Whether this CTA is the last of `count` to get here: it then sees what the others published. The ticket is left at zero.
  __device__ __forceinline__ bool is_last(unsigned* ticket, int count, int* flag) const {
    __syncthreads();
    if (threadIdx.x == 0) {
      const bool last = ptx::take_ticket(ticket) == static_cast<unsigned>(count) - 1;
      if (last) *ticket = 0;
      *flag = last;
    }
    __syncthreads();
    return *flag;
  }

  // Parts by tickets: each CTA publishes its part, the last one adds all up.
  __device__ __forceinline__ void by_tickets(int* flag) const {
    bool final = s.parts == 1;
#pragma unroll 1
    while (true) {
#pragma unroll 1
      for (int item = threadIdx.x; item < items(); item += kThreads) {
        const int lane = item / kColumns, column = item % kColumns * 4;
        const Part part = of_warps(lane, column);
        if (final) {
          write(lane, column, part);
        } else {
          const int64_t at = (plane() * a.splits + blockIdx.x) * kTile.lanes + lane;
          __stcg(reinterpret_cast<float4*>(a.part_sums + at * kTile.bucket + column), part.out);
          if (column == 0) __stcg(a.part_states + at, make_float2(part.max, part.sum));
        }
      }
      if (final || !is_last(a.tickets + plane(), s.parts, flag)) return;
      gather();
      __syncthreads();
      final = true;
    }
  }

  // All published parts of this plane into the places of the warps' sums. Few lanes: several warps share one.
  __device__ __forceinline__ void gather() const {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    constexpr int kBlocks = kTile.bucket > 128 ? kTile.bucket / 128 : 1;  // of 128 columns
    const int sharing = max(1, kTile.warps / s.lanes), first = warp / s.lanes;
    for (int i = lane; i < kTile.lanes; i += 32) states[warp * kTile.lanes + i] = make_float2(-INFINITY, 0.f);
    __syncwarp();
    if (first >= sharing) return;
    const int count = (s.parts - first + sharing - 1) / sharing;  // parts first, first + sharing, ...
#pragma unroll 1
    for (int i = warp % s.lanes; i < s.lanes; i += kTile.warps) {
      const int64_t base = plane() * a.splits * kTile.lanes + i;
#pragma unroll 1
      for (int block = 0; block < kBlocks; ++block) {
        const int column = block * 128 + lane * 4;
        const int from = column < kTile.bucket ? column : 0;
        const Part part = Part::sum_of<8>(count, [&](int n, float4* out, float2* state) {
          const int64_t at = base + int64_t{first + n * sharing} * kTile.lanes;
          *state = ptx::load_l2_8(a.part_states + at);
          *out = ptx::load_l2_16(reinterpret_cast<const float4*>(a.part_sums + at * kTile.bucket + from));
        });
        if (lane == 0) states[warp * kTile.lanes + i] = make_float2(part.max, part.sum);
        if (column < kTile.bucket) *reinterpret_cast<float4*>(sums_of(warp) + i * (kTile.bucket + 4) + column) = part.out;
      }
    }
  }
};

}  // namespace flash::decode
