// Second pass: one read and write of everything else. Unscales, clips, updates and casts in registers.
#include "elements.cuh"
#include "multi_tensor.h"
#include "update_rows.h"

namespace halfstep {
namespace {

constexpr int kPack =
    4;  // elements: 16 bytes of float32. Eight would be two accesses 32 bytes apart, half of each line

struct UpdateArgs {
  const Decision* decision;
  const StepRecord* records;
  unsigned long long* healed;
  uint32_t seed;
  bool stochastic_weight;
};

// ---- kinds ------------------------------------------------------------------------------------------------------------------
// One of the usual kinds: known to the compiler, so the branches on it are gone.
template <uint32_t kPacked>
struct Usual {
  using Row = UsualRow;
  static __device__ __forceinline__ constexpr RowKind kind(const Row&) { return unpacked_kind(kPacked); }
  static __device__ __forceinline__ AnyRow whole(const Row& row) {
    AnyRow all{};
    static_cast<UsualRow&>(all) = row;
    return all;
  }
  static bool takes(const AnyRow& row) { return row.kind == kPacked; }
};

struct Plain : Usual<packed_kind(usual::plain)> {};
struct Bf16Master : Usual<packed_kind(usual::bf16_master)> {};
struct Bf16TrustedMaster : Usual<packed_kind(usual::bf16_trusted_master)> {};
struct F16Master : Usual<packed_kind(usual::f16_master)> {};
struct SplitMaster : Usual<packed_kind(usual::split_master)> {};

struct Any {
  using Row = AnyRow;
  static __device__ __forceinline__ RowKind kind(const Row& row) { return unpacked_kind(row.kind); }
  static __device__ __forceinline__ const AnyRow& whole(const Row& row) { return row; }
};

// ---- one pack ---------------------------------------------------------------------------------------------------------------
template <int N>
struct Values {
  Floats<N> g, p, m, v, max_v;
};

// The value that the update starts from: see load_param of the CPU's kernels. Adds to `healed`.
template <int N>
__device__ __forceinline__ Floats<N> load_param(const RowKind& kind, const AnyRow& row, int64_t i, int& healed) {
  if (!kind.master && !kind.remainder) return load<N>(row.param, kind.param, i);
  if (kind.remainder) {
    const Pack<uint16_t, N> weight = load_pack<uint16_t, N>(at(row.param, Dtype::bf16, i));
    const Pack<int16_t, N> rest = load_pack<int16_t, N>(at(row.wide, Dtype::bf16, i));
    Floats<N> p;
#pragma unroll
    for (int k = 0; k < N; ++k)
      p.value[k] =
          join_master(static_cast<uint32_t>(weight.item[k]), static_cast<uint32_t>(static_cast<int32_t>(rest.item[k])));
    return p;
  }
  Floats<N> p = load<N>(row.wide, Dtype::f32, i);
  if (!kind.heal) return p;
  const Pack<uint16_t, N> weight = load_pack<uint16_t, N>(at(row.param, kind.param, i));
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const float master = p.value[k], wide = widened(weight.item[k], kind.param);
    const bool stale = narrowed(master, kind.param) != weight.item[k] && (master == master || wide == wide);
    healed += stale;
    p.value[k] = stale ? wide : master;
  }
  return p;
}

template <int N>
__device__ __forceinline__ Values<N> load_values(const RowKind& kind, const AnyRow& row, int64_t i, int& healed) {
  Values<N> x;
  x.g = load<N>(row.grad, kind.grad, i);
  x.p = load_param<N>(kind, row, i, healed);
  x.m = load<N>(row.exp_avg, kind.state, i);
  x.v = load<N>(row.exp_avg_sq, kind.state, i);
  if (kind.amsgrad) x.max_v = load<N>(row.max_exp_avg_sq, kind.state, i);
  return x;
}

template <int N>
__device__ __forceinline__ void update_values(const RowKind& kind, const AdamScalars& scalars, float grad_factor,
                                              Values<N>& x) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const float g = x.g.value[k] * grad_factor;
    if (kind.amsgrad)
      adam_update(g, x.p.value[k], x.m.value[k], x.v.value[k], &x.max_v.value[k], scalars);
    else
      adam_update<float>(g, x.p.value[k], x.m.value[k], x.v.value[k], nullptr, scalars);
  }
}

// Rounded stochastically where the stream's condition holds and the dtype is narrow.
template <int N>
__device__ __forceinline__ void store_rounded(void* to, Dtype d, int64_t i, const Floats<N>& values, bool stochastic,
                                              const RandomKey& key, RandomStream stream, int64_t first_index) {
  if (d == Dtype::f32 || !stochastic) {
    store<N>(to, d, i, values);
    return;
  }
  store_random<N>(to, d, i, values, random_words<N>({key.seed, key.t, key.param_id, stream}, first_index + i));
}

template <int N>
__device__ __forceinline__ void store_values(const RowKind& kind, const AnyRow& row, int64_t i, const Values<N>& x,
                                             const RandomKey& key, bool stochastic_weight) {
  if (kind.remainder) {
    Pack<uint16_t, N> weight, rest;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      uint32_t upper, lower;
      split_master(x.p.value[k], upper, lower);
      weight.item[k] = static_cast<uint16_t>(upper);
      rest.item[k] = static_cast<uint16_t>(lower);
    }
    store_pack(at(row.param, Dtype::bf16, i), weight);
    store_pack(at(row.wide, Dtype::bf16, i), rest);
  } else {
    if (kind.master) store<N>(row.wide, Dtype::f32, i, x.p);
    store_rounded<N>(row.param, kind.param, i, x.p, stochastic_weight && !kind.master, key, kStreamWeight,
                     row.first_index);
  }
  store_rounded<N>(row.exp_avg, kind.state, i, x.m, true, key, kStreamExpAvg, row.first_index);
  store_rounded<N>(row.exp_avg_sq, kind.state, i, x.v, true, key, kStreamExpAvgSq, row.first_index);
  if (kind.amsgrad)
    store_rounded<N>(row.max_exp_avg_sq, kind.state, i, x.max_v, true, key, kStreamMaxExpAvgSq, row.first_index);
}

__device__ __forceinline__ int head_of_row(const RowKind& kind, const AnyRow& row) {
  int head = head_of<kPack>(row.param, kind.param);
  head = common_head(head, head_of<kPack>(row.grad, kind.grad));
  head = common_head(head, head_of<kPack>(row.exp_avg, kind.state));
  head = common_head(head, head_of<kPack>(row.exp_avg_sq, kind.state));
  if (kind.master) head = common_head(head, head_of<kPack>(row.wide, Dtype::f32));
  if (kind.remainder) head = common_head(head, head_of<kPack>(row.wide, Dtype::bf16));
  if (kind.amsgrad) head = common_head(head, head_of<kPack>(row.max_exp_avg_sq, kind.state));
  return head;
}

// ---- kernel -----------------------------------------------------------------------------------------------------------------
template <class Kind>
__global__ void __launch_bounds__(kThreads)
    update_kernel(const __grid_constant__ Table<typename Kind::Row> table, const UpdateArgs args) {
  if (args.decision->skip) return;
  const float grad_factor = args.decision->grad_factor;
  const Share share = share_of<kBlockElements>(table, static_cast<int>(blockIdx.x));
  const RowKind kind = Kind::kind(table.row[share.row]);
  const AnyRow& row = Kind::whole(table.row[share.row]);
  const StepRecord record = args.records[row.record];
  const RandomKey key{args.seed, record.t, row.param_id, 0};
  int healed = 0;
  sweep<kPack>(share.begin, share.n, head_of_row(kind, row), [&](int64_t i, auto count) {
    constexpr int N = decltype(count)::value;
    Values<N> x = load_values<N>(kind, row, i, healed);
    update_values<N>(kind, record.scalars, grad_factor, x);
    store_values<N>(kind, row, i, x, key, args.stochastic_weight);
  });
  if (healed) atomicAdd(args.healed, static_cast<unsigned long long>(healed));
}

// ---- host -------------------------------------------------------------------------------------------------------------------
AnyRow row_from(const AdamRow& r, size_t record, const RowKind& kind) {
  AnyRow row;
  row.grad = r.grad;
  row.param = r.param;
  row.exp_avg = r.exp_avg;
  row.exp_avg_sq = r.exp_avg_sq;
  row.wide = r.master ? static_cast<void*>(r.master) : r.remainder;
  row.numel = r.numel;
  row.first_block = 0;
  row.record = static_cast<int32_t>(record);
  row.max_exp_avg_sq = r.max_exp_avg_sq;
  row.first_index = r.first_index;
  row.param_id = r.param_id;
  row.kind = packed_kind(kind);
  return row;
}

template <class Kind>
void launch_rows(const char* name, const std::vector<typename Kind::Row>& rows, const UpdateArgs& args,
                 const Queue& queue) {
  for_each_table<kBlockElements>(rows, [&](const Table<typename Kind::Row>& table, int64_t blocks) {
    launch(name, update_kernel<Kind>, blocks, kThreads, queue, table, args);
  });
}

// Takes the rows of a usual kind out of `rows` and launches them.
template <class Kind>
void launch_usual(const char* name, std::vector<AnyRow>& rows, const UpdateArgs& args, const Queue& queue) {
  const auto others =
      std::stable_partition(rows.begin(), rows.end(), [](const AnyRow& row) { return !Kind::takes(row); });
  launch_rows<Kind>(name, {others, rows.end()}, args, queue);
  rows.erase(others, rows.end());
}

}  // namespace

void update(const std::vector<AdamRow>& rows, const StepPointers& step, const StepOptions& options,
            const Queue& queue) {
  const UpdateArgs args{step.decision, step.records, step.healed, options.seed, options.stochastic_weight};
  std::vector<AnyRow> left;
  left.reserve(rows.size());
  for (size_t i = 0; i < rows.size(); ++i)
    if (rows[i].numel > 0) left.push_back(row_from(rows[i], i, kind_of(rows[i], options.heal)));
  share_launches(left);
  launch_usual<Plain>("update of float32", left, args, queue);
  launch_usual<Bf16Master>("update of bfloat16", left, args, queue);
  launch_usual<Bf16TrustedMaster>("update of bfloat16", left, args, queue);
  launch_usual<F16Master>("update of float16", left, args, queue);
  launch_usual<SplitMaster>("update of split bfloat16", left, args, queue);
  launch_rows<Any>("update", left, args, queue);
}

}  // namespace halfstep
