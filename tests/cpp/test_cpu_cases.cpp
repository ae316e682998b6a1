// The CPU kernels over small odd shapes and every feature, and over rows long enough to be cut.
#include "cpu_check.h"

namespace flash::cpu {
namespace {

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](const std::string& name, const std::function<void(Case&)>& change) {
    Case c;
    c.name = name;
    c.batch = 2, c.heads = 2, c.kv_heads = 2, c.rows = 37, c.keys = 53, c.dim = 24, c.value_dim = 24;
    change(c);
    all.push_back(c);
  };
  add("Full", [](Case&) {});
  for (int64_t dim : {1, 3, 8, 17, 32, 65, 200, 264})
    add("Dim" + std::to_string(dim), [&](Case& c) {
      c.batch = 1, c.dim = dim, c.value_dim = dim == 17 ? 40 : dim == 40 ? 9 : dim;
    });
  for (int64_t rows : {1, 2, 4, 5, 7, 9, 24, 25, 49, 97, 130})
    add("Rows" + std::to_string(rows),
        [&](Case& c) { c.rows = rows, c.right = rows % 2 ? 0 : problem::kOpen, c.bottom_right = true; });
  for (int64_t keys : {1, 2, 3, 5, 31, 127, 128, 129, 257})
    add("Keys" + std::to_string(keys), [&](Case& c) { c.keys = keys, c.batch = 1; });
  add("Causal", [](Case& c) { c.right = 0, c.rows = 150, c.keys = 150; });
  add("CausalMoreRows", [](Case& c) { c.right = 0, c.rows = 90, c.keys = 40; });
  add("CausalMoreKeys", [](Case& c) { c.right = 0, c.rows = 30, c.keys = 190; });
  add("BottomRight", [](Case& c) { c.right = 0, c.bottom_right = true, c.rows = 61, c.keys = 200; });
  add("BottomRightEmptyRows", [](Case& c) { c.right = 0, c.bottom_right = true, c.rows = 80, c.keys = 20; });
  add("Window", [](Case& c) { c.left = 9, c.right = 4, c.rows = 140, c.keys = 140; });
  add("WindowPast", [](Case& c) { c.left = 20, c.right = -3, c.rows = 77, c.keys = 70, c.bottom_right = true; });
  add("WindowFuture", [](Case& c) { c.left = -2, c.right = 11, c.rows = 77, c.keys = 70; });
  add("Groups", [](Case& c) { c.heads = 6, c.kv_heads = 2, c.rows = 29, c.right = 0, c.bottom_right = true; });
  add("OneKvHead", [](Case& c) { c.heads = 8, c.kv_heads = 1, c.rows = 1, c.keys = 300; });
  add("Few", [](Case& c) { c.heads = 3, c.kv_heads = 1, c.rows = 1, c.keys = 261, c.dim = 72, c.value_dim = 100; });
  add("FewCausal", [](Case& c) { c.rows = 3, c.keys = 261, c.right = 0, c.bottom_right = true; });
  add("RowsFirst", [](Case& c) { c.layout = Layout::kRowsFirst, c.right = 0; });
  add("Padded", [](Case& c) { c.layout = Layout::kPadded; });
  add("NegativeScale", [](Case& c) { c.scale = -0.4, c.right = 0; });
  add("ZeroScale", [](Case& c) { c.scale = 0; });
  add("LargeLogits", [](Case& c) { c.spread = 5; });
  add("Softcap", [](Case& c) { c.softcap = 2.5, c.right = 0; });
  add("Alibi", [](Case& c) { c.alibi = true, c.bottom_right = true; });
  add("Sinks", [](Case& c) { c.sinks = true, c.heads = 3, c.kv_heads = 3, c.right = 0, c.rows = 70; });
  add("SinksEmptyRows",
      [](Case& c) { c.sinks = true, c.right = 0, c.bottom_right = true, c.rows = 80, c.keys = 20, c.lse_gradient = true; });
  add("LseGradient", [](Case& c) { c.lse_gradient = true; });
  add("Dropout", [](Case& c) { c.dropout = 0.3, c.rows = 70; });
  add("DropoutAll", [](Case& c) { c.dropout = 1; });
  add("DropoutGroups", [](Case& c) { c.dropout = 0.2, c.heads = 6, c.kv_heads = 2, c.right = 0; });
  add("DropoutFew", [](Case& c) { c.dropout = 0.2, c.rows = 2; });
  for (const char* shape : {"bhlk", "hlk", "lk", "bk", "k", "bhl", "bl", "h", ""})
    add("MaskBias_" + std::string(shape), [&](Case& c) { c.mask = DType::kFloat32, c.mask_shape = shape, c.keys = 300; });
  for (const char* shape : {"bhlk", "blk", "k"})
    add("MaskBool_" + std::string(shape),
        [&](Case& c) { c.mask = DType::kBool, c.mask_shape = shape, c.rows = 60, c.dead_row = true; });
  add("MaskTransposed", [](Case& c) { c.mask = DType::kFloat32, c.mask_transposed = true, c.mask_shape = "bhlk"; });
  add("MaskFew", [](Case& c) { c.mask = DType::kBool, c.mask_shape = "bk", c.rows = 1; });
  add("MaskGroupsCausal",
      [](Case& c) { c.mask = DType::kFloat32, c.mask_shape = "hlk", c.heads = 4, c.right = 0, c.dead_row = true; });
  add("Everything", [](Case& c) {
    c.mask = DType::kFloat32, c.mask_shape = "hlk", c.heads = 4, c.left = 60, c.right = 3, c.bottom_right = true, c.softcap = 5;
    c.alibi = true, c.sinks = true, c.dropout = 0.15, c.lse_gradient = true, c.rows = 75, c.keys = 140, c.dim = 20,
    c.value_dim = 28;
    c.layout = Layout::kPadded;
  });
  add("Packed", [](Case& c) { c.lengths_q = {5, 0, 40, 1, 130}, c.lengths_k = {9, 3, 40, 0, 77}, c.heads = 4, c.right = 0; });
  add("PackedBottomRight", [](Case& c) {
    c.lengths_q = {5, 40, 33}, c.lengths_k = {9, 20, 150}, c.right = 0, c.left = 30, c.bottom_right = true, c.alibi = true;
    c.dropout = 0.1, c.sinks = true, c.lse_gradient = true;
  });
  add("NoKeys", [](Case& c) { c.keys = 0; });
  add("NoRows", [](Case& c) { c.rows = 0; });
  return all;
}

struct Instance {
  Case c;
  DType type;
};

class Attention : public ::testing::TestWithParam<Instance> {};

TEST_P(Attention, MatchesReference) {
  const Instance& instance = GetParam();
  Call call(instance.c, instance.type);
  check_forward(call);
  if (!HasFailure()) check_backward(call);
}

std::string type_name(DType type) {
  return type == DType::kFloat64   ? "Float64"
         : type == DType::kFloat32 ? "Float32"
         : type == DType::kFloat16 ? "Float16"
                                   : "BFloat16";
}

std::vector<Instance> instances() {
  std::vector<Instance> all;
  for (const Case& c : cases())
    for (DType type : {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      all.push_back({c, type});
      if (type == DType::kBFloat16 && c.dim == 24) {  // head dims that matrix units take
        all.push_back({c, type});
        all.back().c.name += "Panels";
        all.back().c.dim = 64, all.back().c.value_dim = 32, all.back().c.scale *= 0.6;
      }
      if (c.mask == DType::kFloat32 && type != DType::kFloat32 && c.mask_shape == "lk") {  // a mask of the query's own dtype
        all.push_back({c, type});
        all.back().c.name += "Own";
        all.back().c.mask = type;
      }
    }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cpu, Attention, ::testing::ValuesIn(instances()), [](const auto& info) {
  return info.param.c.name + (info.param.c.name.back() == '_' ? "Scalar" : "") + type_name(info.param.type);
});

// Cut into parts of keys (forward), of rows and keys (backward), and nothing may depend on the number of threads.
class Long : public ::testing::TestWithParam<DType> {};

TEST_P(Long, MatchesReferenceAndIgnoresThreads) {
  Case c;
  c.heads = 2, c.rows = 1200, c.keys = 1100, c.dim = 16, c.value_dim = 8, c.right = 0, c.scale = 0.25;
  if (GetParam() == DType::kBFloat16) c.dim = c.value_dim = 32;  // what matrix units take
  for (const bool decode : {false, true}) {
    if (decode) c.rows = 1, c.keys = 3000, c.bottom_right = true;
    Call call(c, GetParam()), other(c, GetParam());
    check_forward(call);
    check_backward(call);
    for (int threads : {1, 2, 5}) {
      forward(other.p, pool(threads));
      backward(other.p, other.g, pool(threads));
      EXPECT_EQ(call.out.bytes, other.out.bytes);
      EXPECT_EQ(call.lse.bytes, other.lse.bytes);
      EXPECT_EQ(call.dquery.bytes, other.dquery.bytes);
      EXPECT_EQ(call.dkey.bytes, other.dkey.bytes);
      EXPECT_EQ(call.dvalue.bytes, other.dvalue.bytes);
    }
  }
}

// Half types take more lanes at a time where there are fewer threads: the lanes left for the last task must not show it.
TEST(Threads, LeaveTheLastRowsAsTheyAre) {
  for (DType type : {DType::kBFloat16, DType::kFloat16})
    for (int64_t heads : {1, 5})
      for (int64_t rows : {193, 386, 769, 1153}) {
        Case c;
        c.heads = c.kv_heads = heads, c.rows = rows, c.keys = 70, c.dim = c.value_dim = 32;
        Call call(c, type), other(c, type);
        forward(call.p, pool(1));
        for (int threads : {2, 3, 4, 8}) {
          forward(other.p, pool(threads));
          EXPECT_EQ(call.out.bytes, other.out.bytes) << heads << " heads, " << rows << " rows, " << threads << " threads";
          EXPECT_EQ(call.lse.bytes, other.lse.bytes);
        }
      }
}

INSTANTIATE_TEST_SUITE_P(Cpu, Long, ::testing::Values(DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16),
                         [](const auto& info) { return type_name(info.param); });

}  // namespace
}  // namespace flash::cpu
