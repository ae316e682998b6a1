// common/modifiers.h: what a Problem asks of single scores, as the kernels are told. Plain C++.
#pragma once
#include <cstdint>

#include "problem/problem.h"

namespace flash::common {

inline constexpr float kLog2e = 1.44269504088896341f;

enum : uint32_t {
  kScaleFirst = 1,  // the scale is not a positive number to divide by: scores are multiplied before anything is added
  kSoftcap = 2,
  kAlibi = 4,
  kFloatMask = 8,
  kBoolMask = 16,
  kDropout = 32,
  kChangesScore = kScaleFirst | kSoftcap | kAlibi | kFloatMask | kBoolMask,
};

// What a Problem asks of single scores, in the kernel's types. Written by the host.
struct Modifiers {
  uint32_t flags = 0;
  float scale = 0;  // of q . k
  float softcap = 0;
  float keep_scale = 1;  // 1 / (1 - dropout_p), 0 where everything is dropped
};

inline Modifiers modifiers(const problem::Problem& p) {
  Modifiers m;
  m.scale = static_cast<float>(p.scale);
  m.softcap = static_cast<float>(p.softcap);
  m.keep_scale = p.dropout_p < 1 ? static_cast<float>(1 / (1 - p.dropout_p)) : 0.f;
  if (p.softcap > 0) m.flags |= kSoftcap;
  if (!(p.softcap > 0) && !(m.scale >= 1e-20f && m.scale <= 1e20f)) m.flags |= kScaleFirst;
  if (p.alibi_slopes != nullptr) m.flags |= kAlibi;
  if (p.mask.data != nullptr) m.flags |= p.mask.dtype == problem::DType::kBool ? kBoolMask : kFloatMask;
  if (p.dropout_p > 0) m.flags |= kDropout;
  return m;
}

}  // namespace flash::common
