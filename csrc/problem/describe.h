// problem/describe.h: a Plan in sentences, for explain() and for errors. Apart from plan.h, which every kernel's source reads.
#pragma once
#include <string>

#include "problem/plan.h"

namespace flash::problem {

struct Decode;

// One sentence per line: kernel, tile, grid, splits, workspace, load width and why it is narrow, and what was refused.
std::string describe(const Problem& problem, const Gradients* gradients, const Device& device, const Plan& plan);
std::string describe_decode(const Decode& decode, const Device& device, const Plan& plan);

}  // namespace flash::problem
