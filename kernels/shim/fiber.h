// Fibers. Each fiber has a stack, and fiber_switch changes the stack. The assembly avoids the system calls of ucontext.
#pragma once
#include <sys/mman.h>
#include <unistd.h>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#define FIBER_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FIBER_ASAN 1
#endif
#endif
#ifdef FIBER_ASAN
#include <sanitizer/common_interface_defs.h>
#endif
// Saves the callee-saved registers on the stack and the stack pointer in *save. Then resumes the fiber whose saved
// stack pointer is `load`. Defined in host/main.cpp, because only one object of a program may define it.
extern "C" void fiber_switch(void** save, void* load);

namespace host {

struct Fiber {
  static const size_t size = 128 << 10;
  void* sp = nullptr;
  char* stack = nullptr;
  void (*entry)() = nullptr;
};

inline void* home;           // the scheduler's stack pointer while a fiber runs
inline Fiber* running;
inline bool from_home;       // whether the scheduler made the last switch
#ifdef FIBER_ASAN
inline const void* home_stack;
inline size_t home_size;
#endif

inline void before(const void* stack, size_t size) {
#ifdef FIBER_ASAN
  __sanitizer_start_switch_fiber(nullptr, stack, size);
#endif
  (void)stack, (void)size;
}
inline void after(bool in_fiber) {
#ifdef FIBER_ASAN
  if (in_fiber && from_home) __sanitizer_finish_switch_fiber(nullptr, &home_stack, &home_size);
  else __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  (void)in_fiber;
}

// Switches back to the scheduler.
inline void leave(Fiber& f) {
#ifdef FIBER_ASAN
  before(home_stack, home_size);
#endif
  fiber_switch(&f.sp, home);
  after(true);
}
inline void go_to(void** save, Fiber& f, bool is_home) {
  running = &f, from_home = is_home;
  before(f.stack, Fiber::size);
  fiber_switch(save, f.sp);
}
// Runs `f` from the scheduler, and the fibers that it switches to, until one of them leaves.
inline void enter(Fiber& f) {
  go_to(&home, f, true);
  after(false);
}
// Switches from a fiber directly to the next one.
inline void hand_over(Fiber& f, Fiber& next) {
  go_to(&f.sp, next, false);
  after(true);
}
// Runs `entry`, which must end with `leave` or `hand_over` and never returns.
[[noreturn]] inline void fiber_main() {
  after(true);
  running->entry();
  abort();
}
// Prepares `f` to call `entry` when `f` is first entered. The stack is reused. Stacks are a power of two apart, so
// equal depths would map to the same cache sets. The stack of fiber `index` therefore starts a little lower.
inline void start(Fiber& f, void (*entry)(), unsigned index) {
  if (!f.stack) f.stack = (char*)mmap(nullptr, Fiber::size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
  f.entry = entry;
  void** top = (void**)(f.stack + Fiber::size - 64 - index % 64 * 576);
#if defined(__x86_64__)
  top[-1] = nullptr;                      // keeps the stack 16-byte aligned at the call boundary
  top[-2] = (void*)fiber_main;
  for (int i = 3; i <= 8; i++) top[-i] = nullptr;
  f.sp = top - 8;
#else
  void** frame = top - 20;
  for (int i = 0; i < 20; i++) frame[i] = nullptr;
  frame[11] = (void*)fiber_main;          // x30
  f.sp = frame;
#endif
}

}  // namespace host
