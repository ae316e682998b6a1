// What the CPU kernels do with special numbers and absent arrays; merge, half types, the dropout mask.
#include "cpu_check.h"

namespace flash::cpu {
namespace {

TEST(Values, NanStaysAndMaskedKeysDoNot) {
  Case c;
  c.rows = 40, c.keys = 40, c.right = 0;
  Call call(c, DType::kFloat32);
  call.query.set(problem::offset(call.p.query, 0, 0, 5), kNan);
  call.key.set(problem::offset(call.p.key, 0, 0, 30), kNan);
  forward(call.p, pool(1));
  for (int64_t i = 0; i < 40; ++i) {
    EXPECT_EQ(std::isnan(call.out[problem::offset(call.p.out, 0, 0, i)]), i == 5 || i >= 30) << i;
    EXPECT_EQ(std::isnan(call.lse[i]), i == 5 || i >= 30) << i;
  }
}

TEST(Values, HugeAndTinyLogits) {
  Case c;
  c.rows = 1, c.keys = 1, c.dim = c.value_dim = 64, c.scale = 0.125;
  Call call(c, DType::kBFloat16);
  for (int64_t d = 0; d < 64; ++d) call.query.set(d, 133120), call.key.set(d, 133120), call.value.set(d, 133120);
  forward(call.p, pool(1));
  for (int64_t d = 0; d < 64; ++d) EXPECT_EQ(call.out[d], 133120);
  EXPECT_TRUE(std::isfinite(call.lse[0]));
  Case low;  // all scores far below zero: an ordinary softmax
  low.rows = 3, low.keys = 50, low.dim = 1, low.scale = 1, low.logit = 250000;
  Call deep(low, DType::kFloat32);
  for (int64_t i = 0; i < 3; ++i) deep.query.set(i, 500);
  for (int64_t j = 0; j < 50; ++j) deep.key.set(j, -500 - 0.001 * static_cast<double>(j));
  check_forward(deep);
}

TEST(Values, OnlyWhatIsAskedForIsWritten) {
  Case c;
  c.rows = 30, c.keys = 30;
  for (int wanted = 0; wanted < 3; ++wanted) {
    Call call(c, DType::kFloat32);
    forward(call.p, pool(1));
    Call whole(c, DType::kFloat32);
    forward(whole.p, pool(1));
    backward(whole.p, whole.g, pool(1));
    if (wanted != 0) call.g.dquery.data = nullptr;
    if (wanted != 1) call.g.dkey.data = nullptr;
    if (wanted != 2) call.g.dvalue.data = nullptr;
    call.g.delta = nullptr;
    backward(call.p, call.g, pool(1));
    Buffer untouched(DType::kFloat32, call.dquery.count());
    EXPECT_EQ(call.dquery.bytes, wanted == 0 ? whole.dquery.bytes : untouched.bytes);
    EXPECT_EQ(call.dkey.bytes, wanted == 1 ? whole.dkey.bytes : untouched.bytes);
    EXPECT_EQ(call.dvalue.bytes, wanted == 2 ? whole.dvalue.bytes : untouched.bytes);
  }
}

TEST(Merge, IsTheWhole) {
  Case c;
  c.rows = 20, c.keys = 64, c.value_dim = 9;
  Call whole(c, DType::kFloat32), first(c, DType::kFloat32), second(c, DType::kFloat32);
  first.p.keys = 24;
  second.p.keys = 40;
  second.p.key.data = static_cast<float*>(second.p.key.data) + 24 * second.p.key.row;
  second.p.value.data = static_cast<float*>(second.p.value.data) + 24 * second.p.value.row;
  for (Call* call : {&whole, &first, &second}) forward(call->p, pool(1));
  Buffer out(DType::kFloat32, 20 * 9), lse(DType::kFloat32, 20);
  merge(DType::kFloat32, 20, 9, first.out.data(), first.lse.data(), second.out.data(), second.lse.data(), out.data(),
        lse.data(), pool(2));
  for (int64_t i = 0; i < 20 * 9; ++i) EXPECT_NEAR(out[i], whole.out[i], 1e-6);
  for (int64_t i = 0; i < 20; ++i) EXPECT_NEAR(lse[i], whole.lse[i], 1e-6);
}

TEST(Merge, EmptyParts) {
  float a[2] = {1, 2}, b[2] = {NAN, NAN}, out[2], empty = -INFINITY, lse = 3, merged;
  merge(DType::kFloat32, 1, 2, a, &lse, b, &empty, out, &merged, pool(1));
  EXPECT_EQ(out[0], 1);
  EXPECT_EQ(out[1], 2);
  EXPECT_EQ(merged, 3);
  merge(DType::kFloat32, 1, 2, b, &empty, b, &empty, out, &merged, pool(1));
  EXPECT_EQ(out[0], 0);
  EXPECT_EQ(merged, -INFINITY);
}

TEST(Numbers, HalfTypesRoundTrip) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const Float16 half{static_cast<uint16_t>(bits)};
    const BFloat16 brain{static_cast<uint16_t>(bits)};
    Float16 half_again;
    BFloat16 brain_again;
    narrow(widen(half), &half_again);
    narrow(widen(brain), &brain_again);
    if (!std::isnan(widen(half))) {
      EXPECT_EQ(half_again.bits, half.bits);
    }
    if (!std::isnan(widen(brain))) {
      EXPECT_EQ(brain_again.bits, brain.bits);
    }
  }
  Float16 half;
  narrow(65519.0f, &half);
  EXPECT_EQ(widen(half), 65504.0f);
  narrow(65520.0f, &half);
  EXPECT_EQ(widen(half), INFINITY);
  narrow(0x1p-25f, &half);  // a tie, to even
  EXPECT_EQ(widen(half), 0.0f);
  narrow(0x1.8p-25f, &half);
  EXPECT_EQ(widen(half), 0x1p-24f);
}

TEST(DropoutMask, IsPhilox) {
  const uint64_t seed[2] = {123, 456};
  std::vector<uint8_t> keep(2 * 3 * 19 * 35);
  dropout_mask(seed, 0.25, 2, 3, 19, 35, keep.data(), pool(2));
  int64_t kept = 0, at = 0;
  for (int64_t plane = 0; plane < 6; ++plane)
    for (int64_t i = 0; i < 19; ++i)
      for (int64_t j = 0; j < 35; ++j, ++at) {
        EXPECT_EQ(keep[at] != 0, problem::dropout(seed, 0.25).keeps(plane, i, j));
        kept += keep[at];
      }
  EXPECT_NEAR(static_cast<double>(kept) / static_cast<double>(keep.size()), 0.75, 0.03);
}

}  // namespace
}  // namespace flash::cpu
