#include "threads.h"

#include <pthread.h>
#ifdef __linux__
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "stopwatch.h"

namespace magicpig {

namespace {

constexpr size_t kMaxThreads = 1024;
constexpr size_t kSlots = 16;  // calls the pool works on at once; more run on their caller's thread alone
// How long an idle worker looks for the next call before it sleeps: as long as a model's own code takes between layers.
constexpr double kSpinSeconds = 500e-6;

struct Job {
  Job(size_t count, TaskRef task) : count(count), task(task) {}

  void work() {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      try {
        task(i);
      } catch (...) {
        std::lock_guard<std::mutex> lock(error_mutex);
        if (!error) error = std::current_exception();
        next.store(count, std::memory_order_relaxed);
      }
    }
  }

  const size_t count;
  const TaskRef task;
  std::atomic<size_t> next{0};
  std::mutex error_mutex;
  std::exception_ptr error;
};

// Where a caller leaves its job for the workers. No lock is taken to join in: a worker counts itself in before it reads
// the job, and the caller, after it has taken the job away, waits until nobody is counted in. (All of this is
// sequentially consistent: a worker that still got the job is seen by its caller.)
struct alignas(64) Slot {
  std::atomic<bool> taken{false};
  std::atomic<Job*> job{nullptr};
  std::atomic<int> workers{0};

  void help() {
    if (job.load(std::memory_order_relaxed) == nullptr) return;
    ++workers;
    if (Job* current = job) current->work();
    --workers;
  }

  void withdraw() {
    job = nullptr;
    wait_until([&] { return workers == 0; });
    taken = false;
  }
};

class Pool {
 public:
  explicit Pool(size_t num_threads) : size_(num_threads), active_(num_threads - 1) {
    try {
      for (size_t i = 1; i < num_threads; ++i) threads_.emplace_back([this, i] { run(i - 1); });
    } catch (const std::system_error& error) {
      stop();
      throw std::runtime_error("could not start " + std::to_string(num_threads) + " threads (" + error.what() +
                               "); set fewer with set_num_threads or MAGICPIG_NUM_THREADS");
    }
  }
  ~Pool() { stop(); }

  size_t size() const { return size_; }

  void rest(size_t count) {
    const size_t active = size_ - 1 - std::min(count, size_ - 1);
    if (active_.exchange(active) == active) return;
    std::lock_guard<std::mutex> lock(mutex_);
    rested_.notify_all();
  }

  void parallel_for(size_t count, TaskRef task) {
    Job job(count, task);
    Slot* slot = claim();
    if (slot) {
      slot->job = &job;
      announce();
    }
    job.work();
    if (slot) slot->withdraw();
    if (job.error) std::rethrow_exception(job.error);
  }

 private:
  Slot* claim() {
    for (Slot& slot : slots_)
      if (!slot.taken.exchange(true)) return &slot;
    return nullptr;
  }

  // Tells workers to look: those that spin see the counter, those that sleep (or are about to: they count themselves
  // before their last look) are woken.
  void announce() {
    ++calls_;
    if (sleepers_ == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }

  void run(size_t number) {
    for (size_t seen = 0; !stopping_;) {
      if (number >= active_) {
        std::unique_lock<std::mutex> lock(mutex_);
        rested_.wait(lock, [&] { return stopping_ || number < active_; });
        continue;
      }
      const size_t now = calls_;
      for (Slot& slot : slots_) slot.help();
      if (now != seen) {
        seen = now;  // there may be more to come: spin first
        const Stopwatch idle;
        while (calls_ == seen && idle.seconds() < kSpinSeconds)
          for (int i = 0; i < 32 && calls_ == seen; ++i) pause();
        continue;
      }
      std::unique_lock<std::mutex> lock(mutex_);
      ++sleepers_;
      wake_.wait(lock, [&] { return calls_ != seen; });
      --sleepers_;
    }
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      rested_.notify_all();
    }
    announce();
    for (std::thread& thread : threads_) thread.join();
  }

  const size_t size_;
  Slot slots_[kSlots];
  std::atomic<size_t> calls_{0};  // how often there was something new
  std::atomic<size_t> active_;    // workers that do not rest: those of the lowest numbers
  std::atomic<bool> stopping_{false};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_, rested_;
  std::vector<std::thread> threads_;
};

size_t checked(size_t count, const std::string& what, const std::string& value) {
  if (count < 1 || count > kMaxThreads) {
    throw std::invalid_argument(what + " must be from 1 to " + std::to_string(kMaxThreads) + ", not " + value);
  }
  return count;
}

size_t default_num_threads() {
  const char* name = "MAGICPIG_NUM_THREADS";
  if (const char* value = std::getenv(name); value && *value) {
    char* end;
    long long count = std::strtoll(value, &end, 10);
    return checked(*end == 0 && count > 0 ? static_cast<size_t>(count) : 0, name, std::string("'") + value + "'");
  }
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

// The current pool. It is never destroyed at exit (threads may still be inside), and a forked child, which has none of
// its parent's threads, forgets the parent's pool and makes one of its own of the same size.
struct Current {
  std::mutex mutex;
  size_t num_threads = 0;  // 0: not chosen yet
  std::shared_ptr<Pool> pool;
};
Current* current = new Current;

void forget_pool_after_fork() {
  Current* own = new Current;  // the parent's is left as it is, locks and all
  own->num_threads = current->num_threads;
  current = own;
}

const int fork_handlers =
    pthread_atfork([] { current->mutex.lock(); }, [] { current->mutex.unlock(); }, forget_pool_after_fork);

size_t chosen_num_threads() {  // with current->mutex held
  if (!current->num_threads) current->num_threads = default_num_threads();
  return current->num_threads;
}

bool pool_has(size_t num_threads) {
  std::lock_guard<std::mutex> lock(current->mutex);
  return current->pool && current->pool->size() == num_threads;
}

std::shared_ptr<Pool> pool() {
  std::lock_guard<std::mutex> lock(current->mutex);
  if (!current->pool) current->pool = std::make_shared<Pool>(chosen_num_threads());
  return current->pool;
}

}  // namespace

void parallel_for(size_t count, TaskRef task) {
  std::shared_ptr<Pool> workers = pool();
  if (count <= 1 || workers->size() == 1) {
    for (size_t i = 0; i < count; ++i) task(i);
  } else {
    workers->parallel_for(count, task);
  }
}

bool wait_for(const int64_t* number, int64_t value, double seconds) {
  const Stopwatch watch;
  for (;;) {
    for (int i = 0; i < 1024; ++i, pause())
      if (__atomic_load_n(number, __ATOMIC_ACQUIRE) == value) return true;
    if (watch.seconds() > seconds) return false;
  }
}

void tell(int64_t* number, int64_t value) { __atomic_store_n(number, value, __ATOMIC_RELEASE); }

size_t num_threads() {
  std::lock_guard<std::mutex> lock(current->mutex);
  return chosen_num_threads();
}

void set_num_threads(size_t count) {
  checked(count, "num_threads", std::to_string(count));
  if (pool_has(count)) return;
  auto replacement = std::make_shared<Pool>(count);
  std::lock_guard<std::mutex> lock(current->mutex);
  current->num_threads = count;
  current->pool.swap(replacement);  // the old pool's threads end when its last caller returns
}

void rest_threads(size_t count) { pool()->rest(count); }

}  // namespace magicpig
