// The plan: what runs, how wide it loads, how the keys are cut, and what is refused, in words.
#include <gtest/gtest.h>

#include "cuda/tiles.h"
#include "problem/describe.h"
#include "problem/plan.h"

namespace flash::problem {
namespace {

Device hopper() {
  Device device;
  device.cuda = true;
  device.major = 9;
  device.multiprocessors = 132;
  device.shared_memory = 232448;
  device.multiprocessor_memory = 233472;
  return device;
}

Array dense(uintptr_t address, int64_t heads, int64_t rows, int64_t dim) {
  return {reinterpret_cast<void*>(address), heads * rows * dim, rows * dim, dim};
}

// 2 sequences of 8 heads, dense, 16-byte aligned.
Problem problem(DType dtype, int64_t rows, int64_t keys, int64_t head_dim) {
  Problem p;
  p.dtype = dtype;
  p.batch = 2;
  p.heads = p.kv_heads = 8;
  p.rows = rows;
  p.keys = keys;
  p.head_dim = p.value_dim = head_dim;
  p.query = dense(0x1000, 8, rows, head_dim);
  p.key = dense(0x2000, 8, keys, head_dim);
  p.value = dense(0x3000, 8, keys, head_dim);
  p.out = dense(0x4000, 8, rows, head_dim);
  p.lse_head = rows;
  p.lse_batch = 8 * rows;
  p.scale = 0.125;
  return p;
}

Gradients gradients(const Problem& p) {
  Gradients g;
  g.dout = dense(0x5000, p.heads, p.rows, p.value_dim);
  g.dquery = dense(0x6000, p.heads, p.rows, p.head_dim);
  g.dkey = dense(0x7000, p.kv_heads, p.keys, p.head_dim);
  g.dvalue = dense(0x8000, p.kv_heads, p.keys, p.value_dim);
  return g;
}

Plan forward(const Problem& p, const Device& device = hopper()) { return plan(p, nullptr, device, Choice::kAny); }

TEST(Plan, TakesTheSmallestBucketThatHoldsBothHeadDims) {
  for (const auto& [head_dim, bucket] :
       {std::pair{1, 64}, {64, 64}, {65, 96}, {128, 128}, {129, 192}, {256, 256}, {257, 512}}) {
    const Plan found = forward(problem(DType::kBFloat16, 256, 256, head_dim));
    EXPECT_EQ(found.family, Family::kSm80);
    EXPECT_EQ(found.head_dim, bucket) << head_dim;
  }
  Problem wide = problem(DType::kBFloat16, 256, 256, 64);
  wide.value_dim = 128;
  EXPECT_EQ(forward(wide).head_dim, 128);
}

TEST(Plan, IsPlainWithoutModifiersOnly) {
  const Problem p = problem(DType::kFloat16, 256, 256, 64);
  EXPECT_TRUE(forward(p).plain);
  const auto changed = [&](auto change) {
    Problem q = p;
    change(q);
    return forward(q).plain;
  };
  const float slopes = 0, mask = 0, sinks = 0;
  EXPECT_FALSE(changed([](Problem& q) { q.softcap = 5; }));
  EXPECT_FALSE(changed([](Problem& q) { q.dropout_p = 0.1; }));
  EXPECT_FALSE(changed([&](Problem& q) { q.alibi_slopes = &slopes; }));
  EXPECT_FALSE(changed([&](Problem& q) { q.mask.data = &mask; }));
  EXPECT_FALSE(changed([](Problem& q) { q.scale = 0; })) << "modifiers and maxima need a positive scale";
  EXPECT_TRUE(changed([&](Problem& q) { q.sinks = &sinks; })) << "a sink is not a score";
  EXPECT_TRUE(changed([](Problem& q) { q.right = 0; })) << "neither is an interval";
}

TEST(Plan, LoadsAreAsWideAsPointersStridesAndDimsAllow) {
  EXPECT_EQ(forward(problem(DType::kBFloat16, 256, 256, 64)).load_bytes, 16);
  EXPECT_EQ(forward(problem(DType::kBFloat16, 256, 256, 100)).load_bytes, 8) << "rows of 200 bytes";
  EXPECT_EQ(forward(problem(DType::kFloat32, 256, 256, 3)).load_bytes, 4);
  EXPECT_EQ(forward(problem(DType::kFloat32, 256, 256, 3)).copies, 0u);
  Problem strided = problem(DType::kBFloat16, 256, 256, 64);
  strided.value.row = 68;
  EXPECT_EQ(forward(strided).load_bytes, 8);
  Problem single = problem(DType::kBFloat16, 1, 256, 64);
  single.query.row = 0;  // a dimension of size 1 has stride 0, whatever the tensor said
  EXPECT_EQ(forward(single).load_bytes, 16);
}

TEST(Plan, CopiesWhatSixteenBitLoadsWouldReadInBits) {
  const Plan odd = forward(problem(DType::kBFloat16, 256, 256, 98));
  EXPECT_EQ(odd.copies, uint32_t{kQuery | kKey | kValue});
  EXPECT_EQ(odd.load_bytes, 16);
  EXPECT_EQ(odd.store_bytes, 4);
  EXPECT_FALSE(odd.plain) << "plain instances store 16 bytes";

  Problem shifted = problem(DType::kBFloat16, 256, 256, 64);
  shifted.key.data = reinterpret_cast<void*>(0x2002);
  const Plan found = forward(shifted);
  EXPECT_EQ(found.copies, uint32_t{kKey});
  EXPECT_EQ(found.load_bytes, 16);
  EXPECT_TRUE(found.plain);
  EXPECT_NE(describe(shifted, nullptr, hopper(), found).find("key is copied to aligned rows first: its first element"),
            std::string::npos);

  const Problem p = problem(DType::kFloat16, 256, 256, 64);
  Gradients g = gradients(p);
  g.dout.row = 65;
  EXPECT_EQ(plan(p, &g, hopper(), Choice::kAny).copies, uint32_t{kOutputGradient});
}

TEST(Plan, CutsTheKeysOfFewRowsTheSameWayEveryTime) {
  const Plan many = forward(problem(DType::kBFloat16, 4096, 4096, 128));
  EXPECT_EQ(many.splits, 1);
  EXPECT_EQ(many.workspace_bytes, 0);
  EXPECT_EQ(many.blocks, 16 * (4096 / many.tile_rows));

  const Problem few = problem(DType::kBFloat16, 32, 65536, 128);
  const Plan cut = forward(few);
  EXPECT_GT(cut.splits, 1);
  EXPECT_EQ(cut.blocks, 16 * cut.splits);
  EXPECT_EQ(cut.workspace_bytes, cut.splits * 16 * 32 * (128 + 1) * 4);
  EXPECT_EQ(forward(few).splits, cut.splits);

  Problem windowed = few;
  windowed.left = 63;
  windowed.right = 0;
  windowed.bottom_right = true;
  EXPECT_EQ(forward(windowed).splits, 1) << "one tile of keys is seen";
  EXPECT_EQ(forward(problem(DType::kFloat64, 1, 65536, 128)).splits, 1) << "partial results are fp32";
}

TEST(Plan, BackwardOwnsBlocksOfKeys) {
  const Problem p = problem(DType::kBFloat16, 512, 1024, 128);
  Gradients g = gradients(p);
  const Plan found = plan(p, &g, hopper(), Choice::kAny);
  EXPECT_EQ(found.family, Family::kSm80);
  EXPECT_EQ(found.blocks, 16 * (1024 / found.tile_keys));
  EXPECT_GE(found.workspace_bytes, 16 * 512 * 128 * 4) << "fp32 sums of dQ";
  g.deterministic = true;
  EXPECT_LT(plan(p, &g, hopper(), Choice::kAny).workspace_bytes, 16 * 512 * 128 * 4) << "no sums in any order";
}

TEST(Plan, RefusesMoreBlocksThanOneLaunchHas) {
  Device device = hopper();
  device.sm90 = true;
  Problem p = problem(DType::kBFloat16, 1, 1, 8);
  p.heads = 1 << 10;
  p.kv_heads = 1;
  const auto with = [&](int64_t batch) {
    p.batch = batch;
    return plan(p, nullptr, device, Choice::kAny);
  };
  EXPECT_NE(with(1 << 10).family, Family::kNone);
  EXPECT_EQ(with(1 << 20).family, Family::kSm80) << "2^30 tiles: the Hopper kernels count in 32 bits";
  const Plan many = with(1 << 21);
  EXPECT_EQ(many.family, Family::kNone);
  EXPECT_NE(describe(p, nullptr, device, many).find("split the batch"), std::string::npos);

  const Gradients g = gradients(p);
  const Plan backward = plan(p, &g, device, Choice::kAny);
  EXPECT_EQ(backward.family, Family::kNone) << "2^21 blocks of keys, but 2^31 of rows";
  EXPECT_NE(describe(p, &g, device, backward).find("2147483648 blocks"), std::string::npos);
}

TEST(Plan, TheHopperBackwardTakesWhatItCan) {
  Device device = hopper();
  device.sm90 = true;
  const Problem p = problem(DType::kBFloat16, 512, 1024, 128);
  Gradients g = gradients(p);
  const Plan found = plan(p, &g, device, Choice::kAny);
  EXPECT_EQ(found.family, Family::kSm90);
  EXPECT_EQ(found.direction, Direction::kBackward);
  EXPECT_EQ(found.blocks, 16 * (1024 / found.tile_keys)) << "fewer tiles than multiprocessors";
  EXPECT_EQ(found.row_blocks, 0);
  EXPECT_GE(found.workspace_bytes, 16 * 512 * (128 * 4 + 32)) << "fp32 sums of dQ, statistics";
  EXPECT_EQ(plan(p, &g, device, Choice::kSm80).family, Family::kSm80);

  g.deterministic = true;
  const Plan alone = plan(p, &g, device, Choice::kAny);
  EXPECT_EQ(alone.family, Family::kSm90);
  EXPECT_EQ(alone.row_blocks, 16 * 512 / 128);
  EXPECT_LT(alone.workspace_bytes, 16 * 512 * 128 * 4) << "no sums in any order";
  EXPECT_NE(describe(p, &g, device, alone).find("every run gives the same bits"), std::string::npos);

  const Problem huge = problem(DType::kBFloat16, 1 << 20, 1 << 20, 128);
  const Gradients slabs = gradients(huge);
  const Plan parts = plan(huge, &slabs, device, Choice::kAny);
  EXPECT_LT(parts.workspace_bytes, int64_t{5} << 29) << "sums of 2 GiB and statistics, not 8 GiB";
  EXPECT_NE(describe(huge, &slabs, device, parts).find("key heads run 2 at a time"), std::string::npos);

  // Many tiles: those of a head take turns, beside dK and dV, in the memory of the default.
  for (const int64_t dim : {64, 128, 256}) {
    for (const int64_t right : {kOpen, int64_t{0}}) {
      for (const int64_t rows : {512, 1024, 2048, 4096, 8192, 16384}) {
        Problem many = problem(DType::kBFloat16, rows, rows, dim);
        many.batch = 16384 / rows;
        many.heads = many.kv_heads = 2048 / dim;
        many.right = right;
        Gradients asked = gradients(many);
        const Plan usual = plan(many, &asked, device, Choice::kAny);
        asked.deterministic = true;
        const Plan turns = plan(many, &asked, device, Choice::kAny);
        // Few blocks of rows, and dim 256 under a mask, are faster with dQ by itself.
        if (rows < (dim == 64 ? 1024 : dim == 128 ? 2048 : 4096) || (dim == 256 && right == 0)) {
          EXPECT_GT(turns.row_blocks, 0) << dim << ", " << rows;
          continue;
        }
        EXPECT_EQ(turns.row_blocks, 0) << dim << ", " << rows;
        EXPECT_LE(turns.workspace_bytes, usual.workspace_bytes + 4 * 16384 / 64 * many.heads + 256) << dim << ", " << rows;
        EXPECT_NE(describe(many, &asked, device, turns).find("take turns"), std::string::npos);

        Gradients query = asked;
        query.dkey.data = query.dvalue.data = nullptr;
        EXPECT_GT(plan(many, &query, device, Choice::kAny).row_blocks, 0) << "dQ alone";
        const int32_t starts = 0;
        Problem packed = many;
        packed.cu_seqlens_q = packed.cu_seqlens_k = &starts;
        packed.total_rows = packed.total_keys = 16384;
        EXPECT_GT(plan(packed, &asked, device, Choice::kAny).row_blocks, 0) << "lengths that the GPU alone knows";
      }
    }
  }

  Problem biased = p;
  const float slopes = 1;
  biased.alibi_slopes = &slopes;
  const Plan general = plan(biased, &g, device, Choice::kAny);
  EXPECT_EQ(general.family, Family::kSm80);
  EXPECT_NE(describe(biased, &g, device, general).find("they take no alibi_slopes"), std::string::npos);

  Gradients shifted = gradients(p);
  shifted.dkey.data = reinterpret_cast<void*>(0x7002);
  EXPECT_EQ(plan(p, &shifted, device, Choice::kAny).family, Family::kSm80);
  EXPECT_EQ(plan(p, &shifted, device, Choice::kSm90).family, Family::kNone);

  Problem half = problem(DType::kFloat16, 512, 1024, 128);
  half.scale = 1e-8;
  const Gradients of_half = gradients(half);
  EXPECT_EQ(plan(half, &of_half, device, Choice::kAny).family, Family::kSm80) << "its statistics would not fit float16";
  EXPECT_EQ(plan(half, nullptr, device, Choice::kSm90).family, Family::kSm90) << "forward has none";
  half.dtype = DType::kBFloat16;
  EXPECT_EQ(plan(half, &of_half, device, Choice::kAny).family, Family::kSm90);
}

TEST(Plan, RefusesInWords) {
  Device old = hopper();
  old.major = 7;
  old.minor = 5;
  const Problem p = problem(DType::kBFloat16, 256, 256, 64);
  const auto refusal = [](const Problem& problem, const Device& device, Choice choice) {
    const Plan refused = plan(problem, nullptr, device, choice);
    EXPECT_EQ(refused.family, Family::kNone);
    return describe(problem, nullptr, device, refused);
  };
  EXPECT_NE(refusal(p, old, Choice::kAny).find("compute capability 7.5"), std::string::npos);
  EXPECT_NE(refusal(p, hopper(), Choice::kSm90).find("FLASH_ATTN_EXT_KERNEL"), std::string::npos);
  Problem wide = problem(DType::kBFloat16, 256, 256, 1000);
  EXPECT_NE(refusal(wide, hopper(), Choice::kAny).find("head_dim 1000"), std::string::npos);
  Problem many = p;
  many.batch = int64_t{1} << 31;
  EXPECT_NE(refusal(many, hopper(), Choice::kAny).find("split the batch"), std::string::npos);
}

TEST(Plan, EveryTileFitsSomeDeviceAndEveryBucketEveryDevice) {
  for (const int64_t shared : {101376, 166912, 232448}) {
    Device device = hopper();
    device.shared_memory = shared;
    for (const DType dtype : {DType::kFloat16, DType::kFloat32, DType::kFloat64}) {
      for (const int dim : {64, 96, 128, 192, 256, 512}) {
        const Problem p = problem(dtype, 256, 256, dim);
        const Gradients g = gradients(p);
        EXPECT_EQ(forward(p, device).family, Family::kSm80) << dim << " in " << shared;
        EXPECT_EQ(plan(p, &g, device, Choice::kAny).family, Family::kSm80) << dim << " in " << shared;
      }
    }
  }
}

TEST(Describe, SaysKernelTileLoadsAndWhyTheyAreNarrow) {
  const Problem p = problem(DType::kBFloat16, 1, 65536, 100);
  const std::string text = describe(p, nullptr, hopper(), forward(p));
  for (const char* part : {"forward pass", "bfloat16", "rows x", "132 multiprocessors", "split into", "8 bytes wide",
                           "query is read by narrower loads: a row is not a multiple of 16 bytes long"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  Device cpu;
  cpu.threads = 4;
  cpu.instruction_set = "avx2";
  EXPECT_NE(describe(p, nullptr, cpu, plan(p, nullptr, cpu, Choice::kAny)).find("avx2"), std::string::npos);
}

}  // namespace
}  // namespace flash::problem
