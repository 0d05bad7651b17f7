// One emulated thread: a stack of its own that the scheduler enters and that leaves itself, also under the sanitizers.
#pragma once
#include <cstddef>

#if !defined(__x86_64__) || defined(HALFSTEP_UCONTEXT)
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define HALFSTEP_ASAN 1
#endif

namespace emulation {

// Memory for a stack, with a page below it that may not be touched.
class Stack {
 public:
  static constexpr size_t kBytes = 256 * 1024;
  Stack();
  ~Stack();
  Stack(const Stack&) = delete;
  char* bottom() const { return bottom_; }

 private:
  char* bottom_;
};

class Fiber {
 public:
  Fiber() = default;
  ~Fiber();
  Fiber(const Fiber&) = delete;

  // The next enter() calls entry on this stack; entry must end in leave(true). What was left on the stack is forgotten.
  void begin(const Stack& stack, void (*entry)());
  void enter();               // from the scheduler; returns when the fiber leaves
  void arrive();              // the first thing entry does
  void leave(bool for_good);  // from the fiber; returns when it is entered again

  // Under ThreadSanitizer, called by the scheduler on behalf of the fiber: what it did before it released the tag happens before
  // what others do once they acquired it. Switches by themselves order nothing.
  void release(void* tag);
  void acquire(void* tag);

 private:
  const Stack* stack_ = nullptr;
#if defined(__x86_64__) && !defined(HALFSTEP_UCONTEXT)
  void* context_ = nullptr;  // the stack pointer; the registers lie above it
#else
  ucontext_t context_;
#endif
  void* fake_stack_ = nullptr;  // AddressSanitizer's
  void* watched_ = nullptr;     // what ThreadSanitizer takes for a thread
};

// The same for the scheduler itself.
void release(void* tag);
void acquire(void* tag);

#if defined(HALFSTEP_TSAN)
constexpr bool kOneStackPerThread = true;  // or locals of two threads at one address would look like a race
#else
constexpr bool kOneStackPerThread = false;
#endif

}  // namespace emulation
