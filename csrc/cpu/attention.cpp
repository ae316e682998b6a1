// cpu/attention.cpp: forward, merge and the dropout mask: cut into tasks for the kernels of the chosen instruction set.
#include "cpu/attention.h"

#include <cmath>
#include <tuple>
#include <vector>

#include "cpu/combine.h"
#include "cpu/schedule.h"
#include "problem/mask.h"
#include "problem/philox.h"
#include "problem/softmax.h"

namespace flash::cpu {

using problem::DType;
using problem::Problem;

void fill(const problem::Array& a, DType type, int64_t heads, int64_t rows, int64_t dim) {
  if (a.data == nullptr) return;
  const int64_t bytes = size_of(type);
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t i = 0; i < rows; ++i)
      std::memset(static_cast<char*>(a.data) + problem::offset(a, 0, h, i) * bytes, 0, dim * bytes);
}

void fill_statistic(const Problem& p, void* values, double value) {
  if (values == nullptr) return;
  for (int64_t h = 0; h < p.heads; ++h) {
    if (p.fp64()) {
      std::fill_n(static_cast<double*>(values) + h * p.lse_head, p.total_rows, value);
    } else {
      std::fill_n(static_cast<float*>(values) + h * p.lse_head, p.total_rows, static_cast<float>(value));
    }
  }
}

namespace {

// A task, and where its part lies in the workspace if its keys were cut: Reals, -1 if they were not.
struct Part {
  ForwardTask task;
  int64_t at;

  int64_t head() const { return task.sequence.batch * task.problem->kv_heads + task.kv_head; }
  int64_t cost() const { return (task.lane_end - task.lane_begin) * (task.key_end - task.key_begin); }
};

// Head after head, for K and V to stay in the caches: the costliest head first, and the costliest task of a head, so that the last
// tasks are short.
void order(std::vector<Part>& parts) {
  if (parts.empty()) return;
  std::vector<int64_t> cost(parts.back().head() + 1);
  for (const Part& part : parts) cost[part.head()] += part.cost();
  const auto key = [&](const Part& part) { return std::tuple(-cost[part.head()], part.head(), -part.cost()); };
  std::stable_sort(parts.begin(), parts.end(), [&](const Part& a, const Part& b) { return key(a) < key(b); });
}

struct ForwardPlan {
  Tiling tiling;
  int64_t part = problem::kOpen;  // keys of one part
};

ForwardPlan plan_forward(const Problem& p, const Kernels& kernels, int threads) {
  const int64_t real = p.fp64() ? 8 : 4, widest = std::max(p.head_dim, p.value_dim);
  const bool widened = size_of(p.dtype) != real;
  ForwardPlan plan;
  const bool small = p.rows > 16 && p.rows <= 128;  // time is not the point: shorter running sums round away less
  plan.tiling.keys = widest <= 128 && !small ? 128 : widest <= 256 ? 64 : 32;
  const int64_t lanes = p.rows * (p.heads / p.kv_heads), heads = p.batch * p.kv_heads;
  // Groups of lanes share what is read of K and V: 8, where queries and sums stay in the second-level cache. Fewer give more tasks;
  // that is free where all of K and V stays there too, and costs widening the more often for half types.
  const int64_t room = (int64_t{256} << 10) / (kernels.group * std::max<int64_t>(1, p.head_dim + p.value_dim) * real);
  const int64_t kv_bytes = p.keys * (p.head_dim + p.value_dim) * size_of(p.dtype);
  const int64_t fewest = kv_bytes >= (int64_t{1} << 20) ? 8 : widened || kv_bytes > (int64_t{256} << 10) ? 4 : 1;
  int64_t groups = std::clamp<int64_t>(room, 1, 8);
  while (groups > fewest && heads * ceil_div(lanes, groups * kernels.group) < kParallel) groups = std::max(fewest, groups / 2);
  plan.tiling.lanes = std::min(groups, std::max<int64_t>(1, ceil_div(lanes, kernels.group))) * kernels.group;
  const int64_t tasks = heads * ceil_div(lanes, plan.tiling.lanes);
  if (tasks > 0 && tasks < kParallel) {  // a part costs what 24 keys cost, and nothing where reading K and V is all the work
    const int64_t part = ceil_div(p.keys, ceil_div(kParallel, tasks)), least = lanes <= kernels.group ? 512 : 2048;
    plan.part = std::max<int64_t>(least, ceil_div(part, plan.tiling.keys) * plan.tiling.keys);
  }
  // Lanes do not depend on each other, so results do not depend on how many go together; keys are cut as above. The more, the less often
  // keys and values are laid out or widened. Under a window tiles of keys begin with the first that any of the lanes sees.
  if ((kernels.packs || widened) && p.left == problem::kOpen) {
    const int64_t all = heads * ceil_div(lanes, kernels.group), share = ceil_div(all, std::max<int64_t>(heads, 4 * threads));
    const int64_t most = kernels.packs ? 4 * room : std::max<int64_t>(8, 2 * room);
    plan.tiling.lanes = std::max(plan.tiling.lanes, std::min(most, share) * kernels.group);
  }
  return plan;
}

template <class Real>
void forward_as(const Problem& p, const Executor& executor) {
  const Kernels& kernels = kernels_for(p);
  const ForwardPlan plan = plan_forward(p, kernels, executor.threads);
  const int64_t heads = p.heads / p.kv_heads;
  std::vector<Part> tasks;
  std::vector<Combination> combinations;
  int64_t space = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const auto s = problem::sequence(p, b);
    const auto interval = problem::interval(p, s.rows, s.keys);
    for (int64_t kv = 0; kv < p.kv_heads; ++kv)
      for (int64_t lane = 0; lane < s.rows * heads; lane += plan.tiling.lanes) {
        const int64_t end = std::min(lane + plan.tiling.lanes, s.rows * heads);
        const auto seen = interval.rows(lane / heads, (end - 1) / heads + 1);
        const int64_t parts = std::max<int64_t>(1, ceil_div(seen.last - seen.first, plan.part));
        if (parts > 1) combinations.push_back({s, kv, lane, end, parts, space});
        for (int64_t i = 0; i < parts; ++i) {
          const int64_t first = seen.first + i * plan.part,
                        last = parts == 1 ? seen.last : std::min(first + plan.part, seen.last);
          tasks.push_back({{&p, s, kv, lane, end, first, last, nullptr}, parts > 1 ? space : -1});
          if (parts > 1) space += (end - lane) * (p.value_dim + kStatistics);
        }
      }
  }
  const Memory workspace = allocate(space * sizeof(Real));
  for (Part& part : tasks)
    if (part.at >= 0) part.task.partial = static_cast<Real*>(workspace.get()) + part.at;
  order(tasks);
  for_each(executor, static_cast<int64_t>(tasks.size()), kernels.forward_scratch(p, plan.tiling),
           [&](int64_t i, void* scratch) { kernels.forward(tasks[i].task, plan.tiling, scratch); });
  for_each(executor, static_cast<int64_t>(combinations.size()), 0, [&](int64_t i, void*) {
    combine(p, combinations[i], static_cast<const Real*>(workspace.get()) + combinations[i].at);
  });
}

template <class T, class Real>
void merge_as(int64_t count, int64_t dim, const void* out_a, const void* lse_a, const void* out_b, const void* lse_b, void* out,
              void* lse, const Executor& executor) {
  constexpr int64_t kRows = 64;
  for_each(executor, ceil_div(count, kRows), 0, [&](int64_t task, void*) {
    for (int64_t i = task * kRows; i < std::min(count, (task + 1) * kRows); ++i) {
      const Real of_a = static_cast<const Real*>(lse_a)[i], of_b = static_cast<const Real*>(lse_b)[i];
      const auto m = problem::merge(of_a, of_b);
      const T* a = static_cast<const T*>(out_a) + i * dim;
      const T* b = static_cast<const T*>(out_b) + i * dim;
      T* to = static_cast<T*>(out) + i * dim;
      for (int64_t d = 0; d < dim; ++d) {
        const Real x = problem::weigh<Real>(m.a, of_a, widen(a[d])), y = problem::weigh<Real>(m.b, of_b, widen(b[d]));
        narrow(x + y, &to[d]);
      }
      static_cast<Real*>(lse)[i] = m.lse;
    }
  });
}

}  // namespace

void forward(const Problem& p, const Executor& executor) {
  if (p.batch == 0 || p.kv_heads == 0) return;
  if (p.packed()) {
    fill(p.out, p.dtype, p.heads, p.total_rows, p.value_dim);
    fill_statistic(p, p.lse, -INFINITY);
  }
  if (p.fp64()) {
    forward_as<double>(p, executor);
  } else {
    forward_as<float>(p, executor);
  }
}

void merge(DType dtype, int64_t count, int64_t value_dim, const void* out_a, const void* lse_a, const void* out_b,
           const void* lse_b, void* out, void* lse, const Executor& executor) {
  with_type(dtype, [&](auto tag) {
    using T = decltype(tag);
    merge_as<T, decltype(widen(tag))>(count, value_dim, out_a, lse_a, out_b, lse_b, out, lse, executor);
  });
}

void dropout_mask(const uint64_t* seed, double p, int64_t batch, int64_t heads, int64_t rows, int64_t keys, uint8_t* keep,
                  const Executor& executor) {
  const auto dropout = problem::dropout(seed, p);
  for_each(executor, batch * heads * rows, 0, [&](int64_t task, void*) {
    const int64_t plane = task / rows, row = task % rows;
    for (int64_t j = 0; j < keys; ++j) keep[task * keys + j] = dropout.keeps(plane, row, j);
  });
}

}  // namespace flash::cpu
