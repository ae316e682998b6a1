// op/cpu.cpp: the CPU key. Runs a Call on torch's own pool of threads.
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

#include "cpu/attention.h"
#include "cpu/decode.h"
#include "op/backend.h"

namespace flash::op {
namespace {

// Bodies are handed out one by one, because with causal masks and short sequences they differ in cost.
void run(int64_t count, const std::function<void(int64_t)>& body) {
  std::atomic<int64_t> next{0};
  const int64_t workers = std::min<int64_t>(count, at::get_num_threads());
  at::parallel_for(0, workers, 1, [&](int64_t first, int64_t last) {
    for (int64_t worker = first; worker < last; ++worker) {
      for (int64_t i = next++; i < count; i = next++) body(i);
    }
  });
}

cpu::Executor executor() { return {at::in_parallel_region() ? 1 : at::get_num_threads(), run}; }

problem::Device device(const Tensor&) {
  problem::Device device;
  device.threads = at::get_num_threads();
  device.instruction_set = cpu::instruction_set();
  return device;
}

void forward(Call& call) {
  if (call.problem.packed()) clear_results(call.out, call.lse);
  cpu::forward(call.problem, executor());
}

void backward(Call& call) {
  if (call.problem.packed()) clear_gradients(call);
  cpu::backward(call.problem, call.gradients, executor());
}

void merge(problem::DType dtype, int64_t count, int64_t value_dim, const Tensor& out_a, const Tensor& lse_a,
           const Tensor& out_b, const Tensor& lse_b, const Tensor& out, const Tensor& lse) {
  cpu::merge(dtype, count, value_dim, out_a.const_data_ptr(), lse_a.const_data_ptr(), out_b.const_data_ptr(),
             lse_b.const_data_ptr(), out.mutable_data_ptr(), lse.mutable_data_ptr(), executor());
}

void dropout_mask(const Tensor& seed, double p, const Tensor& keep) {
  cpu::dropout_mask(static_cast<const uint64_t*>(seed.const_data_ptr()), p, keep.size(0), keep.size(1), keep.size(2),
                    keep.size(3), static_cast<uint8_t*>(keep.mutable_data_ptr()), executor());
}

void decode(const problem::Decode& d, const Tensor&) { cpu::decode(d, executor()); }

void append(const problem::Append& a, const Tensor&) { cpu::append(a, executor()); }

constexpr Backend kCpu{device, forward, backward, merge, dropout_mask, decode, append};

}  // namespace
}  // namespace flash::op

TORCH_LIBRARY_IMPL(flash, CPU, m) { flash::op::register_backend<flash::op::kCpu>(m); }
