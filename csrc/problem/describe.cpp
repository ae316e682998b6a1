#include "problem/describe.h"

#include <cstdarg>
#include <cstdio>
#include <string>

#include "cuda/sm90/tiles.h"
#include "cuda/tiles.h"
#include "problem/decode.h"

namespace flash::problem {
namespace {

__attribute__((format(printf, 2, 3))) void line(std::string& text, const char* format, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  if (!text.empty()) text += '\n';
  text += buffer;
}

using Long = long long;  // what %lld takes

const char* name(DType type) {
  switch (type) {
    case DType::kBool:
      return "bool";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kNone:
      break;
  }
  return "none";
}

const char* name(Direction direction) { return direction == Direction::kForward ? "forward" : "backward"; }

// What keeps one operand from 16-byte loads; nothing where nothing does.
void describe_width(std::string& text, const char* operand, const Array& array, int64_t dim, int64_t bytes, bool copied) {
  const auto multiple = [&](int64_t elements) { return elements * bytes % 16 == 0; };
  const char* reason =
      !multiple(dim)                                      ? "a row is not a multiple of 16 bytes long"
      : reinterpret_cast<uintptr_t>(array.data) % 16 != 0 ? "its first element is not at a multiple of 16 bytes"
      : !(multiple(array.row) && multiple(array.head) && multiple(array.batch)) ? "its strides are not multiples of 16 bytes"
                                                                                : nullptr;
  if (reason == nullptr) return;
  line(text, copied ? "%s is copied to aligned rows first: %s." : "%s is read by narrower loads: %s.", operand, reason);
}

void describe_widths(std::string& text, const Problem& p, const Gradients* g, const Plan& plan) {
  line(text, "Loads are %d bytes wide, stores %d.", plan.load_bytes, plan.store_bytes);
  const int64_t bytes = size_of(p.dtype);
  describe_width(text, "query", p.query, p.head_dim, bytes, plan.copies & kQuery);
  describe_width(text, "key", p.key, p.head_dim, bytes, plan.copies & kKey);
  describe_width(text, "value", p.value, p.value_dim, bytes, plan.copies & kValue);
  if (g != nullptr) describe_width(text, "grad_out", g->dout, p.value_dim, bytes, plan.copies & kOutputGradient);
}

// How products are made, and why not on tensor cores.
const char* arithmetic(const Problem& p, const Plan& plan) {
  const bool forward = plan.direction == Direction::kForward;
  const bool scalar = forward ? cuda::kForwardTiles[plan.variant].body == cuda::Body::kFma
                              : cuda::kBackwardTiles[plan.variant].body == cuda::BackwardBody::kScalar;
  if (scalar)
    return p.fp64()
               ? "Products are plain arithmetic: the kernels have no fp64 tensor core path."
               : "Products are plain arithmetic, right but slow: no tensor core instance takes this dtype, head dim and GPU.";
  if (p.dtype != DType::kFloat32) return "Products run on tensor cores (mma.sync) and are summed in fp32.";
  return p.tf32 ? "Products run on tensor cores, rounded to TF32 as torch's fp32 precision setting allows."
                : "Products run on tensor cores, three TF32 terms each: fp32 accuracy.";
}

std::string describe_cpu(const Problem& p, const Device& device, const Plan& plan) {
  std::string text;
  line(text, "The %s pass runs on the CPU in %s, with %s instructions on %d threads.", name(plan.direction), name(p.dtype),
       device.instruction_set, device.threads);
  line(text,
       plan.direction == Direction::kForward
           ? "A task takes a tile of query rows; where rows are few the keys are split, by sizes alone, with a small workspace."
           : "A task takes tiles of query rows and keys; a workspace holds the sums of the gradients of its keys.");
  return text;
}

std::string describe_refusal(const Problem& p, const Gradients* g, const Device& device, const Plan& plan) {
  std::string text;
  if (plan.refused & kRefusedArchitecture)
    line(text, "The GPU has compute capability %d.%d, the kernels need 8.0 (Ampere) or newer: use device='cpu' or another GPU.",
         device.major, device.minor);
  if (plan.refused & kRefusedHeadDim)
    line(text, "query has head_dim %lld and value %lld, the CUDA kernels take at most %d: use device='cpu'.", Long{p.head_dim},
         Long{p.value_dim}, cuda::kForwardTiles[cuda::kForwardVariants - 1].bucket);
  if (plan.refused & kRefusedSharedMemory)
    line(text,
         "head_dim %lld in %s needs more shared memory than the %lld bytes a block of this GPU (compute capability %d.%d) has.",
         Long{p.head_dim}, name(p.dtype), Long{device.shared_memory}, device.major, device.minor);
  if (plan.refused & kRefusedGrid)
    line(text, "batch %lld x heads %lld needs %lld blocks, one launch has at most 2147483647: split the batch.", Long{p.batch},
         Long{p.heads}, Long{plan.blocks});
  if (plan.refused & kRefusedForced)
    line(text, "FLASH_ATTN_EXT_KERNEL=sm90 forces the Hopper kernels, which cannot run here: %s. Unset it, or set it to sm80.",
         device.sm90 && sm90::refusal(p, g) != nullptr ? sm90::refusal(p, g)
                                                       : "they need compute capability 9.0 and a build for it");
  return text;
}

constexpr char kAlone[] = "dquery is computed by blocks of its own: every run gives the same bits.";
constexpr char kInTurns[] = "dquery is summed up by blocks that take turns: every run gives the same bits.";
constexpr char kSummed[] =
    "dquery is summed up as blocks finish: its last bits vary from run to run (deterministic=True: they do not).";

std::string describe_sm90(const Problem& p, const Gradients* g, const Device& device, const Plan& plan) {
  std::string text;
  line(text, "The %s pass runs the sm90 kernels (TMA, wgmma) in %s: the instance for head dims up to %d%s.",
       name(plan.direction), name(p.dtype), plan.head_dim, p.softcap > 0 ? " with softcap" : "");
  line(text, "A tile is %d rows x %d keys (variant %d), %d warpgroups compute.", plan.tile_rows, plan.tile_keys, plan.variant,
       g == nullptr ? sm90::kForwardTiles[plan.variant].warpgroups
                    : sm90::groups_of(sm90::kBackwardTiles[plan.variant]) + (sm90::kBackwardTiles[plan.variant].sums ? 1 : 0));
  line(text, "%lld blocks on %d multiprocessors share %lld tiles.", Long{plan.blocks}, device.multiprocessors,
       Long{g == nullptr ? sm90::forward_tiles(p, plan.variant) : sm90::backward_tiles(p, plan.variant)});
  line(text, "The keys are not split.");
  line(text, "The workspace has %lld bytes.", Long{plan.workspace_bytes});
  if (g == nullptr || g->dquery.data == nullptr) return text;
  if (const int64_t slab = sm90::backward_slab(p, *g, plan.variant); slab < p.kv_heads)
    line(text, "The key heads run %lld at a time, so that the fp32 sums of dquery stay small.", Long{slab});
  line(text, "%s", plan.row_blocks > 0 ? kAlone : sm90::kBackwardTiles[plan.variant].turn > 0 ? kInTurns : kSummed);
  return text;
}

}  // namespace

std::string describe(const Problem& p, const Gradients* g, const Device& device, const Plan& plan) {
  if (plan.family == Family::kCpu) return describe_cpu(p, device, plan);
  if (plan.family == Family::kNone) return describe_refusal(p, g, device, plan);
  if (plan.family == Family::kSm90) return describe_sm90(p, g, device, plan);
  if (plan.family == Family::kDecode) return describe_decode(as_decode(p), device, plan);
  std::string text;
  line(text, "The %s pass runs the sm80 kernels in %s: the %s instance for %s.", name(plan.direction), name(p.dtype),
       plan.plain ? "plain" : "general",
       plan.head_dim == 0 ? "any head dim" : ("head dims up to " + std::to_string(plan.head_dim)).c_str());
  line(text, "%s", arithmetic(p, plan));
  line(text, "A block takes tiles of %d rows x %d keys (variant %d).", plan.tile_rows, plan.tile_keys, plan.variant);
  line(text, "%lld blocks run on %d multiprocessors.", Long{plan.blocks}, device.multiprocessors);
  if (plan.splits > 1) {
    line(text, "The rows are too few to fill the GPU: the keys are split into %d parts, added up by a second kernel.",
         plan.splits);
  } else {
    line(text, "The keys are not split.");
  }
  line(text, "The workspace has %lld bytes.", Long{plan.workspace_bytes});
  if (g != nullptr && g->dquery.data != nullptr) line(text, g->deterministic || plan.head_dim == 0 ? kAlone : kSummed);
  describe_widths(text, p, g, plan);
  if (plan.refused & kRefusedSm90) line(text, "The faster sm90 kernels are not used: %s.", sm90::refusal(p, g));
  if (plan.refused & kRefusedSplit) line(text, "The sm90 kernels are not used: they cannot split the keys.");
  return text;
}

}  // namespace flash::problem
