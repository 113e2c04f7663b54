// A pool of threads of our own: no OpenMP runtime to clash with another library's, and several callers may use it at
// once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <utility>

namespace magicpig {

// A reference to a callable `void(size_t)`, without allocation.
class TaskRef {
 public:
  template <class F, class = std::enable_if_t<!std::is_same_v<std::decay_t<F>, TaskRef>>>
  TaskRef(F&& f) : object_(const_cast<void*>(static_cast<const void*>(&f))) {
    call_ = [](void* object, size_t i) { (*static_cast<std::remove_reference_t<F>*>(object))(i); };
  }
  void operator()(size_t i) const { call_(object_, i); }

 private:
  void* object_;
  void (*call_)(void*, size_t);
};

// Calls task(0) .. task(count - 1), begun in this order, on the pool's threads and the caller's; returns when all are
// done. The first exception is thrown to the caller, and tasks not begun by then are skipped.
void parallel_for(size_t count, TaskRef task);

// Lets the core's other thread have it for a moment.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// For what another thread has begun and ends soon. A task may wait so for one before it.
template <class F>
void wait_until(const F& done) {
  for (int spins = 0; !done(); ++spins) spins < 4096 ? pause() : std::this_thread::yield();
}

// For a number that another device writes: whether it became `value` within so many seconds.
bool wait_for(const int64_t* number, int64_t value, double seconds);
// For a number that another device waits for: it sees all that was written before.
void tell(int64_t* number, int64_t value);

// Threads that work on a call, the caller's included. At first: the CPUs this process may use, or MAGICPIG_NUM_THREADS.
size_t num_threads();
void set_num_threads(size_t count);  // std::invalid_argument unless 1 <= count <= 1024

// So many of the pool's threads leave their cores to others, until it is called again; callers never rest.
void rest_threads(size_t count);

}  // namespace magicpig
