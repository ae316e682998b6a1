// cpu/attention.h: attention on the CPU, without torch. op/cpu.cpp calls it; one kernel source is compiled per instruction set.
#pragma once
#include <functional>

#include "problem/plan.h"
#include "problem/problem.h"

namespace flash::cpu {

// How to run body(0) .. body(count - 1) on a pool of `threads`; bodies may run in any order and at the same time.
struct Executor {
  int threads = 1;
  std::function<void(int64_t count, const std::function<void(int64_t)>& body)> run;
};

const char* instruction_set();  // the name of one of the sets in kernels.h: chosen once, FLASH_ATTN_EXT_ISA forces one

// Writes problem.out and problem.lse (lse may be null).
void forward(const problem::Problem& problem, const Executor& executor);

// Reads problem.out and problem.lse; writes what `gradients` asks for.
void backward(const problem::Problem& problem, const problem::Gradients& gradients, const Executor& executor);

// Contiguous [count, value_dim] rows and [count] lse; out may alias neither input. dtype of the outputs is `dtype`.
void merge(problem::DType dtype, int64_t count, int64_t value_dim, const void* out_a, const void* lse_a, const void* out_b,
           const void* lse_b, void* out, void* lse, const Executor& executor);

// 1 / 0 in a contiguous [batch, heads, rows, keys] array: what dropout keeps. The oracle of dropout.
void dropout_mask(const uint64_t* seed, double p, int64_t batch, int64_t heads, int64_t rows, int64_t keys, uint8_t* keep,
                  const Executor& executor);

}  // namespace flash::cpu
