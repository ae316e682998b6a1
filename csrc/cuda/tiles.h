// cuda/tiles.h: the one table of tile sizes (family, direction, element type, head dim bucket) -> Tile, a reason per row.
// Plain constexpr C++, no CUDA headers: problem/plan.cpp, launch.cu and the kernels read the same numbers.
//
// Contract between plan.cpp, launch.cu and the kernels of sm80/:
//  * plan.cpp fills Plan: head_dim = bucket(...), plain, variant, tile_rows and tile_keys from the Tile, splits, workspace_bytes, and
//    load_bytes: the load of query, key, value (and dout in backward) that pointers, strides and dims allow: 16, 8, 4, ... bytes. Operands that
//    allow less than narrowest_load(...) are copied by op/ to rows of 16-byte multiples padded with zeros, so kernels see load_bytes >=
//    narrowest_load and may read whole every load_bytes chunk that starts inside a row's head dim. Backward reads problem.out once per
//    element at any alignment (delta), and stores go at any alignment (store_bytes: the width that pointers, strides and dims allow).
//  * Tiles must fit Device::shared_memory (bytes one block may opt in to: 232448 on 9.0, 166912 on 8.0, 101376 on 8.6 and 8.9):
//    the variant functions choose by it; a variant of -1 means none fits and the call is refused with a sentence.
//  * sm80/forward.h and sm80/backward.h each declare one template, explicitly instantiated over few-line .cu files (instances):
//      template <problem::DType kType, int kHeadDim, bool kPlain>
//      cudaError_t forward(const problem::Problem&, const problem::Plan&, void* workspace, cudaStream_t);
//      cudaError_t backward(const problem::Problem&, const problem::Gradients&, const problem::Plan&, void* workspace, cudaStream_t);
//    They set their attributes once per device (common/attributes.cuh) and launch everything a call needs; launch.cu only picks the instance.
//  * Forward with plan.splits > 1: the CTA of split s folds its share of the keys and writes fp32 partials into the workspace,
//      out [splits][lse count][value_dim], then lse [splits][lse count] (natural log, -inf for a row that saw nothing),
//    indexed by lse_offset(problem, batch, head, row); split 0 alone folds the sink. launch.cu then merges them into out and lse (merge.cu).
//  * Packed rows and keys outside every sequence arrive filled (0, lse -inf): kernels do not touch them.
#pragma once
#include <cstdint>

#include "problem/plan.h"
#include "problem/problem.h"

namespace flash::cuda {

inline constexpr int kBuckets[] = {64, 96, 128, 192, 256, 512};

// The smallest bucket that holds both head dims; 0: none does.
constexpr int bucket(int64_t head_dim, int64_t value_dim) {
  for (int size : kBuckets)
    if (head_dim <= size && value_dim <= size) return size;
  return 0;
}

// One tile of a kernel instance: what a CTA works on at a time.
struct Tile {
  int rows = 0, keys = 0;  // forward: a CTA owns `rows` queries and walks over tiles of `keys`; backward: owns `keys`, walks over `rows`
  int warps = 0;
  int stages = 0;          // shared-memory buffers per operand that is walked over; 1: K and V alternate
  int sharing = 1;         // warps that share the same rows (forward) or keys (backward)
  int resident = 1;        // CTAs per multiprocessor that registers and shared memory are planned for
  int shared_bytes = 0;    // dynamic shared memory of one CTA
};

// Tiles of the sm80 family. `variant` is Plan::variant; 0 always exists.
constexpr Tile forward_tile(problem::DType type, int head_dim, bool plain, int variant);   // TODO(forward)
constexpr Tile backward_tile(problem::DType type, int head_dim, bool plain, int variant);  // TODO(backward)

// Which row of the table a problem takes, by lengths, mask and the device's shared memory.
constexpr int forward_variant(const problem::Problem& problem, const problem::Device& device, int head_dim, bool plain);    // TODO(forward)
constexpr int backward_variant(const problem::Problem& problem, const problem::Device& device, bool deterministic, int head_dim,
                               bool plain);                                                                            // TODO(backward)

// Bytes of scratch of a backward call: fp32 dQ, padded delta and lse2.                                              // TODO(backward)
constexpr int64_t backward_workspace(const problem::Problem& problem, const problem::Gradients& gradients, int head_dim, const Tile& tile);

// The narrowest global load (bytes) the kernels of a direction have for an element type; narrower operands are copied by op/.
constexpr int narrowest_load(problem::Direction direction, problem::DType type);                                      // TODO(both)

}  // namespace flash::cuda
