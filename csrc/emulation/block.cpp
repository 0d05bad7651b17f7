#include "block.h"

#include <cstdio>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "fiber.h"

// The linker's names for the ends of the section that all __shared__ variables are in; null without any.
extern "C" {
extern char __start_halfstep_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_halfstep_shared[] __attribute__((weak, visibility("hidden")));
}

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulation {
namespace {

constexpr size_t kWarp = warpSize;
constexpr uint64_t kUndefined = ~uint64_t{0};  // as a float: NaN

struct Thread {
  enum State : uint8_t { ready, at_barrier, in_warp, outside_mask, done };

  Fiber fiber;
  const Stack* stack = nullptr;
  bool begun = false;
  State state = done;
  uint3 index{};
  unsigned number = 0;
  // Where it waits, and what it brought.
  Site site{};
  Vote vote{};
  bool predicate = false;
  Exchange exchange{};
  unsigned mask = 0;
  int source = 0;
  uint64_t value = 0, result = 0;

  bool meets(const Thread& other) const {
    return state == other.state && site.line == other.site.line && !std::strcmp(site.file, other.site.file);
  }
};

std::vector<std::unique_ptr<Thread>> team;  // made once, for all blocks
size_t team_size;                           // of this block
std::vector<std::unique_ptr<Stack>> stacks;
std::vector<const Stack*> free_stacks;
Thread* current;
const Work* current_work;
// Tags, for ThreadSanitizer: of a block's beginning and end, and of threads' meetings.
char started, ended, met, met_in_warp[32];

const Stack& take_stack() {
  if (free_stacks.empty()) {
    stacks.push_back(std::make_unique<Stack>());
    free_stacks.push_back(stacks.back().get());
  }
  const Stack* stack = free_stacks.back();
  free_stacks.pop_back();
  return *stack;
}

// The next thread to begin gets the stack while it is warm: most kernels' threads never wait, and share one.
void leave_stack(Thread& thread) {
  if (kOneStackPerThread || !thread.stack) return;
  free_stacks.push_back(thread.stack);
  thread.stack = nullptr;
}

void entry() {
  current->fiber.arrive();
  current_work->call(current_work->kernel_and_arguments);
  current->state = Thread::done;
  current->fiber.leave(true);
}

void enter(Thread& thread) {
  current = &thread;
  threadIdx = thread.index;
  if (!thread.begun) {
    if (!thread.stack) thread.stack = &take_stack();
    thread.fiber.begin(*thread.stack, entry);
    thread.fiber.acquire(&started);
    thread.begun = true;
  }
  thread.fiber.enter();
  if (thread.state != Thread::done) return;
  thread.fiber.release(&ended);
  leave_stack(thread);
}

// On a GPU shared memory holds anything at first. Not memset: the sanitizers know the gaps between the variables.
__attribute__((no_sanitize("address", "undefined", "thread"))) void spoil_shared_memory() {
  if (!__start_halfstep_shared) return;
  for (volatile char* at = __start_halfstep_shared; at < __stop_halfstep_shared; ++at) *at = static_cast<char>(0xFF);
}

void gather(dim3 block) {
  team_size = static_cast<size_t>(block.x) * block.y * block.z;
  while (team.size() < team_size) team.push_back(std::make_unique<Thread>());
  for (unsigned i = 0; i < team_size; ++i) {
    Thread& thread = *team[i];
    thread.index = {i % block.x, i / block.x % block.y, i / block.x / block.y};
    thread.number = i;
    thread.state = Thread::ready;
    thread.begun = false;
  }
}

// After a failure threads are left in the middle of their work.
void dismiss() {
  for (size_t i = 0; i < team_size; ++i) {
    team[i]->state = Thread::done;
    leave_stack(*team[i]);
  }
}

std::string place(const Site& site) {
  const std::string file = site.file;
  return file.substr(file.find_last_of('/') + 1) + ":" + std::to_string(site.line);
}

std::string doing(const Thread& thread) {
  if (thread.state == Thread::done) return "has returned";
  if (thread.state == Thread::at_barrier) return "waits for the block at " + place(thread.site);
  char mask[16];
  std::snprintf(mask, sizeof mask, "0x%08x", thread.mask);
  const bool outside = thread.state == Thread::outside_mask;
  return std::string(outside ? "is not among the lanes" : "waits for the warp's lanes") + " " + mask +
         (outside ? " that it calls for at " : " at ") + place(thread.site);
}

bool all_done() {
  for (size_t i = 0; i < team_size; ++i)
    if (team[i]->state != Thread::done) return false;
  return true;
}

// Each thing that threads do, with the first thread that does it.
std::string stuck() {
  std::vector<std::string> seen;
  std::string text = "its threads wait for each other for ever";
  for (size_t i = 0; i < team_size; ++i) {
    const std::string what = doing(*team[i]);
    if (std::find(seen.begin(), seen.end(), what) != seen.end()) continue;
    text += (seen.empty() ? ": thread " : "; thread ") + std::to_string(i) + " " + what;
    seen.push_back(what);
  }
  return text;
}

// ---- meetings ---------------------------------------------------------------------------------------------------------------
bool release_block() {
  const Thread& first = *team[0];
  unsigned holds = 0;
  for (size_t i = 0; i < team_size; ++i) {
    const Thread& thread = *team[i];
    if (thread.state != Thread::at_barrier || !thread.meets(first)) return false;
    holds += thread.predicate;
  }
  for (size_t i = 0; i < team_size; ++i) {
    Thread& thread = *team[i];
    thread.fiber.release(&met);
    thread.result = thread.vote == Vote::any ? holds > 0 : thread.vote == Vote::all ? holds == team_size : holds;
    thread.state = Thread::ready;
  }
  for (size_t i = 0; i < team_size; ++i) team[i]->fiber.acquire(&met);
  return true;
}

// Those of a warp whom this thread waits for. Lanes that the block does not have are not waited for.
template <class Do>
void for_mask(const Thread& thread, Do each) {
  const size_t base = thread.number / kWarp * kWarp;
  for (size_t lane = 0; lane < kWarp && base + lane < team_size; ++lane)
    if (thread.mask >> lane & 1) each(lane, *team[base + lane]);
}

bool release_lanes_of(const Thread& one) {
  bool complete = true;
  uint64_t ballot = 0;
  for_mask(one, [&](size_t lane, const Thread& other) {
    complete = complete && other.meets(one) && other.mask == one.mask;
    ballot |= static_cast<uint64_t>(other.value != 0) << lane;
  });
  if (!complete) return false;
  const size_t base = one.number / kWarp * kWarp;
  for_mask(one, [&](size_t, Thread& other) {
    const size_t source = base + static_cast<size_t>(other.source);
    const bool defined = one.mask >> other.source & 1 && source < team_size;
    other.result = other.exchange == Exchange::ballot ? ballot : defined ? team[source]->value : kUndefined;
  });
  if (one.exchange == Exchange::none) {  // the others order no memory
    for_mask(one, [&](size_t, Thread& other) { other.fiber.release(&met_in_warp[base / kWarp]); });
    for_mask(one, [&](size_t, Thread& other) { other.fiber.acquire(&met_in_warp[base / kWarp]); });
  }
  for_mask(one, [](size_t, Thread& other) { other.state = Thread::ready; });
  return true;
}

bool release_warps() {
  bool any = false;
  for (size_t i = 0; i < team_size; ++i)
    if (team[i]->state == Thread::in_warp) any = release_lanes_of(*team[i]) || any;
  return any;
}

void wait(Thread::State state, Site site) {
  current->state = state;
  current->site = site;
  current->fiber.leave(false);
}

}  // namespace

int lane() { return static_cast<int>(current->number % kWarp); }

int meet_block(Vote vote, bool predicate, Site site) {
  Thread& me = *current;
  me.vote = vote;
  me.predicate = predicate;
  wait(Thread::at_barrier, site);
  return static_cast<int>(me.result);
}

uint64_t meet_warp(Exchange exchange, unsigned mask, uint64_t value, int source, Site site) {
  Thread& me = *current;
  me.exchange = exchange;
  me.mask = mask;
  me.value = value;
  me.source = source;
  wait(mask >> lane() & 1 ? Thread::in_warp : Thread::outside_mask, site);
  return me.result;
}

void run_block(const Work& work, dim3 grid, dim3 block, uint3 index, const Order& order) {
  current_work = &work;
  blockIdx = index;
  blockDim = block;
  gridDim = grid;
  gather(block);
  spoil_shared_memory();
  release(&started);
  std::vector<unsigned> turns(team_size);
  unsigned salt = index.x * 31u + index.y * 17u + index.z;
  for (bool moving = true; moving;) {
    moving = false;
    std::iota(turns.begin(), turns.end(), 0u);
    arrange(turns, order, salt++);
    for (const unsigned i : turns) {
      if (team[i]->state != Thread::ready) continue;
      enter(*team[i]);
      moving = true;
    }
    moving = release_warps() || release_block() || moving;
  }
  acquire(&ended);
  if (all_done()) return;
  const std::string text = stuck();
  dismiss();
  throw std::runtime_error("the emulated kernel fails in block (" + std::to_string(index.x) + ", " +
                           std::to_string(index.y) + ", " + std::to_string(index.z) + "): " + text);
}

}  // namespace emulation
