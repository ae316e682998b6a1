// Decode: how a cache is cut over CUDA blocks, and the CPU kernels over pages beside the same keys in one piece.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "cpu/decode.h"
#include "cuda/decode/tiles.h"
#include "problem/decode.h"
#include "problem/describe.h"

namespace flash::problem {
namespace {

Device device(int major) {
  Device device;
  device.cuda = true;
  device.major = major;
  device.multiprocessors = major == 9 ? 132 : 108;
  device.shared_memory = major == 9 ? 232448 : 166912;
  device.multiprocessor_memory = device.shared_memory + 1024;
  device.sm90 = major == 9;
  return device;
}

Array dense(int64_t heads, int64_t rows, int64_t dim) {
  return {reinterpret_cast<void*>(0x1000), heads * rows * dim, rows * dim, dim};
}

Decode decode(int64_t batch, int64_t keys, int64_t heads, int64_t kv_heads, int64_t dim, int64_t rows = 1) {
  Problem p;
  p.dtype = DType::kBFloat16;
  p.batch = batch;
  p.heads = heads;
  p.kv_heads = kv_heads;
  p.rows = rows;
  p.keys = keys;
  p.head_dim = p.value_dim = dim;
  p.query = p.out = dense(heads, rows, dim);
  p.key = p.value = dense(kv_heads, keys, dim);
  p.scale = 0.125;
  return as_decode(p);
}

constexpr int kGeneral = decode::kFirstCluster + 2;  // of D128

TEST(DecodePlan, FillsTheMemorySystemAndNoMore) {
  const Plan few = plan_decode(decode(1, 8192, 32, 8, 128), device(9));
  EXPECT_EQ(few.cluster, 8) << "one cluster per kv head";
  EXPECT_EQ(few.splits, 8);
  EXPECT_EQ(few.workspace_bytes, 0);
  const Plan one = plan_decode(decode(1, 32768, 8, 1, 128), device(9));
  EXPECT_EQ(one.splits, 64) << "several clusters";
  EXPECT_GT(one.workspace_bytes, 0);
  const Plan half = plan_decode(decode(8, 32768, 32, 8, 128), device(9));
  EXPECT_EQ(half.cluster, 1);
  EXPECT_EQ(half.splits, 2);
  const Plan many = plan_decode(decode(64, 4096, 32, 8, 128), device(9));
  EXPECT_EQ(many.splits, 1);
  EXPECT_EQ(many.workspace_bytes, 0);
  EXPECT_EQ(many.variant, decode::kDeep) << "several blocks on a multiprocessor";
  EXPECT_EQ(half.variant, 2) << "one on each";
  EXPECT_EQ(plan_decode(decode(64, 4096, 32, 8, 128), device(8)).variant, 2);
  Decode paged = decode(1, 131072, 32, 8, 128);
  EXPECT_EQ(plan_decode(paged, device(9)).variant, decode::kBareCluster);
  const int32_t table = 0;
  paged.cache.block_table = &table;
  paged.cache.page_size = 16;
  EXPECT_EQ(plan_decode(paged, device(9)).variant, decode::kBareCluster);
  paged.problem.softcap = 20;
  EXPECT_EQ(plan_decode(paged, device(9)).variant, kGeneral);
  paged.cache.block_table = nullptr;
  EXPECT_EQ(plan_decode(paged, device(9)).variant, decode::kLongCluster);
  const Plan ampere = plan_decode(decode(1, 8192, 32, 8, 128), device(8));
  EXPECT_EQ(ampere.cluster, 1);
  EXPECT_EQ(ampere.splits, 108 / 8);
  Device slice = device(9);
  slice.multiprocessors = 16;
  EXPECT_EQ(plan_decode(decode(1, 8192, 32, 8, 128), slice).cluster, 8) << "the smallest that MIG makes of a Hopper GPU";
  slice.multiprocessors = 14;
  const Plan cut = plan_decode(decode(1, 8192, 8, 1, 128), slice);
  EXPECT_EQ(cut.cluster, 1) << "no room for clusters";
  EXPECT_EQ(cut.splits, 14);
}

TEST(DecodePlan, ClustersWithoutOptionsAreBare) {
  const auto variant = [](const Decode& d) { return plan_decode(d, device(9)).variant; };
  const Decode plain = decode(1, 1024, 32, 8, 128);
  EXPECT_EQ(variant(plain), decode::kBareOnce);
  EXPECT_EQ(variant(decode(1, 3072, 8, 8, 128)), decode::kBareOnce);
  EXPECT_EQ(variant(decode(1, 3073, 8, 8, 128)), decode::kBareCluster) << "more than the rings hold";
  EXPECT_EQ(variant(decode(2, 1024, 32, 8, 128)), decode::kBareCluster) << "clusters of 4";
  EXPECT_EQ(variant(decode(1, 48, 32, 8, 128)), kGeneral) << "clusters of 2";
  EXPECT_EQ(variant(decode(1, 2048, 8, 1, 128)), decode::kBareCluster) << "two clusters";
  EXPECT_EQ(variant(decode(15, 1100, 1, 1, 128)), decode::kBareOnce);
  EXPECT_EQ(variant(decode(1, 2048, 32, 8, 64)), decode::kFirstCluster);
  EXPECT_EQ(variant(decode(1, 2048, 32, 8, 120)), kGeneral);
  EXPECT_EQ(variant(decode(1, 2048, 16, 8, 128, 2)), kGeneral) << "two rows";
  Decode d = plain;
  const int32_t lengths = 0;
  d.cache.lengths = &lengths;
  d.problem.bottom_right = true;
  d.problem.right = 0;
  EXPECT_EQ(variant(d), decode::kBareOnce) << "the last row of a causal call sees all keys";
  d.problem.bottom_right = false;
  EXPECT_LT(variant(d), decode::kBareOnce) << "one key";
  const auto with = [&](auto change) {
    Decode changed = plain;
    change(changed);
    return variant(changed);
  };
  const auto paged = [&](int64_t page) {
    return with([&](Decode& x) { x.cache.block_table = &lengths, x.cache.page_size = page; });
  };
  EXPECT_EQ(paged(1), kGeneral);
  EXPECT_EQ(paged(16), decode::kBareOnce);
  EXPECT_EQ(paged(24), kGeneral);
  EXPECT_EQ(with([&](Decode& x) { x.cache.batch_index = &lengths; }), kGeneral);
  EXPECT_EQ(with([&](Decode& x) { x.cache.left_pad = &lengths; }), kGeneral);
  EXPECT_EQ(with([&](Decode& x) { x.problem.alibi_slopes = &lengths; }), kGeneral);
  EXPECT_EQ(with([&](Decode& x) { x.problem.sinks = &lengths; }), kGeneral);
  EXPECT_EQ(with([](Decode& x) { x.problem.softcap = 20; }), kGeneral);
  EXPECT_EQ(with([](Decode& x) { x.problem.left = 1000; }), kGeneral);
}

TEST(DecodePlan, CutsUnknownLengthsIntoUnits) {
  const int32_t lengths = 0;
  const auto expect = [&](int64_t batch, int64_t keys, int unit) {
    Decode d = decode(batch, keys, 32, 8, 128);
    d.cache.lengths = &lengths;
    const Plan found = plan_decode(d, device(9));
    EXPECT_EQ(found.unit * found.tile_keys, unit) << batch << " x " << keys;
    EXPECT_EQ(found.splits, keys / unit) << batch << " x " << keys;
  };
  expect(32, 32768, 4096);
  expect(8, 16384, 2048);
  expect(4, 8192, 1024);
}

TEST(DecodePlan, WindowsShortenWhatIsCut) {
  Decode d = decode(8, 32768, 32, 8, 128);
  d.problem.left = 100;
  d.problem.right = 0;
  d.problem.bottom_right = true;
  EXPECT_EQ(plan_decode(d, device(9)).splits, 2);
  EXPECT_EQ(plan_decode(decode(1, 5, 8, 8, 64), device(9)).splits, 1);
}

TEST(DecodePlan, LanesChooseTheInstance) {
  EXPECT_EQ(plan_decode(decode(1, 8192, 8, 1, 128), device(8)).tile_rows, 8);
  EXPECT_EQ(plan_decode(decode(1, 8192, 16, 1, 128), device(8)).tile_rows, 16);
  EXPECT_EQ(plan_decode(decode(1, 8192, 16, 1, 256), device(8)).tile_rows, 8) << "two tiles of lanes";
  Decode odd = decode(1, 8192, 8, 1, 60);
  EXPECT_EQ(plan_decode(odd, device(9)).variant, -1);
  odd.problem.dtype = DType::kFloat32;
  EXPECT_EQ(plan_decode(odd, device(9)).family, Family::kDecode);
  EXPECT_EQ(plan_decode(decode(1, 8192, 8, 1, 1000), device(9)).family, Family::kNone);
}

TEST(DecodePlan, EveryTileFitsHopperAndTheSmallOnesEveryGpu) {
  for (int i = 0; i < decode::kVariants; ++i) EXPECT_LE(decode::shared_bytes(i), 232448) << i;
  for (const int i : {0, 1, 2, 3}) EXPECT_LE(decode::shared_bytes(i), 101376) << i;
  EXPECT_LE(decode::shared_bytes(4), 166912);
}

TEST(DecodePlan, TakesOrdinaryCallsWithFewRows) {
  Problem p = decode(2, 4096, 32, 8, 128).problem;
  EXPECT_TRUE(decode_takes(p, device(9)));
  EXPECT_EQ(plan(p, nullptr, device(9), Choice::kAny).family, Family::kDecode);
  EXPECT_NE(plan(p, nullptr, device(9), Choice::kSm80).family, Family::kDecode);
  EXPECT_NE(describe(p, nullptr, device(9), plan(p, nullptr, device(9), Choice::kAny)).find("decode"), std::string::npos);
  p.rows = 5;  // 20 lanes
  EXPECT_FALSE(decode_takes(p, device(9)));
  p.rows = 4;
  EXPECT_TRUE(decode_takes(p, device(9)));
  p.dropout_p = 0.1;
  EXPECT_FALSE(decode_takes(p, device(9)));
}

TEST(DecodeCpu, PagesGiveTheKeysInOnePiece) {
  constexpr int64_t kKeys = 600, kDim = 24;
  const cpu::Executor serial{1, nullptr};
  std::vector<float> key(kKeys * kDim), value(kKeys * kDim), query(2 * kDim);
  for (size_t i = 0; i < key.size(); ++i) key[i] = std::sin(0.1f * i), value[i] = std::cos(0.03f * i);
  for (size_t i = 0; i < query.size(); ++i) query[i] = std::sin(1.7f * i);
  const auto run = [&](int64_t page) {
    const int64_t blocks = (kKeys + page - 1) / page;
    std::vector<int32_t> table(blocks);
    std::iota(table.rbegin(), table.rend(), 0);
    std::vector<float> keys(blocks * page * kDim, NAN), values(keys), out(2 * kDim), lse(2);
    const int32_t length = 577;
    for (int64_t j = 0; j < length; ++j)
      for (int64_t d = 0; d < kDim; ++d) {
        const int64_t at = (table[j / page] * page + j % page) * kDim + d;
        keys[at] = key[j * kDim + d], values[at] = value[j * kDim + d];
      }
    Decode d;
    Problem& p = d.problem;
    p.dtype = DType::kFloat32;
    p.batch = p.kv_heads = p.rows = 1;
    p.heads = 2;
    p.keys = blocks * page;
    p.head_dim = p.value_dim = kDim;
    p.query = {query.data(), 0, kDim, 0};
    p.out = {out.data(), 0, kDim, 0};
    p.key = {keys.data(), page * kDim, 0, kDim};
    p.value = {values.data(), page * kDim, 0, kDim};
    p.lse = lse.data();
    p.lse_head = 1;
    p.scale = 0.3;
    d.cache = {&length, 0, nullptr, table.data(), blocks, page, nullptr, blocks};
    cpu::decode(d, serial);
    out.insert(out.end(), lse.begin(), lse.end());
    return out;
  };
  const std::vector<float> expected = run(kKeys);
  for (const int64_t page : {1, 7, 16, 128, 500}) {
    const std::vector<float> found = run(page);
    for (size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-5) << page;
  }
}

}  // namespace
}  // namespace flash::problem
