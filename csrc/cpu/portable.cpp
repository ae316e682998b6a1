// cpu/portable.cpp: the kernels for any machine.
#include "cpu/instance.h"

namespace flash::cpu {

const InstructionSet kPortable{"portable", kernels<float>(), kernels<double>(), kernels<float>()};

}  // namespace flash::cpu
