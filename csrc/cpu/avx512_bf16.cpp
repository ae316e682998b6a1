// cpu/avx512_bf16.cpp: the kernels for bf16 with the dot product of AVX-512.
#include "cpu/bf16_instance.h"

namespace flash::cpu {

const Kernels kAvx512Bf16 = bf16_kernels();

}  // namespace flash::cpu
