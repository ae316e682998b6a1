// cpu/avx2.cpp: the kernels for AVX2, FMA and F16C.
#include "cpu/instance.h"

#if defined(__x86_64__)
namespace flash::cpu {

const InstructionSet kAvx2{"avx2", kernels<float>(), kernels<double>(), kernels<float>()};

}  // namespace flash::cpu
#endif
