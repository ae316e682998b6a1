// cpu/amx.cpp: the kernels for bf16 with AMX, beside AVX-512.
#include "cpu/bf16_instance.h"

namespace flash::cpu {

const Kernels kAmxBf16 = bf16_kernels();

}  // namespace flash::cpu
