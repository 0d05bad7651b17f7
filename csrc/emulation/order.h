// In which order blocks, and threads that could go on, come. A GPU may take any, so results may not depend on it.
#pragma once
#include <algorithm>
#include <random>

namespace emulation {

struct Order {
  enum Mode { ascending, descending, shuffled };
  Mode mode = ascending;
  unsigned seed = 0;
};

// Puts ascending items into the order; `salt` makes shuffles differ.
template <class Items>
void arrange(Items& items, const Order& order, unsigned salt) {
  if (order.mode == Order::descending) std::reverse(items.begin(), items.end());
  if (order.mode != Order::shuffled) return;
  std::minstd_rand random(order.seed * 7919u + salt);
  std::shuffle(items.begin(), items.end(), random);
}

}  // namespace emulation
