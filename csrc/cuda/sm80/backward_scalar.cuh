// sm80/backward_scalar.cuh: gradients by plain arithmetic. Any element type, head dim, stride and alignment, every feature; the same
// bits in every run but for the sums of the mask's gradient. It is fp64's kernel and what the tensor-core kernels fall back on.
// Three roles of one loop. A block owns kTile lines and walks over tiles of kTile columns; S and dP [lines, columns] are recomputed
// in slices of kDepth head dims, then weigh into shared memory and multiply what was walked over:
//   kKeys   lines are keys, columns the rows that see them:  dV += P^T dO, dK += dS^T Q
//   kRows   lines are rows, columns the keys they see:       dQ += dS K
//   kMask   lines are keys: a tile of the mask's gradient, summed over whatever the mask is broadcast along, in a fixed order
// blockIdx.y: which kOutput columns of the gradients; S is recomputed for each.
#pragma once
#include "cuda/common/any_element.cuh"
#include "cuda/common/single_score.cuh"
#include "cuda/sm80/backward_block.cuh"

namespace flash::sm80 {

enum class Role : uint8_t { kKeys, kRows, kMask };

// Real: what sums are kept in, double for fp64 and float for the other element types, which are told apart at run time.
template <class Real>
struct ScalarConfig {
  static constexpr int kTile = sizeof(Real) == 8 ? 32 : 64;  // fills 48 KB of shared memory
  static constexpr int kThreads = 256, kSide = 16;           // threads: kSide x kSide
  static constexpr int kPer = kTile / kSide;                 // lines, and columns, of a thread
  static constexpr int kDepth = 8;
  static constexpr int kOutput = 128, kOutputPer = kOutput / kSide;
  static constexpr int kStride = kTile + 4;  // of transposed slices and weights
};

template <class Real, Role kRole>
class ScalarGradients {
  using Config = ScalarConfig<Real>;
  static constexpr int kTile = Config::kTile, kPer = Config::kPer, kDepth = Config::kDepth, kSide = Config::kSide;
  static constexpr int kOutput = Config::kOutput, kOutputPer = Config::kOutputPer, kStride = Config::kStride;
  static constexpr bool kLinesAreKeys = kRole != Role::kRows;
  static constexpr int kOutputs = kRole == Role::kKeys ? 2 : kRole == Role::kRows ? 1 : 0;

 public:
  struct Shared {
    union {
      Real slice[4][kDepth][kStride];   // [operand][head dim][line or column]: K, V, Q, dO (or the walked ones first)
      Real walked[2][kDepth][kOutput];  // [operand][column][head dim]
    };
    Real weight[2][kTile][kStride];  // [dS, P][column][line]
  };
  static_assert(sizeof(Shared) <= 48 * 1024);

  __device__ __forceinline__ ScalarGradients(const BackwardCall& call, Shared& shared)
      : call_(call), p_(call.problem), shared_(shared), x_(threadIdx.x % kSide), y_(threadIdx.x / kSide) {
    if (p_.dropout_p > 0) dropout_ = problem::dropout(p_.seed, p_.dropout_p);
  }

  // kKeys, kRows: one tile of lines, written once.
  __device__ __forceinline__ void walk() {
    const Owner owner = Owner::find<!kLinesAreKeys, kTile>(call_);
    if (owner.count <= 0) return;
    sequence_ = owner.sequence;
    interval_ = owner.interval;
    clear();
    const Walk walk = kLinesAreKeys ? Walk::over_rows<kTile, kTile>(owner) : Walk::over_keys<kTile>(owner);
    const int64_t group = kLinesAreKeys ? call_.group : 1;
#pragma unroll 1
    for (int64_t h = 0; h < group; ++h) {
      head_ = owner.head * group + h;
#pragma unroll 1
      for (int tile = walk.first; tile <= walk.last; ++tile) {
        line_ = owner.first;
        column_ = int64_t{tile} * kTile;
        multiply();
        weigh();
        accumulate();
      }
    }
    if constexpr (kRole == Role::kKeys) {
      store(call_.gradients.dkey, 0, owner, sequence_.key, static_cast<Real>(p_.scale), p_.head_dim);
      store(call_.gradients.dvalue, 1, owner, sequence_.key, Real(1), p_.value_dim);
    } else {
      store(call_.gradients.dquery, 0, owner, sequence_.row, static_cast<Real>(p_.scale), p_.head_dim);
    }
  }

  // kMask: one tile of the mask's gradient. Blocks: [mask batch][mask head][row tile][key tile], 1 where the mask is broadcast.
  __device__ __forceinline__ void sum_mask() {
    const problem::Gradients& g = call_.gradients;
    const int64_t row_tiles = (p_.rows + kTile - 1) / kTile, key_tiles = (p_.keys + kTile - 1) / kTile;
    int64_t rest = blockIdx.x;
    const auto take = [&](bool broadcast, int64_t count) {  // this block's [first, last) of a dimension
      const int64_t blocks = broadcast ? 1 : count, index = rest % blocks;
      rest /= blocks;
      return broadcast ? problem::Span{0, count} : problem::Span{index, index + 1};
    };
    const problem::Span keys = take(g.dmask_key == 0, key_tiles), rows = take(g.dmask_row == 0, row_tiles);
    const problem::Span heads = take(g.dmask_head == 0, p_.heads), batches = take(g.dmask_batch == 0, p_.batch);
    clear();
#pragma unroll 1
    for (int64_t b = batches.first; b < batches.last; ++b) {
      sequence_ = problem::sequence(p_, b);
      interval_ = problem::interval(p_, sequence_.rows, sequence_.keys);
#pragma unroll 1
      for (head_ = heads.first; head_ < heads.last; ++head_) {
#pragma unroll 1
        for (int64_t key = keys.first; key < keys.last; ++key) {
#pragma unroll 1
          for (int64_t row = rows.first; row < rows.last; ++row) {
            line_ = key * kTile;
            column_ = row * kTile;
            if (interval_.cover(column_, min(column_ + kTile, p_.rows), line_, min(line_ + kTile, p_.keys)) ==
                problem::Cover::kSkip)
              continue;
            multiply();
            weigh();
          }
        }
      }
    }
    store_mask(batches.first * g.dmask_batch + heads.first * g.dmask_head, rows.first * kTile, keys.first * kTile);
  }

 private:
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int o = 0; o < kOutputs; ++o)
#pragma unroll
      for (int i = 0; i < kPer; ++i)
#pragma unroll
        for (int c = 0; c < kOutputPer; ++c) rOutput_[o][i][c] = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i)
#pragma unroll
      for (int j = 0; j < kPer; ++j) rMask_[i][j] = 0;
  }

  // Element offsets of rows.
  __device__ __forceinline__ int64_t query_row(const problem::Array& a, int64_t row) const {
    return problem::offset(a, sequence_.batch, head_, sequence_.row + row);
  }
  __device__ __forceinline__ int64_t key_row(const problem::Array& a, int64_t key) const {
    return problem::offset(a, sequence_.batch, problem::kv_head(p_, head_), sequence_.key + key);
  }

  __device__ __forceinline__ Real read(const problem::Array& a, int64_t at) const {
    return common::read<Real>(a.data, p_.dtype, at);
  }

  // Head dims [depth, depth + kDepth) of kTile rows or keys from `first`, transposed; zeros past the end.
  template <bool kOfKeys>
  __device__ __forceinline__ void load_slice(int operand, const problem::Array& a, int64_t first, int64_t dim, int64_t depth) {
    const int64_t count = kOfKeys ? sequence_.keys : sequence_.rows;
#pragma unroll
    for (int n = 0; n < kTile * kDepth / Config::kThreads; ++n) {
      const int index = threadIdx.x + n * Config::kThreads, d = index % kDepth, line = index / kDepth;
      const bool inside = first + line < count && depth + d < dim;
      const int64_t from = kOfKeys ? key_row(a, first + line) : query_row(a, first + line);
      shared_.slice[operand][d][line] = inside ? read(a, from + depth + d) : Real(0);
    }
  }

  // rScore_ = q . k, rGradient_ = dout . v of this thread's elements.
  __device__ __forceinline__ void multiply() {
#pragma unroll
    for (int i = 0; i < kPer; ++i)
#pragma unroll
      for (int j = 0; j < kPer; ++j) rScore_[i][j] = rGradient_[i][j] = 0;
    const int64_t first_key = kLinesAreKeys ? line_ : column_, first_row = kLinesAreKeys ? column_ : line_;
    constexpr int kKey = kLinesAreKeys ? 0 : 2, kRow = 2 - kKey;  // operands 0, 1 are lines, 2, 3 columns
    const int64_t depths = max(p_.head_dim, p_.value_dim);
#pragma unroll 1
    for (int64_t depth = 0; depth < depths; depth += kDepth) {
      __syncthreads();
      load_slice<true>(kKey, p_.key, first_key, p_.head_dim, depth);
      load_slice<true>(kKey + 1, p_.value, first_key, p_.value_dim, depth);
      load_slice<false>(kRow, p_.query, first_row, p_.head_dim, depth);
      load_slice<false>(kRow + 1, call_.gradients.dout, first_row, p_.value_dim, depth);
      __syncthreads();
      // A sum of its own for each slice: one chain over all head dims would lose more than fp32 attention does elsewhere.
      Real rSlice[2][kPer][kPer] = {};
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        Real rLine[2][kPer], rColumn[2][kPer];
#pragma unroll
        for (int o = 0; o < 2; ++o)
#pragma unroll
          for (int i = 0; i < kPer; ++i) {
            rLine[o][i] = shared_.slice[o][d][y_ * kPer + i];
            rColumn[o][i] = shared_.slice[2 + o][d][x_ * kPer + i];
          }
#pragma unroll
        for (int i = 0; i < kPer; ++i)
#pragma unroll
          for (int j = 0; j < kPer; ++j) {
            rSlice[0][i][j] += rLine[0][i] * rColumn[0][j];
            rSlice[1][i][j] += rLine[1][i] * rColumn[1][j];
          }
      }
#pragma unroll
      for (int i = 0; i < kPer; ++i)
#pragma unroll
        for (int j = 0; j < kPer; ++j) {
          rScore_[i][j] += rSlice[0][i][j];
          rGradient_[i][j] += rSlice[1][i][j];
        }
    }
  }

  static __device__ __forceinline__ Real mask_value(const problem::Mask& mask, int64_t at) {
    if (mask.dtype == problem::DType::kBool) return static_cast<const uint8_t*>(mask.data)[at] != 0 ? Real(0) : -Real(INFINITY);
    return common::read<Real>(mask.data, mask.dtype, at);
  }

  // From rScore_ and rGradient_ to weights in shared memory (kKeys, kRows) or sums of dX (kMask). A thread's own elements pass through
  // shared memory, so that the loop over them need not be unrolled: it is long, and not what the time goes into.
  __device__ __forceinline__ void weigh() {
    __syncthreads();  // everybody is done with the previous tile's weights
#pragma unroll
    for (int i = 0; i < kPer; ++i)
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        shared_.weight[0][x_ * kPer + j][y_ * kPer + i] = rScore_[i][j];
        shared_.weight[1][x_ * kPer + j][y_ * kPer + i] = rGradient_[i][j];
      }
#pragma unroll 1
    for (int n = 0; n < kPer * kPer; ++n) {
      const int line = y_ * kPer + n % kPer, column = x_ * kPer + n / kPer;
      weigh(line, column, shared_.weight[0][column][line], shared_.weight[1][column][line]);
    }
    if constexpr (kRole == Role::kMask) {
#pragma unroll
      for (int i = 0; i < kPer; ++i)
#pragma unroll
        for (int j = 0; j < kPer; ++j) rMask_[i][j] += shared_.weight[0][x_ * kPer + j][y_ * kPer + i];
    }
  }

  // In: score = q . k and gradient = dout . v. Out: score = dS (kMask: dX), gradient = P as it multiplies V.
  __device__ __forceinline__ void weigh(int line, int column, Real& score, Real& gradient) const {
    const int64_t key = kLinesAreKeys ? line_ + line : column_ + column, row = kLinesAreKeys ? column_ + column : line_ + line;
    const int64_t batch = sequence_.batch;
    if (row >= sequence_.rows || !interval_.sees(row, key)) {
      score = gradient = 0;
      return;
    }
    auto [x, slope] = common::single_score(p_, batch, head_, row + interval_.diagonal, key, score);
    if (const problem::Mask& m = p_.mask; m.data != nullptr) {
      x = common::masked_score(x, Real(mask_value(m, batch * m.batch + head_ * m.head + row * m.row + key * m.key)), Real(1));
    }
    const int64_t place = problem::lse_offset(p_, batch, head_, sequence_.row + row);
    const Real lse = static_cast<const Real*>(p_.lse)[place], delta = static_cast<const Real*>(call_.gradients.delta)[place];
    const Real exponent = x - lse;  // above 0 by the rounding of a large lse only; NaN stays
    const Real probability = lse == -Real(INFINITY) ? Real(0) : exponent > 0 ? Real(1) : exp(exponent);
    Real weight = probability, dp = gradient;
    if (p_.dropout_p > 0) {
      const bool kept = p_.dropout_p < 1 && dropout_.keeps(batch * p_.heads + head_, row, key);
      const Real factor = Real(1 / (1 - p_.dropout_p));
      weight = kept ? weight * factor : Real(0);
      dp = kept ? dp * factor : Real(0);
    }
    const Real dx = probability * (dp - delta);
    score = kRole == Role::kMask ? dx : dx * slope;
    gradient = weight;
    if constexpr (kRole == Role::kKeys) {
      const problem::Gradients& g = call_.gradients;
      if (g.dmask != nullptr && blockIdx.y == 0 && dx != 0)
        atomicAdd(
            static_cast<Real*>(g.dmask) + batch * g.dmask_batch + head_ * g.dmask_head + row * g.dmask_row + key * g.dmask_key,
            dx);
    }
  }

  // rOutput_ += weights times the rows (kKeys: Q, dO) or keys (kRows: K) of the tile, kDepth of them at a time.
  __device__ __forceinline__ void accumulate() {
    const int64_t first = int64_t{blockIdx.y} * kOutput;
#pragma unroll 1
    for (int slice = 0; slice < kTile; slice += kDepth) {
      __syncthreads();
#pragma unroll
      for (int n = 0; n < kDepth * kOutput / Config::kThreads; ++n) {
        const int index = threadIdx.x + n * Config::kThreads, d = index % kOutput, line = index / kOutput;
        const int64_t at = column_ + slice + line;
        const bool exists = at < (kLinesAreKeys ? sequence_.rows : sequence_.keys);
        const problem::Array& walked = kLinesAreKeys ? p_.query : p_.key;
        const int64_t from = kLinesAreKeys ? query_row(walked, at) : key_row(walked, at);
        shared_.walked[0][line][d] = exists && first + d < p_.head_dim ? read(walked, from + first + d) : Real(0);
        if constexpr (kOutputs == 2) {
          const problem::Array& dout = call_.gradients.dout;
          shared_.walked[1][line][d] =
              exists && first + d < p_.value_dim ? read(dout, query_row(dout, at) + first + d) : Real(0);
        }
      }
      __syncthreads();
#pragma unroll
      for (int line = 0; line < kDepth; ++line)
#pragma unroll
        for (int o = 0; o < kOutputs; ++o) {
          Real rWeight[kPer];
#pragma unroll
          for (int i = 0; i < kPer; ++i) rWeight[i] = shared_.weight[o][slice + line][y_ * kPer + i];
#pragma unroll
          for (int c = 0; c < kOutputPer; ++c) {
            const Real walked = shared_.walked[o][line][output_column(c)];
#pragma unroll
            for (int i = 0; i < kPer; ++i) rOutput_[o][i][c] += rWeight[i] * walked;
          }
        }
    }
  }

  // Columns of a thread: groups of 4, which lie 4 kSide apart.
  __device__ __forceinline__ int output_column(int c) const { return c / 4 * 4 * kSide + x_ * 4 + c % 4; }

  __device__ __forceinline__ void store(const problem::Array& a, int output, const Owner& owner, int64_t start, Real scale,
                                        int64_t dim) const {
    if (a.data == nullptr) return;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int line = y_ * kPer + i;
      if (line >= owner.count) continue;
      const int64_t to = problem::offset(a, owner.batch, owner.head, start + owner.first + line);
#pragma unroll
      for (int c = 0; c < kOutputPer; ++c) {
        const int64_t column = int64_t{blockIdx.y} * kOutput + output_column(c);
        if (column < dim) common::write(a.data, p_.dtype, to + column, rOutput_[output][i][c] * scale);
      }
    }
  }

  // The block's sums of dX; first along the dimensions of a tile that the mask is broadcast along, by one thread each, in order.
  __device__ __forceinline__ void store_mask(int64_t start, int64_t first_row, int64_t first_key) const {
    const problem::Gradients& g = call_.gradients;
#pragma unroll
    for (int i = 0; i < kPer; ++i)
#pragma unroll
      for (int j = 0; j < kPer; ++j) shared_.weight[0][x_ * kPer + j][y_ * kPer + i] = rMask_[i][j];
    __syncthreads();
    const int rows = g.dmask_row == 0 ? 1 : kTile, keys = g.dmask_key == 0 ? 1 : kTile;
    for (int n = threadIdx.x; n < rows * keys; n += Config::kThreads) {
      const int row = n / keys, key = n % keys;
      if ((rows > 1 && first_row + row >= p_.rows) || (keys > 1 && first_key + key >= p_.keys)) continue;
      Real sum = 0;
      for (int r = rows > 1 ? row : 0; r < (rows > 1 ? row + 1 : kTile); ++r)
        for (int k = keys > 1 ? key : 0; k < (keys > 1 ? key + 1 : kTile); ++k) sum += shared_.weight[0][r][k];
      static_cast<Real*>(g.dmask)[start + (first_row + row) * g.dmask_row + (first_key + key) * g.dmask_key] += sum;
    }
  }

  const BackwardCall& call_;
  const problem::Problem& p_;
  Shared& shared_;
  const int x_, y_;
  problem::Dropout dropout_{};
  problem::Sequence sequence_;
  problem::Interval interval_;
  int64_t head_, line_, column_;  // of the tile: query head, first line and column
  Real rScore_[kPer][kPer], rGradient_[kPer][kPer];
  Real rOutput_[kOutputs > 0 ? kOutputs : 1][kPer][kOutputPer];
  Real rMask_[kPer][kPer];
};

template <class Real, Role kRole>
__global__ void __launch_bounds__(ScalarConfig<Real>::kThreads)
    backward_scalar_kernel(const __grid_constant__ BackwardCall call) {
  __shared__ __align__(16) typename ScalarGradients<Real, kRole>::Shared shared;
  ScalarGradients<Real, kRole> gradients(call, shared);
  if constexpr (kRole == Role::kMask) {
    gradients.sum_mask();
  } else {
    gradients.walk();
  }
}

}  // namespace flash::sm80
