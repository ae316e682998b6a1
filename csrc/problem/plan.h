// problem/plan.h: Problem x Device -> Plan. Pure: decides what to run and how, launches nothing, allocates nothing.
// A Plan is a plain value; describe.h prints it for explain().
#pragma once
#include <cstdint>

#include "problem/problem.h"

namespace flash::problem {

enum class Family : uint8_t { kNone, kCpu, kSm80, kSm90, kDecode };  // kNone: nothing can run the call, Plan::refused says why
enum class Direction : uint8_t { kForward, kBackward };

struct Device {
  bool cuda = false;
  int threads = 1;                   // CPU: threads of the pool
  const char* instruction_set = "";  // CPU: what the kernels were chosen for
  int major = 0, minor = 0;          // CUDA: compute capability
  int multiprocessors = 0;
  int64_t shared_memory = 0;          // bytes one block may opt in to
  int64_t multiprocessor_memory = 0;  // bytes of shared memory all blocks of one multiprocessor share
  bool sm90 = false;                  // CUDA: a GPU of compute capability 9.0 and a build with its kernels
};

// Which family a call may use. FLASH_ATTN_EXT_KERNEL=sm80|sm90 forces one; what it cannot take is then an error.
enum class Choice : uint8_t { kAny, kSm80, kSm90 };

// Bits of Plan::refused.
enum Refusal : uint32_t {
  kRefusedArchitecture = 1,  // the GPU is older than compute capability 8.0
  kRefusedHeadDim = 2,       // no instance holds the head dims
  kRefusedGrid = 4,          // more blocks than one launch may have
  kRefusedSharedMemory = 8,  // no tile fits the shared memory of the GPU
  kRefusedForced = 16,       // a family was forced that has no kernel for the call
  kRefusedSm90 = 32,         // the Hopper kernels do not take the call: sm90::forward_refusal() says why
  kRefusedSplit = 64,        // the Hopper kernels cannot split keys, which few rows need
};

// Bits of Plan::copies.
enum Operand : uint32_t { kQuery = 1, kKey = 2, kValue = 4, kOutputGradient = 8 };

struct Plan {
  Family family = Family::kNone;
  Direction direction = Direction::kForward;
  int head_dim = 0;  // bucket of the kernel instance, >= max(head_dim, value_dim); 0: any
  int tile_rows = 0, tile_keys = 0;
  int variant = 0;              // row of the family's tile table
  bool plain = false;           // the instance without score modifiers
  int load_bytes = 0;           // width of global loads of query, key, value and dout, once `copies` are made
  int store_bytes = 0;          // width of global stores of out, or of dquery, dkey and dvalue
  uint32_t copies = 0;          // operands that op/ has to copy first, to dense rows of 16-byte multiples, padded with zeros
  int splits = 1;               // parts the keys are cut into; > 1 needs a combine
  int64_t blocks = 0;           // CTAs of the main kernel
  int64_t row_blocks = 0;       // CTAs of the kernel that computes dQ by itself, where the Hopper backward has one
  int64_t workspace_bytes = 0;  // one allocation, handed to the launch
  int cluster = 1;              // decode: CTAs of a cluster
  int unit = 0;                 // decode: steps of tile_keys in a part, where only the device knows the lengths; 0: equal parts
  bool evict_first = false;     // decode: keys and values leave L2 early
  uint32_t refused = 0;         // why nothing, or not a faster family, was taken: bits of Refusal
};

// gradients: null for forward.
Plan plan(const Problem& problem, const Gradients* gradients, const Device& device, Choice choice);

}  // namespace flash::problem
