// cpu/bf16_instance.h: the table of an instruction set that multiplies in bf16.
#pragma once
#include "cpu/bf16_backward.h"
#include "cpu/bf16_forward.h"
#include "cpu/instance.h"

namespace flash::cpu {
namespace {

constexpr Kernels bf16_kernels() {
  Kernels result = kernels<float>();
  result.packs = true;
  result.forward_scratch = bf16_forward_scratch;
  result.forward = bf16_forward_task;
  result.backward_scratch = bf16_backward_scratch;
  result.backward = bf16_backward_task;
  return result;
}

}  // namespace
}  // namespace flash::cpu
