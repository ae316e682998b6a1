// cpu/kernels.h: what attention.cpp and gradient.cpp hand to the kernels of one instruction set. Plain structs: the files behind
// this interface are compiled with instructions that not every machine has, so nothing inline may leave them.
#pragma once
#include <cstddef>
#include <cstdint>

#include "problem/coords.h"
#include "problem/problem.h"

namespace flash::cpu {

// How the loops are cut. A lane is one query row of one of the heads that share a kv head: lane = row * group + head.
struct Tiling {
  int64_t lanes;  // of a task's inner block, a multiple of the lane group
  int64_t keys;   // rows of a tile of scores
};

constexpr int64_t kStatistics = 3;

struct ForwardTask {
  const problem::Problem* problem;
  problem::Sequence sequence;
  int64_t kv_head;
  int64_t lane_begin, lane_end;
  int64_t key_begin, key_end;  // all keys, or one part of them
  void* partial;  // null: write out and lse. Else Real [lanes][value_dim + kStatistics]: sums, their maximum in log2
                  // units as two numbers to be added, their total
};

struct Range {
  int64_t begin, end;
};

// Gradients of some rows and some keys of one kv head. Parts of the rows are taken last first, parts of the keys first first.
struct BackwardTask {
  const problem::Problem* problem;
  const problem::Gradients* gradients;
  problem::Sequence sequence;
  int64_t kv_head;
  Range rows, keys;
  const void* delta;                   // Real, laid out as lse
  void *dkey, *dvalue;                 // Real [keys of the sequence][stride], added to; null: not wanted
  int64_t dkey_stride, dvalue_stride;  // rows hold head_dim and value_dim rounded up to kernels().width
  void* dquery;  // Real, at row 0 of head 0 of the sequence: sums over the keys so far; null: the keys are
                 // all, and gradients->dquery is written
  int64_t dquery_head, dquery_row;
};

constexpr int64_t kMaskTiles = 4;  // tiles of keys that a task of dmask may span

// One tile of dmask: rows and keys of the mask; dimensions in which the mask is broadcast are summed over.
struct MaskTask {
  const problem::Problem* problem;
  const problem::Gradients* gradients;
  const void* delta;
  Range batches, heads, rows, keys;
};

// The functions of one instruction set for one accumulate type (Real: float or double).
struct Kernels {
  int64_t width;  // elements of a vector
  int64_t group;  // lanes of a register tile
  bool packs;     // forward lays keys and values out anew for every task: the more lanes, the less often
  size_t (*forward_scratch)(const problem::Problem&, const Tiling&);
  void (*forward)(const ForwardTask&, const Tiling&, void* scratch);
  size_t (*backward_scratch)(const problem::Problem&, const Tiling&);
  void (*backward)(const BackwardTask&, const Tiling&, void* scratch);
  void (*mask)(const MaskTask&, const Tiling&, void* scratch);  // scratch as backward
  // delta of rows [begin, end) of one head, at `delta`, laid out as lse.
  void (*delta)(const problem::Problem&, const problem::Gradients&, const problem::Sequence&, int64_t head, Range rows,
                void* delta);
  // Real rows [count][stride] rounded to `type`.
  void (*narrow)(const void* from, int64_t from_stride, int64_t count, int64_t dim, problem::DType type, void* to,
                 int64_t to_stride);
};

struct InstructionSet {
  const char* name;
  Kernels fp32, fp64, bf16;  // fp32 takes fp16 too
};

extern const InstructionSet kPortable;
#if defined(__x86_64__)
extern const InstructionSet kAvx2, kAvx512;
extern const Kernels kAvx512Bf16, kAmxBf16;
#endif

const InstructionSet& chosen();

}  // namespace flash::cpu
