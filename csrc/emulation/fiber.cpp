#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>

#if defined(HALFSTEP_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(HALFSTEP_TSAN)  // this file is compiled without -fsanitize=thread and linked with its library
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* tag);
void __tsan_release(void* tag);
}
#endif

#if defined(__x86_64__) && !defined(HALFSTEP_UCONTEXT)
// swapcontext makes two system calls, which is most of what a short thread costs. The floating-point control registers are
// left as they are: all threads of a launch share the contract's mode.
extern "C" __attribute__((visibility("hidden"))) void halfstep_switch_stack(void** from, void* to);
asm(R"(
.text
.globl halfstep_switch_stack
.hidden halfstep_switch_stack
.type halfstep_switch_stack, @function
halfstep_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size halfstep_switch_stack, . - halfstep_switch_stack
)");
#endif

namespace emulation {
namespace {

// The scheduler's side: there is one, since one launch runs at a time.
#if defined(__x86_64__) && !defined(HALFSTEP_UCONTEXT)
void* scheduler;
#else
ucontext_t scheduler;
#endif
#if defined(HALFSTEP_ASAN)
void* scheduler_fake_stack;
const void* scheduler_bottom;
size_t scheduler_bytes;
#endif
#if defined(HALFSTEP_TSAN)
void* watched_scheduler;
#endif

size_t page() {
  static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace

Stack::Stack() {
  void* memory =
      mmap(nullptr, page() + kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, page(), PROT_NONE);
  bottom_ = static_cast<char*>(memory) + page();
}

Stack::~Stack() { munmap(bottom_ - page(), page() + kBytes); }

Fiber::~Fiber() {
#if defined(HALFSTEP_TSAN)
  if (watched_) __tsan_destroy_fiber(watched_);
#endif
}

void Fiber::begin(const Stack& stack, void (*entry)()) {
  stack_ = &stack;
#if defined(HALFSTEP_ASAN)
  __asan_unpoison_memory_region(stack.bottom(), Stack::kBytes);
#endif
#if defined(HALFSTEP_TSAN)
  if (!watched_) watched_ = __tsan_create_fiber(0);
#endif
#if defined(__x86_64__) && !defined(HALFSTEP_UCONTEXT)
  auto* top = reinterpret_cast<uintptr_t*>(stack.bottom() + Stack::kBytes);
  *--top = 0;  // what entry would return to: nothing; stack traces end here
  *--top = reinterpret_cast<uintptr_t>(entry);
  for (int i = 0; i < 6; ++i) *--top = 0;
  context_ = top;
#else
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack.bottom();
  context_.uc_stack.ss_size = Stack::kBytes;
  context_.uc_link = nullptr;
  makecontext(&context_, entry, 0);
#endif
}

void Fiber::enter() {
#if defined(HALFSTEP_ASAN)
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, stack_->bottom(), Stack::kBytes);
#endif
#if defined(HALFSTEP_TSAN)
  watched_scheduler = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(watched_, 1);  // 1: the switch itself orders nothing
#endif
#if defined(__x86_64__) && !defined(HALFSTEP_UCONTEXT)
  halfstep_switch_stack(&scheduler, context_);
#else
  swapcontext(&scheduler, &context_);
#endif
#if defined(HALFSTEP_ASAN)
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
}

void Fiber::arrive() {
#if defined(HALFSTEP_ASAN)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom, &scheduler_bytes);
#endif
}

void Fiber::leave([[maybe_unused]] bool for_good) {
#if defined(HALFSTEP_ASAN)
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fake_stack_, scheduler_bottom, scheduler_bytes);
#endif
#if defined(HALFSTEP_TSAN)
  __tsan_switch_to_fiber(watched_scheduler, 1);
#endif
#if defined(__x86_64__) && !defined(HALFSTEP_UCONTEXT)
  halfstep_switch_stack(&context_, scheduler);
#else
  swapcontext(&context_, &scheduler);
#endif
#if defined(HALFSTEP_ASAN)
  __sanitizer_finish_switch_fiber(fake_stack_, &scheduler_bottom, &scheduler_bytes);
#endif
}

void Fiber::release([[maybe_unused]] void* tag) {
#if defined(HALFSTEP_TSAN)
  void* scheduler_itself = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(watched_, 1);
  __tsan_release(tag);
  __tsan_switch_to_fiber(scheduler_itself, 1);
#endif
}

void Fiber::acquire([[maybe_unused]] void* tag) {
#if defined(HALFSTEP_TSAN)
  void* scheduler_itself = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(watched_, 1);
  __tsan_acquire(tag);
  __tsan_switch_to_fiber(scheduler_itself, 1);
#endif
}

void release([[maybe_unused]] void* tag) {
#if defined(HALFSTEP_TSAN)
  __tsan_release(tag);
#endif
}

void acquire([[maybe_unused]] void* tag) {
#if defined(HALFSTEP_TSAN)
  __tsan_acquire(tag);
#endif
}

}  // namespace emulation
