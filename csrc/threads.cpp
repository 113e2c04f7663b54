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
#include <list>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace magicpig {

namespace {

constexpr size_t kMaxThreads = 1024;
constexpr int kSpins = 2000;  // a worker looks for the next call this often before it sleeps: about 20 microseconds

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

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
  size_t workers = 0;  // pool threads inside work(); guarded by the pool's mutex
  std::mutex error_mutex;
  std::exception_ptr error;
};

class Pool {
 public:
  explicit Pool(size_t num_threads) : size_(num_threads) {
    try {
      for (size_t i = 1; i < num_threads; ++i) threads_.emplace_back([this] { run(); });
    } catch (...) {
      stop();
      throw;
    }
  }
  ~Pool() { stop(); }

  size_t size() const { return size_; }

  void parallel_for(size_t count, TaskRef task) {
    Job job(count, task);
    std::list<Job*>::iterator place;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      place = jobs_.insert(jobs_.end(), &job);
      calls_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    job.work();
    std::unique_lock<std::mutex> lock(mutex_);
    jobs_.erase(place);
    done_.wait(lock, [&] { return job.workers == 0; });
    if (job.error) std::rethrow_exception(job.error);
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopping_) {
      Job* job = find();
      if (job != nullptr) {
        ++job->workers;
        lock.unlock();
        job->work();
        lock.lock();
        if (--job->workers == 0) done_.notify_all();
        continue;
      }
      const size_t seen = calls_.load(std::memory_order_relaxed);
      lock.unlock();
      for (int i = 0; i < kSpins && calls_.load(std::memory_order_acquire) == seen; ++i) pause();
      lock.lock();
      wake_.wait(lock, [&] { return stopping_ || calls_.load(std::memory_order_relaxed) != seen; });
    }
  }

  Job* find() const {
    for (Job* job : jobs_)
      if (job->next.load(std::memory_order_relaxed) < job->count) return job;
    return nullptr;
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      calls_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  const size_t size_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::list<Job*> jobs_;
  std::atomic<size_t> calls_{0};
  bool stopping_ = false;
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

std::shared_ptr<Pool> pool() {
  static const int registered =
      pthread_atfork([] { current->mutex.lock(); }, [] { current->mutex.unlock(); }, forget_pool_after_fork);
  (void)registered;
  std::lock_guard<std::mutex> lock(current->mutex);
  if (!current->num_threads) current->num_threads = default_num_threads();
  if (!current->pool) current->pool = std::make_shared<Pool>(current->num_threads);
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

size_t num_threads() { return pool()->size(); }

void set_num_threads(size_t count) {
  checked(count, "num_threads", std::to_string(count));
  std::shared_ptr<Pool> old;  // its threads end when its last caller returns
  std::lock_guard<std::mutex> lock(current->mutex);
  if (current->num_threads != count) old.swap(current->pool);
  current->num_threads = count;
}

}  // namespace magicpig
