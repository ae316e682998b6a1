// cpu/avx512.cpp: the kernels for AVX-512 F, BW, DQ and VL.
#include "cpu/instance.h"

#if defined(__x86_64__)
namespace flash::cpu {

const InstructionSet kAvx512{"avx512", kernels<float>(), kernels<double>(), kernels<float>()};

}  // namespace flash::cpu
#endif
