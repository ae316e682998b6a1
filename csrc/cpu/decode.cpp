// cpu/decode.cpp: a cache cut into parts for the kernels of the chosen instruction set. A part lies in one entry of the cache and is read
// in place; pages too short for that are first copied together, a few hundred keys at a time.
#include "cpu/decode.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/combine.h"
#include "cpu/schedule.h"

namespace flash::cpu {
namespace {

using problem::Array;
using problem::Decode;
using problem::Problem;

constexpr int64_t kShortPage = 128, kGathered = 256;  // keys

void move(Array& a, int64_t elements, problem::DType type) { a.data = static_cast<char*>(a.data) + elements * size_of(type); }

// The part of a decode call that concerns one sequence, as sequence 0 of a problem of its own.
Problem of_sequence(const Problem& p, int64_t b) {
  Problem one = p;
  const int64_t statistic = p.fp64() ? 8 : 4;
  move(one.query, b * p.query.batch, p.dtype);
  move(one.out, b * p.out.batch, p.dtype);
  if (p.lse != nullptr) one.lse = static_cast<char*>(p.lse) + b * p.lse_batch * statistic;
  if (p.alibi_slopes != nullptr) one.alibi_slopes = static_cast<const char*>(p.alibi_slopes) + b * p.alibi_batch * statistic;
  return one;
}

// Keys [begin, end) of some lanes of one kv head.
struct Part {
  int64_t batch, kv_head, lane_begin, lane_end, begin, end;
  int64_t at;  // of its result in the workspace, in Reals; -1: it is the only part
};

// How a call is cut, by sizes and lengths alone.
struct Cut {
  std::vector<Part> parts;
  std::vector<Combination> combinations;  // their problem is that of sequence `sequence.batch`
  int64_t space = 0;                      // of the workspace, in Reals
};

Cut cut(const Decode& d, const Tiling& tiling) {
  const Problem& p = d.problem;
  const int64_t group = p.heads / p.kv_heads, lanes = p.rows * group;
  const int64_t tasks = p.batch * p.kv_heads * ceil_div(lanes, tiling.lanes);
  const bool pages = d.cache.block_table != nullptr;
  const int64_t page = pages ? d.cache.page_size : problem::kOpen;
  const bool gathered = page < kShortPage;
  const int64_t wanted = ceil_div(ceil_div(p.keys, ceil_div(kParallel, std::max<int64_t>(tasks, 1))), tiling.keys);
  const int64_t longest = gathered ? kGathered : std::max<int64_t>(512, wanted * tiling.keys);
  Cut result;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t length = problem::length_of(d.cache, p.keys, b);
    const problem::Interval interval = problem::interval(p, p.rows, length);
    for (int64_t kv = 0; kv < p.kv_heads; ++kv)
      for (int64_t lane = 0; lane < lanes; lane += tiling.lanes) {
        const int64_t end = std::min(lane + tiling.lanes, lanes), first = static_cast<int64_t>(result.parts.size());
        problem::Span seen = interval.rows(lane / group, (end - 1) / group + 1);
        seen.first = std::max(seen.first, problem::left_pad_of(d.cache, b));
        int64_t key = seen.first;
        do {
          int64_t stop = std::min(key + longest, seen.last);
          if (!gathered) stop = std::min(stop, (key / page + 1) * page);
          result.parts.push_back({b, kv, lane, end, key, stop, -1});
          key = stop;
        } while (key < seen.last);
        const int64_t count = static_cast<int64_t>(result.parts.size()) - first;
        if (count == 1) continue;
        result.combinations.push_back({{b, 0, 0, p.rows, length}, kv, lane, end, count, result.space});
        for (int64_t i = 0; i < count; ++i) {
          result.parts[first + i].at = result.space;
          result.space += (end - lane) * (p.value_dim + kStatistics);
        }
      }
  }
  return result;
}

// Rows [begin, end) of one head of a paged cache, copied to dense rows.
void gather(const Decode& d, const Array& a, int64_t dim, const Part& part, char* to) {
  const int64_t bytes = size_of(d.problem.dtype);
  for (int64_t key = part.begin; key < part.end; ++key, to += dim * bytes) {
    const int64_t entry = problem::entry_of(d.cache, part.batch, key), slot = problem::slot_of(d.cache, key);
    std::memcpy(to, static_cast<const char*>(a.data) + problem::offset(a, entry, part.kv_head, slot) * bytes, dim * bytes);
  }
}

// Points key and value at the memory of a part; returns the row there that key 0 would have.
int64_t locate(const Decode& d, const Part& part, Problem& p, char* buffer) {
  const problem::Cache& cache = d.cache;
  if (part.begin >= part.end) return 0;
  if (cache.block_table != nullptr && cache.page_size < kShortPage) {
    char* values = buffer + kGathered * p.head_dim * size_of(p.dtype);
    gather(d, p.key, p.head_dim, part, buffer);
    gather(d, p.value, p.value_dim, part, values);
    p.key = {buffer, 0, 0, p.head_dim};
    p.value = {values, 0, 0, p.value_dim};
    return -part.begin;
  }
  const int64_t entry = problem::entry_of(cache, part.batch, part.begin);
  move(p.key, entry * p.key.batch, p.dtype);
  move(p.value, entry * p.value.batch, p.dtype);
  return problem::slot_of(cache, part.begin) - part.begin;
}

template <class Real>
void decode_as(const Decode& d, const Executor& executor) {
  const Problem& p = d.problem;
  const Kernels& kernels = kernels_for(p);
  const int64_t widest = std::max(p.head_dim, p.value_dim), lanes = p.rows * (p.heads / p.kv_heads);
  Tiling tiling;
  tiling.keys = widest <= 128 ? 128 : widest <= 256 ? 64 : 32;
  tiling.lanes = std::min<int64_t>(8, ceil_div(lanes, kernels.group)) * kernels.group;
  const Cut parts = cut(d, tiling);
  const Memory workspace = allocate(parts.space * sizeof(Real));
  const size_t scratch_bytes = (kernels.forward_scratch(p, tiling) + 63) / 64 * 64;
  const size_t gathered_bytes = d.cache.block_table != nullptr && d.cache.page_size < kShortPage
                                    ? kGathered * (p.head_dim + p.value_dim) * size_of(p.dtype)
                                    : 0;
  for_each(executor, static_cast<int64_t>(parts.parts.size()), scratch_bytes + gathered_bytes, [&](int64_t i, void* scratch) {
    const Part& part = parts.parts[i];
    Problem one = of_sequence(p, part.batch);
    const int64_t first = locate(d, part, one, static_cast<char*>(scratch) + scratch_bytes);
    const problem::Sequence sequence{0, 0, first, p.rows, problem::length_of(d.cache, p.keys, part.batch)};
    void* partial = part.at < 0 ? nullptr : static_cast<Real*>(workspace.get()) + part.at;
    kernels.forward({&one, sequence, part.kv_head, part.lane_begin, part.lane_end, part.begin, part.end, partial}, tiling,
                    scratch);
  });
  for_each(executor, static_cast<int64_t>(parts.combinations.size()), 0, [&](int64_t i, void*) {
    const Combination& c = parts.combinations[i];
    combine(p, c, static_cast<const Real*>(workspace.get()) + c.at);
  });
}

}  // namespace

void decode(const Decode& d, const Executor& executor) {
  if (d.problem.fp64()) {
    decode_as<double>(d, executor);
  } else {
    decode_as<float>(d, executor);
  }
}

void append(const problem::Append& a, const Executor& executor) {
  const int64_t bytes = size_of(a.dtype);
  for_each(executor, a.batch * a.rows, 0, [&](int64_t task, void*) {
    const int64_t batch = task / a.rows, row = task % a.rows, key = problem::length_of(a.cache, a.keys, batch) + row;
    if (key >= a.keys) return;
    const int64_t entry = problem::entry_of(a.cache, batch, key), slot = problem::slot_of(a.cache, key);
    const auto copy = [&](const Array& from, const Array& to, int64_t head, int64_t dim) {
      std::memcpy(static_cast<char*>(to.data) + problem::offset(to, entry, head, slot) * bytes,
                  static_cast<const char*>(from.data) + problem::offset(from, batch, head, row) * bytes, dim * bytes);
    };
    for (int64_t head = 0; head < a.kv_heads; ++head) {
      copy(a.new_key, a.key, head, a.head_dim);
      copy(a.new_value, a.value, head, a.value_dim);
    }
  });
}

}  // namespace flash::cpu
