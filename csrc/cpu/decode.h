// cpu/decode.h: few query rows over a long cache, on the CPU, without torch.
#pragma once
#include "cpu/attention.h"
#include "problem/decode.h"

namespace flash::cpu {

// Writes problem.out and problem.lse (lse may be null).
void decode(const problem::Decode& decode, const Executor& executor);

void append(const problem::Append& append, const Executor& executor);

}  // namespace flash::cpu
