// cpu/instruction_set.cpp: which of the compiled instruction sets this machine runs.
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/attention.h"
#include "cpu/kernels.h"

#if defined(FLASH_CPU_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace flash::cpu {
namespace {

#if defined(FLASH_CPU_AMX)
// The core has AMX for bf16, and the system lets this process use its registers, for which one has to ask.
bool amx_usable() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kAvx512Bf16 = 1u << 5;  // cpuid 7.0 edx, 7.1 eax
  constexpr long kRequestPermission = 0x1023, kTileData = 18;                    // of arch_prctl
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kBf16 | kTile)) != (kBf16 | kTile)) return false;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & kAvx512Bf16)) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

}  // namespace

const InstructionSet& chosen() {
  static const InstructionSet set = [] {
    std::vector<InstructionSet> usable{kPortable};
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
      usable.push_back(kAvx2);
      if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
          __builtin_cpu_supports("avx512vl")) {
        usable.push_back(kAvx512);
#if defined(FLASH_CPU_AVX512_BF16)
        // Where the dot product of bf16 takes as long as a multiply-add of fp32, as on Zen 4 and later: Intel's take twice as long, and
        // then widening costs less.
        if (__builtin_cpu_supports("avx512bf16"))
          usable.insert(__builtin_cpu_is("amd") ? usable.end() : usable.end() - 1,
                        {"avx512_bf16", kAvx512.fp32, kAvx512.fp64, kAvx512Bf16});
#endif
#if defined(FLASH_CPU_AMX)
        if (amx_usable()) usable.push_back({"amx", kAvx512.fp32, kAvx512.fp64, kAmxBf16});
#endif
      }
    }
#endif
    const char* forced = std::getenv("FLASH_ATTN_EXT_ISA");
    if (forced == nullptr || *forced == 0) return usable.back();
    std::string names;
    for (const InstructionSet& candidate : usable) {
      if (std::string(forced) == candidate.name) return candidate;
      names += std::string(names.empty() ? "" : ", ") + candidate.name;
    }
    throw std::runtime_error("FLASH_ATTN_EXT_ISA is '" + std::string(forced) + "': this machine can run " + names + ".");
  }();
  return set;
}

const char* instruction_set() { return chosen().name; }

}  // namespace flash::cpu
