// Between the passes: adds up the chunks, decides, advances the counters, and computes each parameter's scalars. One block per
// launch, so that it needs no agreement between blocks; the additions in order make it
// longer the more chunks and tensors there are.
#include "multi_tensor.h"

namespace halfstep {
namespace {

constexpr int kPrologueThreads = 512;
constexpr int kWarp = 32;

enum GroupFlag : uint32_t { kDecoupled = 1, kMaximize = 2, kLrOnDevice = 4, kLrIsDouble = 8 };
constexpr int kFlagBits = 4;

// Groups and rows share the by-value space, groups from the front and rows from the back: one group of 1,000 parameters and
// 465 groups of one fit into one launch alike. Two rows that bring their groups take 13 words, so 1,000 rows take at most
// two launches.
struct PrologueTable {
  static constexpr int kGroupWords = 5;  // lr (or its address), beta1, beta2, eps, weight_decay
  static constexpr int kWords = static_cast<int>((kTableBytes - 16) / 8);
  uint64_t word[kWords];  // a row: the counter's address, and in every second word two rows' group and flags
  int32_t groups, rows, first_record, decides;
};
static_assert(2 * (PrologueTable::kWords / (3 + 2 * PrologueTable::kGroupWords)) >= 500);

struct PrologueArgs {
  Stats stats;
  StepPointers step;
  double max_norm;
  bool skip_nonfinite;
};

// Rows come in pairs of three words: two addresses, and the two rows' group << kFlagBits | flags.
__host__ __device__ constexpr int pair_at(int row) { return PrologueTable::kWords - 3 * (row / 2 + 1); }

__device__ __forceinline__ double as_double(uint64_t word) {
  double value;
  memcpy(&value, &word, 8);
  return value;
}

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

// Adds the first `count` lanes' x to total, in the order of the lanes; all lanes of the warp get the same.
__device__ __forceinline__ double add_in_order(double total, double x, int count) {
  for (int k = 0; k < count; ++k) total = total + __shfl_sync(kWholeWarp, x, k);
  return total;
}

__device__ __forceinline__ int32_t tensor_of(int32_t marked) { return marked < 0 ? ~marked : marked; }

// The sum of one tensor's chunks, of which `begin` is the first. Called by whole warps.
__device__ double tensor_sum(const Stats& stats, int begin) {
  const int32_t tensor = tensor_of(stats.chunks.tensor[begin]);
  double total = 0.0;
  for (int first = begin;; first += kWarp) {
    const int c = first + lane();
    const bool mine = c < stats.chunk_count && tensor_of(stats.chunks.tensor[c]) == tensor;
    const double x = mine ? stats.chunks.sum_squares[c] : 0.0;
    const unsigned count = __popc(__ballot_sync(kWholeWarp, mine));
    total = add_in_order(total, x, static_cast<int>(count));
    if (count < kWarp) return total;
  }
}

// Every tensor's sum: warps look at 32 chunks at a time and add up the tensors that start there.
__device__ void sum_tensors(const Stats& stats) {
  for (int i = static_cast<int>(threadIdx.x); i < stats.tensor_count; i += kPrologueThreads) stats.tensor_sums[i] = 0.0;
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  for (int first = warp * kWarp; first < stats.chunk_count; first += kPrologueThreads) {
    const int c = first + lane();
    const bool starts = c < stats.chunk_count && (c == 0 || tensor_of(stats.chunks.tensor[c]) !=
                                                                tensor_of(stats.chunks.tensor[c > 0 ? c - 1 : 0]));
    for (unsigned left = __ballot_sync(kWholeWarp, starts); left; left &= left - 1) {
      const int begin = first + __ffs(static_cast<int>(left)) - 1;
      const double sum = tensor_sum(stats, begin);
      if (lane() == 0) stats.tensor_sums[tensor_of(stats.chunks.tensor[begin])] = sum;
    }
  }
  __syncthreads();
}

// The total, in the order of the tensors; by the first warp.
__device__ double total_sum(const Stats& stats) {
  double total = 0.0;
  for (int first = 0; first < stats.tensor_count; first += kWarp) {
    const int i = first + lane();
    const int left = stats.tensor_count - first;
    total = add_in_order(total, i < stats.tensor_count ? stats.tensor_sums[i] : 0.0, left < kWarp ? left : kWarp);
  }
  return total;
}

// Sum of squares and first non-finite tensor of the chunks; the first thread has both.
__device__ void finish_stats(const Stats& stats, double* sum_squares, int* first_nonfinite) {
  __shared__ int lowest;
  if (threadIdx.x == 0) lowest = INT32_MAX;
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < stats.chunk_count; c += kPrologueThreads)
    if (stats.chunks.tensor[c] < 0) atomicMin(&lowest, ~stats.chunks.tensor[c]);
  if (stats.squares) {
    sum_tensors(stats);
    if (threadIdx.x < kWarp) *sum_squares = total_sum(stats);
  }
  __syncthreads();
  *first_nonfinite = lowest;
}

__device__ void decide_step(const PrologueArgs& args, double sum_squares, bool nonfinite) {
  const StepPointers& step = args.step;
  StepInputs in;
  in.sum_squares = sum_squares;
  in.scale = step.scale ? *step.scale : 1.0f;
  in.max_norm = args.max_norm;
  in.nonfinite = nonfinite;
  in.skip_nonfinite = args.skip_nonfinite;
  in.found_inf = step.found_inf && *step.found_inf > 0.0f;
  const StepDecision d = decide(in);
  *step.norm = d.norm;
  *step.skipped = d.skip ? 1 : 0;
  *step.healed = 0;
  *step.decision = {d.grad_factor, d.skip};
}

// The statistics, from the chunks or as they are given, and the decision.
__device__ void finish(const PrologueArgs& args) {
  const Stats& stats = args.stats;
  double sum_squares = nan("");
  int64_t first = -1;
  if (stats.passed) {
    int lowest;
    finish_stats(stats, &sum_squares, &lowest);
    if (lowest != INT32_MAX) first = lowest;
  } else {
    if (stats.given_sum_squares) sum_squares = *stats.given_sum_squares;
    if (stats.given_first_nonfinite) first = *stats.given_first_nonfinite;
  }
  if (threadIdx.x == 0 && stats.sum_squares) *stats.sum_squares = sum_squares;
  if (threadIdx.x == 0 && stats.first_nonfinite) *stats.first_nonfinite = first;
  if (threadIdx.x == 0 && args.step.decision) decide_step(args, sum_squares, first >= 0);
}

__device__ __forceinline__ AdamGroup group_of(const PrologueTable& table, uint32_t packed) {
  const uint64_t* word = table.word + (packed >> kFlagBits) * PrologueTable::kGroupWords;
  AdamGroup group;
  if (!(packed & kLrOnDevice))
    group.lr = as_double(word[0]);
  else if (packed & kLrIsDouble)
    group.lr = *reinterpret_cast<const double*>(static_cast<uintptr_t>(word[0]));
  else
    group.lr = static_cast<double>(*reinterpret_cast<const float*>(static_cast<uintptr_t>(word[0])));
  group.beta1 = as_double(word[1]);
  group.beta2 = as_double(word[2]);
  group.eps = as_double(word[3]);
  group.weight_decay = as_double(word[4]);
  group.decoupled = packed & kDecoupled;
  group.maximize = packed & kMaximize;
  return group;
}

__global__ void __launch_bounds__(kPrologueThreads)
    prologue_kernel(const __grid_constant__ PrologueTable table, const __grid_constant__ PrologueArgs args) {
  if (table.decides) finish(args);
  __syncthreads();  // the decision is visible to the block
  if (table.rows == 0) return;
  const bool skip = args.step.decision->skip != 0;
  for (int r = static_cast<int>(threadIdx.x); r < table.rows; r += kPrologueThreads) {
    const uint64_t* pair = table.word + pair_at(r);
    auto* counter = reinterpret_cast<int64_t*>(static_cast<uintptr_t>(pair[r % 2]));
    const auto packed = static_cast<uint32_t>(pair[2] >> (r % 2 * 32));
    const int64_t t = *counter + 1;
    args.step.records[table.first_record + r] = {adam_scalars(group_of(table, packed), t), static_cast<uint32_t>(t)};
    if (!skip) *counter = t;
  }
}

// ---- host -------------------------------------------------------------------------------------------------------------------
uint64_t word_of(double value) {
  uint64_t word;
  memcpy(&word, &value, 8);
  return word;
}

class TableFiller {
 public:
  explicit TableFiller(const std::vector<DeviceGroup>& groups) : groups_(groups), place_(groups.size(), -1) {
    clear(0);
  }

  PrologueTable& table() { return table_; }

  void clear(size_t first_record) {
    table_.groups = table_.rows = table_.decides = 0;
    table_.first_record = static_cast<int32_t>(first_record);
    std::fill(place_.begin(), place_.end(), -1);
  }

  // False if there is no room left.
  bool add(const AdamRow& row) {
    const auto group = static_cast<size_t>(row.group);
    const bool known = place_[group] >= 0;
    const int groups = table_.groups + !known;
    if (groups * PrologueTable::kGroupWords > pair_at(table_.rows)) return false;
    if (!known) place_[group] = put(groups_[group]);
    uint64_t* pair = table_.word + pair_at(table_.rows);
    const int second = table_.rows % 2;
    pair[second] = reinterpret_cast<uintptr_t>(row.step);
    const auto packed =
        static_cast<uint64_t>(static_cast<uint32_t>(place_[group]) << kFlagBits | flags(groups_[group]));
    pair[2] = second ? pair[2] | packed << 32 : packed;
    ++table_.rows;
    return true;
  }

 private:
  static uint32_t flags(const DeviceGroup& g) {
    return (g.group.decoupled ? kDecoupled : 0u) | (g.group.maximize ? kMaximize : 0u) | (g.lr ? kLrOnDevice : 0u) |
           (g.lr_is_double ? kLrIsDouble : 0u);
  }

  int32_t put(const DeviceGroup& g) {
    uint64_t* word = table_.word + table_.groups * PrologueTable::kGroupWords;
    word[0] = g.lr ? reinterpret_cast<uintptr_t>(g.lr) : word_of(g.group.lr);
    word[1] = word_of(g.group.beta1);
    word[2] = word_of(g.group.beta2);
    word[3] = word_of(g.group.eps);
    word[4] = word_of(g.group.weight_decay);
    return table_.groups++;
  }

  const std::vector<DeviceGroup>& groups_;
  std::vector<int32_t> place_;  // of each group in the table, -1 if it is not there
  PrologueTable table_;
};

}  // namespace

void prologue(const std::vector<AdamRow>& rows, const std::vector<DeviceGroup>& groups, const Stats& stats,
              const StepPointers& step, const StepOptions& options, const Queue& queue) {
  const PrologueArgs args{stats, step, options.max_norm, options.skip_nonfinite};
  TableFiller filler(groups);
  filler.table().decides = true;
  size_t next = 0;
  do {
    while (next < rows.size() && filler.add(rows[next])) ++next;
    launch("prologue", prologue_kernel, 1, kPrologueThreads, queue, filler.table(), args);
    filler.clear(next);
  } while (next < rows.size());
}

}  // namespace halfstep
