// cpu/amx.cpp: the kernels for bf16 with AMX, beside AVX-512.
#include "cpu/amx_backward.h"
#include "cpu/amx_forward.h"
#include "cpu/instance.h"

namespace flash::cpu {

const Kernels kAmxBf16 = [] {
  Kernels result = kernels<float>();
  result.packs = true;
  result.forward_scratch = amx_forward_scratch;
  result.forward = amx_forward_task;
  result.backward_scratch = amx_backward_scratch;
  result.backward = amx_backward_task;
  return result;
}();

}  // namespace flash::cpu
