// One block at a time: its threads run by turns, each until it meets others or returns.
#pragma once
#include <cuda_runtime.h>

#include "order.h"

namespace emulation {

// Throws std::runtime_error if the threads can never go on: one waits where another does not come.
void run_block(const Work& work, dim3 grid, dim3 block, uint3 index, const Order& order);

}  // namespace emulation
