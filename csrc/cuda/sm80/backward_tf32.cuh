// sm80/backward_tf32.cuh: fp32 gradients on tensor cores, at fp32's accuracy: x = high + low, both TF32; a b = high high + high low +
// low high. One loop from either side. A block owns kLines lines and walks over tiles of kColumns columns:
//   of keys   lines are keys, columns the rows that see them, for each query head of the group: dV += P^T dO, dK += dS^T Q;
//             dQ += dS K is added to dq itself in global memory, unless a kernel of rows follows
//   of rows   lines are rows, columns the keys they see: dQ += dS K. The same bits in every run
// Of keys, two warps share 32 keys: one multiplies S, the other dP of all of them, so that a split operand feeds more products; each
// takes half of both from the other for the softmax, and then adds up half the columns of dK and dV of all 32. What crosses goes
// through this warp's part of dS in shared memory, as registers of accumulators.
// Permutations save all transposes: inside a k8 step, k = t and t + 4 of an A operand are columns 2t and 2t + 1, which accumulators
// already hold; and column g of n8 tile j of a gradient is 4 g + j (tile/multiply_tf32.cuh).
#pragma once
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/sm80/backward_block.cuh"
#include "cuda/sm80/backward_score.cuh"
#include "cuda/tile/multiply_tf32.cuh"
#include "cuda/tiles.h"

namespace flash::sm80 {

template <cuda::BackwardTile kTile>
struct Tf32Keys {
  static constexpr bool kOfKeys = true;
  static constexpr int kDim = kTile.bucket, kLines = kTile.keys, kColumns = kTile.rows, kWarps = kTile.warps;
  static constexpr int kThreads = kTile.threads(), kResident = kTile.resident,
                       kSharedBytes = cuda::backward_shared_bytes(kTile);
};

template <cuda::RowGradientTile kTile>
struct Tf32Rows {
  static constexpr bool kOfKeys = false;
  static constexpr int kDim = kTile.bucket, kLines = kTile.rows, kColumns = kTile.keys, kWarps = kTile.warps;
  static constexpr int kThreads = kTile.threads(), kResident = kTile.resident,
                       kSharedBytes = cuda::row_gradient_shared_bytes(kTile);
};

template <class Config>
class Tf32Gradients {
  static constexpr bool kOfKeys = Config::kOfKeys;
  static constexpr int kDim = Config::kDim, kLines = Config::kLines, kColumns = Config::kColumns, kThreads = Config::kThreads;
  static constexpr int kJ = kColumns / 8, kSlabs = kDim / 32;                // slabs of 32 head dims
  static constexpr int kI = kLines / Config::kWarps / 16;                    // blocks of 16 lines whose scores are a warp's
  static constexpr int kSharing = kOfKeys ? 2 : 1;                           // warps that share lines
  static constexpr int kOwn = kI * kSharing, kOwnSlabs = kSlabs / kSharing;  // whose gradients are
  static constexpr int kUnroll = 2;                                          // k8 steps
  static_assert(kI == 1 && kSlabs % kSharing == 0);
  using Layout = tile::Padded<kDim>;  // lines and columns, [., kDim]
  // A warp's dS [kColumns rows, its keys], for dQ; before, what it gives to the other one: accumulators, [n8 tile][lane] of 16 bytes.
  using ScoreLayout = tile::Padded<kI * 16>;
  using LineLoader = tile::Loader<Layout, kLines, kThreads>;
  using ColumnLoader = tile::Loader<Layout, kColumns, kThreads>;
  using Columns = LineStream<ColumnLoader, Layout, kColumns, false>;
  using Scores = float[kI][kJ][4];
  using Sums =
      float[kOwn][kOwnSlabs * 4][4];  // [i][4 d + q][2 half + f]: column 32 d + 4 (2 (lane % 4) + f) + q of this warp's

  // Shared memory: lines (K, V or Q, dO), columns (Q, dO or K, V); of keys also dS and lse2, delta of the columns.
  static constexpr int kLineBytes = Layout::bytes(kLines), kColumnBytes = Layout::bytes(kColumns);
  static constexpr int kColumnAt = 2 * kLineBytes, kScoreAt = kColumnAt + 2 * kColumnBytes;
  static constexpr int kStatisticsAt = kScoreAt + (kOfKeys ? Config::kWarps * ScoreLayout::bytes(kColumns) : 0);
  static constexpr int kOwnerAt = kStatisticsAt + 8 * kColumns;
  static_assert(Config::kSharedBytes == (kOfKeys ? kOwnerAt + cuda::kSharedBlockBytes : kStatisticsAt));
  static_assert(sizeof(Owner) <= cuda::kSharedBlockBytes);

 public:
  static __device__ __forceinline__ void run(const BackwardCall& call) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const Owner owner = Owner::find<!kOfKeys, kLines>(call);
    if (owner.count <= 0) return;
    const uint32_t shared = ptx::shared_address(memory);
    if constexpr (kOfKeys) {  // sums fill the registers: the loop reads the owner again from shared memory
      Owner& kept = *reinterpret_cast<Owner*>(memory + kOwnerAt);
      if (threadIdx.x == 0) kept = owner;
      __syncthreads();
      Tf32Gradients(call, kept, shared).walk();
    } else {
      Tf32Gradients(call, owner, shared).walk();
    }
  }

 private:
  __device__ __forceinline__ Tf32Gradients(const BackwardCall& call, const Owner& owner, uint32_t shared)
      : call_(call),
        owner_(owner),
        walk_(kOfKeys ? Walk::over_rows<kColumns, kLines>(owner) : Walk::over_keys<kColumns>(owner)),
        shared_(shared),
        lane_(threadIdx.x & 31),
        warp_(threadIdx.x >> 5),
        share_(warp_ % kSharing),
        first_line_(warp_ * kI * 16),
        sLines_(Layout::address(shared, first_line_ + tile::row_block_row(lane_), tile::row_block_chunk(lane_))),
        sColumns_(Layout::address(shared + kColumnAt, tile::column_block_row(lane_), tile::column_block_chunk(lane_))),
        sPairs_(Layout::address(shared + kColumnAt, tile::lane_column(lane_), tile::lane_line(lane_)) +
                share_ * kOwnSlabs * 128) {}

  __device__ __forceinline__ void walk() {
    const problem::Problem& p = call_.problem;
    const problem::Gradients& g = call_.gradients;
    load_lines();
    if constexpr (!kOfKeys) load_statistics();
    tile::clear(rFirst_);
    if constexpr (kOfKeys) tile::clear(rSecond_);
    for (const int operand : {0, 1}) columns(operand).clear(shared_ + kColumnAt + operand * kColumnBytes, 1);
    const int steps = walk_.count() * (kOfKeys ? static_cast<int>(call_.group) : 1);
    int tile = walk_.first;
    int64_t head = kOfKeys ? owner_.head * call_.group : owner_.head;
    if (steps > 0) fetch(tile, head);
    ptx::commit_copies();
#pragma unroll 1
    for (int left = steps; left > 0; --left) {
      ptx::wait_copies<0>();
      __syncthreads();
      step(tile, head);
      __syncthreads();  // everybody is done with the columns: the next ones travel while dQ is added up
      const int done = tile;
      const int64_t done_head = head;
      if (tile++ == walk_.last) {
        tile = walk_.first;
        ++head;
      }
      if (left > 1) fetch(tile, head);
      ptx::commit_copies();
      if constexpr (kOfKeys)
        if (call_.sum_dquery) add_query_gradient(done, done_head);
    }
    ptx::wait_copies<0>();  // nothing was walked over: copies of the lines may still be under way
    if constexpr (kOfKeys) {
      store(g.dkey, rFirst_, call_.modifiers.scale, owner_.sequence.key, p.head_dim);
      store(g.dvalue, rSecond_, 1.f, owner_.sequence.key, p.value_dim);
    } else {
      store(g.dquery, rFirst_, call_.modifiers.scale, owner_.sequence.row, p.head_dim);
    }
  }

  // What is walked over: of keys 0 Q, 1 dO; of rows 0 K, 1 V.
  __device__ __forceinline__ const problem::Array& walked(int operand) const {
    const problem::Problem& p = call_.problem;
    return kOfKeys ? operand == 0 ? p.query : call_.gradients.dout : operand == 0 ? p.key : p.value;
  }
  __device__ __forceinline__ Columns columns(int operand) const {
    const problem::Problem& p = call_.problem;
    return Columns(walked(operand).row, kOfKeys ? owner_.sequence.rows : owner_.sequence.keys,
                   operand == 0 ? p.head_dim : p.value_dim, call_.load_bytes);
  }

  // A tile of both, addressed anew: nothing of it stays in registers while it is multiplied.
  __device__ __forceinline__ void fetch(int tile, int64_t head) const {
    const uint32_t to = shared_ + kColumnAt, to_lane = Layout::address(to, ColumnLoader::row(), ColumnLoader::chunk());
    const int64_t start = kOfKeys ? owner_.sequence.row : owner_.sequence.key,
                  plane = kOfKeys ? head : call_.by_group.divide(head);
#pragma unroll
    for (int operand = 0; operand < 2; ++operand) {
      const problem::Array& a = walked(operand);
      Columns stream = columns(operand);
      stream.begin(a.data, problem::offset(a, owner_.batch, plane, start), tile);
      stream.fetch(tile, to + operand * kColumnBytes, to_lane + operand * kColumnBytes);
    }
    if constexpr (kOfKeys) fetch_statistics(tile, head);
  }

  // The block's own lines, once.
  __device__ __forceinline__ void load_lines() const {
    const problem::Problem& p = call_.problem;
    const int64_t line = (kOfKeys ? owner_.sequence.key : owner_.sequence.row) + owner_.first;
    load_own<LineLoader, Layout, false>(call_, owner_, kOfKeys ? p.key : p.query, line, p.head_dim, shared_);
    load_own<LineLoader, Layout, false>(call_, owner_, kOfKeys ? p.value : call_.gradients.dout, line, p.value_dim,
                                        shared_ + kLineBytes);
  }

  // Of keys: lse2 and delta of a tile of rows, [2][kColumns].
  __device__ __forceinline__ void fetch_statistics(int tile, int64_t head) const {
    if (threadIdx.x >= kColumns / 2) return;
    const int part = threadIdx.x / (kColumns / 4), row = threadIdx.x % (kColumns / 4) * 4;
    const int64_t first = call_.scratch.first_block(owner_.sequence, head) * common::kBlockRows;
    const float* from = (part == 0 ? call_.scratch.lse2 : call_.scratch.delta) + first + int64_t{tile} * kColumns + row;
    const bool inside = int64_t{tile} * kColumns + row < owner_.sequence.rows;
    ptx::copy_16(shared_ + kStatisticsAt + (part * kColumns + row) * 4, inside ? from : call_.scratch.lse2, inside ? 16 : 0);
  }

  // Of rows: lse2 and delta of this lane's lines.
  __device__ __forceinline__ void load_statistics() {
    const int64_t first = call_.scratch.first_block(owner_.sequence, owner_.head) * common::kBlockRows + owner_.first;
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int line = first_line_ + i * 16 + half * 8 + tile::lane_line(lane_);
        const bool exists = line < owner_.count;
        rLse2_[i][half] = exists ? call_.scratch.lse2[first + line] : INFINITY;
        rDelta_[i][half] = exists ? call_.scratch.delta[first + line] : 0.f;
      }
  }

  __device__ __forceinline__ void step(int tile, int64_t head) {
    Scores rScore, rGradient;
    multiply_scores(rScore, rGradient);
    const int64_t column = int64_t{tile} * kColumns;
    const common::Place at(kOfKeys ? column : owner_.first, kOfKeys ? owner_.first : column, first_line_, 0, lane_);
    const problem::Problem& p = call_.problem;
    const problem::Dropout dropout = p.dropout_p > 0 ? problem::dropout(p.seed, p.dropout_p) : problem::Dropout{};
    const ScoreContext context{call_, owner_.sequence, owner_.interval, dropout, owner_.batch, head, !walk_.full(tile), lane_};
    weigh_general<kOfKeys, float>(rScore, rGradient, context, at, [&](int i, int j, int half) {
      if constexpr (kOfKeys) {
        const uint32_t sStatistics = shared_ + kStatisticsAt + (j * 8 + tile::lane_column(lane_)) * 4;
        const float2 lse2 = ptx::load_shared_8(sStatistics), delta = ptx::load_shared_8(sStatistics + kColumns * 4);
        return Statistics{{lse2.x, lse2.y}, {delta.x, delta.y}};
      } else {
        return Statistics{{rLse2_[i][half], rLse2_[i][half]}, {rDelta_[i][half], rDelta_[i][half]}};
      }
    });
    if constexpr (kOfKeys) {
      accumulate_shared(rSecond_, rGradient, sPairs_ + kColumnBytes);
      accumulate_shared(rFirst_, rScore, sPairs_);
      if (call_.sum_dquery) store_score(rScore);
    } else {
      tile::accumulate_rows<Layout, true, kJ, kJ>(rFirst_, sPairs_, [&](int k, int i) { return tile::operand(rScore[i][k]); });
    }
  }

  using Terms = tile::Terms;

  // r [16 kBlocks lines, columns] = lines columns^T.
  template <int kBlocks>
  static __device__ __forceinline__ void multiply(float (&r)[kBlocks][kJ][4], uint32_t sLines, int block_bytes,
                                                  uint32_t sColumns) {
    float rSmall[kBlocks][kJ][4];
    tile::clear(r);
    tile::clear(rSmall);
    tile::multiply_lines<Layout, true, kDim / 8>(r, rSmall, sLines, block_bytes, sColumns);
    tile::add(r, rSmall);
  }

  // q.k and dout.v of this warp's lines.
  __device__ __forceinline__ void multiply_scores(Scores& rScore, Scores& rGradient) const {
    if constexpr (kOfKeys) {
      // Block 0 is this warp's own, block 1 the other one's, before or behind it.
      float rBoth[2][kJ][4];
      const int other = (share_ == 0 ? 16 : -16) * Layout::kRowBytes;
      multiply(rBoth, sLines_ + share_ * kLineBytes, other, sColumns_ + share_ * kColumnBytes);
      give(rBoth[1]);
      const uint32_t sTheirs = part(warp_ ^ 1);
#pragma unroll
      for (int j = 0; j < kJ; ++j) {
        const uint4 x = ptx::load_shared_16(sTheirs + j * 512);
        const float theirs[4] = {__uint_as_float(x.x), __uint_as_float(x.z), __uint_as_float(x.y), __uint_as_float(x.w)};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          rScore[0][j][e] = share_ == 0 ? rBoth[0][j][e] : theirs[e];
          rGradient[0][j][e] = share_ == 0 ? theirs[e] : rBoth[0][j][e];
        }
      }
      synchronise();
    } else {
      multiply(rScore, sLines_, 16 * Layout::kRowBytes, sColumns_);
      multiply(rGradient, sLines_ + kLineBytes, 16 * Layout::kRowBytes, sColumns_ + kColumnBytes);
    }
  }

  // Of keys: the part of dS of a warp, at this lane's first 16 bytes.
  __device__ __forceinline__ uint32_t part(int warp) const {
    return shared_ + kScoreAt + warp * ScoreLayout::bytes(kColumns) + lane_ * 16;
  }
  // The two warps that share keys.
  __device__ __forceinline__ void synchronise() const { ptx::synchronise<64>(1 + warp_ / 2); }
  // Accumulators as A operands to this warp's part. Afterwards the other one's are there too.
  __device__ __forceinline__ void give(const float (&r)[kJ][4]) const {
    static_assert(kJ * 512 <= ScoreLayout::bytes(kColumns));
#pragma unroll
    for (int j = 0; j < kJ; ++j) ptx::store_shared(part(warp_) + j * 512, tile::operand(r[j]));
    synchronise();
  }

  // rSum [32 keys, half the columns] += the weights of both warps times the walked tile.
  __device__ __forceinline__ void accumulate_shared(Sums& rSum, const Scores& rWeight, uint32_t sPairs) const {
    give(rWeight[0]);
    const uint32_t sFirst = part(warp_ - share_);
    tile::accumulate_rows<Layout, true, kJ, kUnroll>(
        rSum, sPairs, [&](int k, int i) { return ptx::load_shared_16(sFirst + i * ScoreLayout::bytes(kColumns) + k * 512); });
    synchronise();
  }

  // dS^T to shared memory as dS [rows, keys]; inside 8 keys, key 2t goes to place t and 2t + 1 to t + 4: the permutation of k.
  __device__ __forceinline__ void store_score(const Scores& rScore) const {
    const int key = tile::lane_line(lane_), place = key / 2 + key % 2 * 4;
    const uint32_t sOwn = shared_ + kScoreAt + warp_ * ScoreLayout::bytes(kColumns);
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int j = 0; j < kJ; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = j * 8 + tile::lane_column(lane_) + e % 2;
          const uint32_t to = sOwn + row * ScoreLayout::kRowBytes + (i * 16 + e / 2 * 8 + place) * 4;
          ptx::store_shared(to, __float_as_uint(rScore[i][j][e]));
        }
  }

  // dQ [rows of the tile, kDim] += scale dS K in global memory. Warps: slabs of head dims, then blocks of 16 rows.
  __device__ __forceinline__ void add_query_gradient(int tile, int64_t head) const {
    constexpr int kRowWarps = Config::kWarps / kSlabs, kRowBlocks = kColumns / 16 / kRowWarps;
    static_assert(Config::kWarps % kSlabs == 0 && kColumns / 16 % kRowWarps == 0);
    const int slab = warp_ % kSlabs, first_row = warp_ / kSlabs * kRowBlocks * 16;
    constexpr int kWarpSteps = kI * 2;  // k8 steps over the keys of a warp
    const uint32_t sScore =
        ScoreLayout::address(shared_ + kScoreAt, first_row + tile::row_block_row(lane_), tile::row_block_chunk(lane_));
    const uint32_t sKey = Layout::address(shared_, tile::lane_column(lane_), tile::lane_line(lane_)) + slab * 128;
    float rSum[kRowBlocks][4][4];
    tile::clear(rSum);
#pragma unroll
    for (int k = 0; k < kLines / 8; ++k) {
      Terms rLine[kRowBlocks];
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) {
        uint32_t x[4];
        ptx::load_matrices(x, ScoreLayout::columns(sScore, k % kWarpSteps) + k / kWarpSteps * ScoreLayout::bytes(kColumns) +
                                  i * 16 * ScoreLayout::kRowBytes);
        rLine[i] = tile::split(x);
      }
      tile::multiply_rows<Layout, true>(rSum, rLine, sKey + k * 8 * Layout::kRowBytes);
    }
    const problem::Array& dq = call_.gradients.dquery;
    const float scale = call_.modifiers.scale;
    const int64_t row = int64_t{tile} * kColumns + first_row + tile::lane_line(lane_);
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t line = row + i * 16 + half * 8;
        if (line >= owner_.sequence.rows) continue;
        float* to = static_cast<float*>(dq.data) + problem::offset(dq, owner_.batch, head, owner_.sequence.row + line);
#pragma unroll
        for (int f = 0; f < 2; ++f) {
          float v[4];
#pragma unroll
          for (int q = 0; q < 4; ++q) v[q] = rSum[i][q][2 * half + f] * scale;
          add_four(to, slab * 32 + 4 * (tile::lane_column(lane_) + f), v);
        }
      }
  }

  __device__ __forceinline__ void add_four(float* row, int column, const float (&v)[4]) const {
    const int dim = static_cast<int>(call_.problem.head_dim);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (call_.store_bytes == 16) {
      if (column < dim) ptx::reduce_add_4(row + column, v[0], v[1], v[2], v[3]);
      return;
    }
#endif
#pragma unroll
    for (int q = 0; q < 4; ++q)
      if (column + q < dim) ptx::reduce_add(row + column + q, v[q]);
  }

  // Straight from registers: a lane holds four neighbouring columns.
  __device__ __forceinline__ void store(const problem::Array& a, const Sums& r, float scale, int64_t start, int64_t dim) const {
    if (a.data == nullptr) return;
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int line = first_line_ + (i - share_) * 16 + half * 8 + tile::lane_line(lane_);
        if (line >= owner_.count) continue;
        float* to = static_cast<float*>(a.data) + problem::offset(a, owner_.batch, owner_.head, start + owner_.first + line);
#pragma unroll
        for (int d = 0; d < kOwnSlabs; ++d)
#pragma unroll
          for (int f = 0; f < 2; ++f) {
            const int column = (share_ * kOwnSlabs + d) * 32 + 4 * (tile::lane_column(lane_) + f);
            float v[4];
#pragma unroll
            for (int q = 0; q < 4; ++q) v[q] = r[i][d * 4 + q][2 * half + f] * scale;
            if (call_.store_bytes == 16 && column < dim) {
              *reinterpret_cast<float4*>(to + column) = make_float4(v[0], v[1], v[2], v[3]);
            } else {
#pragma unroll
              for (int q = 0; q < 4; ++q)
                if (column + q < dim) to[column + q] = v[q];
            }
          }
      }
  }

  const BackwardCall& call_;
  const std::conditional_t<kOfKeys, const Owner&, Owner> owner_;
  const Walk walk_;
  const uint32_t shared_;
  const int lane_, warp_, share_, first_line_;  // which of the warps that share lines; this warp's first line, in the tile
  // Lane addresses: the first line operand and the first walked tile for ldmatrix; the walked tile for 16-byte reads of two rows.
  const uint32_t sLines_, sColumns_, sPairs_;
  float rLse2_[kI][2], rDelta_[kI][2];  // of rows
  Sums rFirst_, rSecond_;               // dK, dV; of rows: dQ
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kResident)
    backward_tf32_kernel(const __grid_constant__ BackwardCall call) {
  Tf32Gradients<Config>::run(call);
}

}  // namespace flash::sm80
