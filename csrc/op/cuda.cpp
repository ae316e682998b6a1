// op/cuda.cpp: the CUDA key. Plan, copy what no load can read, one workspace from torch's caching allocator, launch on the current
// stream. Nothing here waits for the GPU or reads its memory, so calls can be captured into a CUDA graph.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/launch.h"
#include "op/backend.h"
#include "problem/decode.h"
#include "problem/describe.h"

namespace flash::op {
namespace {

using problem::Array;
using problem::Gradients;
using problem::Operand;
using problem::Plan;

void raise(cuda::Error error) { TORCH_CHECK(error == nullptr, error); }

cuda::Stream current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

problem::Device properties(const Tensor& query) {
  problem::Device device;
  raise(cuda::device(query.get_device(), &device));
  return device;
}

// x [..., dim] in dense rows that begin at multiples of 16 bytes; what follows a row up to the next such multiple is zero.
Tensor copy_to_aligned_rows(const Tensor& x) {
  const int64_t dim = x.size(-1), chunk = 16 / x.element_size(), padded = (dim + chunk - 1) / chunk * chunk;
  auto sizes = x.sizes().vec();
  sizes.back() = padded;
  const Tensor rows = at::empty(sizes, x.options());
  if (padded > dim) rows.narrow(-1, dim, padded - dim).zero_();
  Tensor view = rows.narrow(-1, 0, dim);
  view.copy_(x);
  return view;
}

void copy_operands(Call& call, const Plan& plan) {
  const auto copy = [&](Operand operand, Tensor& tensor, Array& array) {
    if (!(plan.copies & operand)) return;
    tensor = copy_to_aligned_rows(tensor);
    array = array_of(tensor);
  };
  copy(Operand::kQuery, call.query, call.problem.query);
  copy(Operand::kKey, call.key, call.problem.key);
  copy(Operand::kValue, call.value, call.problem.value);
  copy(Operand::kOutputGradient, call.grad_out, call.gradients.dout);
}

// A plan's workspace on the current device and stream; null if it needs none.
c10::DataPtr workspace_of(const Plan& plan) {
  if (plan.workspace_bytes == 0) return {};
  return c10::cuda::CUDACachingAllocator::get()->allocate(static_cast<size_t>(plan.workspace_bytes));
}

// Plans the call and makes it runnable: throws what cannot run, copies operands.
struct Prepared {
  Plan plan;
  c10::DataPtr workspace;

  Prepared(Call& call, const Gradients* gradients) {
    const problem::Device device = properties(call.query);
    plan = problem::plan(call.problem, gradients, device, choice_of_environment());
    TORCH_CHECK(plan.family != problem::Family::kNone,
                "flash.attention: ", problem::describe(call.problem, gradients, device, plan));
    if (plan.copies != 0) copy_operands(call, plan);
    workspace = workspace_of(plan);
  }
};

void forward_cuda(Call& call) {
  const c10::cuda::CUDAGuard guard(call.query.device());
  const Prepared prepared(call, nullptr);
  if (call.problem.packed() && prepared.plan.family != problem::Family::kSm90) clear_results(call.out, call.lse);
  raise(cuda::forward(call.problem, prepared.plan, prepared.workspace.get(), current_stream()));
}

void backward_cuda(Call& call) {
  const c10::cuda::CUDAGuard guard(call.query.device());
  const Prepared prepared(call, &call.gradients);
  if (call.problem.packed() && prepared.plan.family != problem::Family::kSm90) clear_gradients(call);
  raise(cuda::backward(call.problem, call.gradients, prepared.plan, prepared.workspace.get(), current_stream()));
}

void merge_cuda(problem::DType dtype, int64_t count, int64_t value_dim, const Tensor& out_a, const Tensor& lse_a,
                const Tensor& out_b, const Tensor& lse_b, const Tensor& out, const Tensor& lse) {
  const c10::cuda::CUDAGuard guard(out.device());
  raise(cuda::merge(dtype, count, value_dim, out_a.const_data_ptr(), lse_a.const_data_ptr(), out_b.const_data_ptr(),
                    lse_b.const_data_ptr(), out.mutable_data_ptr(), lse.mutable_data_ptr(), current_stream()));
}

void dropout_mask_cuda(const Tensor& seed, double p, const Tensor& keep) {
  const c10::cuda::CUDAGuard guard(keep.device());
  raise(cuda::dropout_mask(static_cast<const uint64_t*>(seed.const_data_ptr()), p, keep.size(0), keep.size(1), keep.size(2),
                           keep.size(3), static_cast<uint8_t*>(keep.mutable_data_ptr()), current_stream()));
}

void decode_cuda(const problem::Decode& d, const Tensor& query) {
  const c10::cuda::CUDAGuard guard(query.device());
  const problem::Device device = properties(query);
  const Plan plan = problem::plan_decode(d, device);
  TORCH_CHECK(plan.family != problem::Family::kNone, "flash.attention_decode: ", problem::describe_decode(d, device, plan));
  const c10::DataPtr workspace = workspace_of(plan);
  raise(cuda::decode(d, plan, workspace.get(), current_stream()));
}

void append_cuda(const problem::Append& a, const Tensor& cache) {
  const c10::cuda::CUDAGuard guard(cache.device());
  raise(cuda::append(a, current_stream()));
}

constexpr Backend kCuda{properties, forward_cuda, backward_cuda, merge_cuda, dropout_mask_cuda, decode_cuda, append_cuda};

}  // namespace

TORCH_LIBRARY_IMPL(flash, CUDA, m) { register_backend<kCuda>(m); }

}  // namespace flash::op
