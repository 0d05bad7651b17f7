// The rows of the update's tables, and which of them are launched together.
#pragma once
#include <algorithm>
#include <vector>

#include "table.cuh"

namespace halfstep {

struct UsualRow {
  const void* grad;
  void *param, *exp_avg, *exp_avg_sq;
  void* wide;  // master or remainder
  int64_t numel;
  int32_t first_block;
  int32_t record;
};

// With what only the unusual rows have.
struct AnyRow : UsualRow {
  void* max_exp_avg_sq;
  int64_t first_index;
  uint32_t param_id;
  uint32_t kind;  // packed
};

__host__ __device__ constexpr uint32_t packed_kind(const RowKind& k) {
  return static_cast<uint32_t>(k.param) | static_cast<uint32_t>(k.grad) << 2 | static_cast<uint32_t>(k.state) << 4 |
         static_cast<uint32_t>(k.master) << 6 | static_cast<uint32_t>(k.remainder) << 7 |
         static_cast<uint32_t>(k.amsgrad) << 8 | static_cast<uint32_t>(k.heal) << 9;
}

// Beside a usual kind: the row is launched with the unusual ones. No bit of the kind itself.
constexpr uint32_t kShared = 1u << 31;

__host__ __device__ constexpr RowKind unpacked_kind(uint32_t p) {
  return {static_cast<Dtype>(p & 3),
          static_cast<Dtype>(p >> 2 & 3),
          static_cast<Dtype>(p >> 4 & 3),
          (p >> 6 & 1) != 0,
          (p >> 7 & 1) != 0,
          (p >> 8 & 1) != 0,
          (p >> 9 & 1) != 0};
}

inline bool is_small(const AnyRow& row) { return row.numel <= kBlockElements; }

template <class Row>
int64_t tables_for(int64_t rows) {
  return (rows + Table<Row>::kCapacity - 1) / Table<Row>::kCapacity;
}

// What a usual kind has beyond full tables: less than a table, for which it would need one launch more.
struct Leftover {
  uint32_t kind;
  int64_t rows = 0;
};

// Of each usual kind whose leftover can consist of small rows; the fewest rows first. Adds up the unusual rows.
inline std::vector<Leftover> leftovers(const std::vector<AnyRow>& rows, int64_t& unusual) {
  struct Count {
    int64_t rows = 0, small = 0;
  };
  constexpr uint32_t kinds[] = {packed_kind(usual::plain), packed_kind(usual::bf16_master),
                                packed_kind(usual::bf16_trusted_master), packed_kind(usual::f16_master),
                                packed_kind(usual::split_master)};
  Count counts[std::size(kinds) + 1];
  for (const AnyRow& row : rows) {
    Count& count = counts[std::find(std::begin(kinds), std::end(kinds), row.kind) - std::begin(kinds)];
    ++count.rows;
    count.small += is_small(row);
  }
  unusual = counts[std::size(kinds)].rows;
  std::vector<Leftover> found;
  for (size_t i = 0; i < std::size(kinds); ++i) {
    const int64_t left = counts[i].rows % Table<UsualRow>::kCapacity;
    if (left > 0 && left <= counts[i].small) found.push_back({kinds[i], left});
  }
  std::sort(found.begin(), found.end(), [](const Leftover& a, const Leftover& b) { return a.rows < b.rows; });
  return found;
}

// Marks the small rows that are launched with the unusual ones, where that makes the launches fewer: the leftovers of some
// kinds, those of the fewest rows first. At a tie fewer rows are marked: the kernels of the usual kinds have no branches on
// the kind and need fewer registers.
//
// So 1,000 small rows take at most 3 launches, whatever their kinds. To mark every leftover is among what is compared. Then
// at most one kind fills a table of 580, and all that is not in it takes tables of 406: 3 for 1,000 rows, or 1 + 2 for 580
// and the other 420. A leftover that cannot be marked belongs to a kind that has large rows: at most one launch more for
// each such kind.
static_assert(3 * Table<AnyRow>::kCapacity >= 1000 && 2 * Table<UsualRow>::kCapacity > 1000 &&
              Table<UsualRow>::kCapacity + 2 * Table<AnyRow>::kCapacity >= 1000);
inline void share_launches(std::vector<AnyRow>& rows) {
  int64_t unusual = 0;
  std::vector<Leftover> each = leftovers(rows, unusual);
  const auto kinds = static_cast<int64_t>(each.size());
  int64_t together = unusual, fewest = tables_for<AnyRow>(unusual) + kinds, marked = 0;
  for (int64_t i = 0; i < kinds; ++i) {
    together += each[i].rows;
    const int64_t launches = tables_for<AnyRow>(together) + kinds - (i + 1);
    if (launches < fewest) {
      fewest = launches;
      marked = i + 1;
    }
  }
  each.resize(marked);
  for (Leftover& leftover : each) {
    for (AnyRow& row : rows) {
      if (leftover.rows == 0) break;
      if (row.kind != leftover.kind || !is_small(row)) continue;
      row.kind |= kShared;
      --leftover.rows;
    }
  }
}

}  // namespace halfstep
