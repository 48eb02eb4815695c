#include "threads/pool.h"

#include <pthread.h>

#include <algorithm>
#include <cfenv>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

namespace shardopt {
namespace {

// Sets the default floating point environment and puts back the caller's, which torch.set_flush_denormal may have
// changed.
class DefaultFloatingPoint {
 public:
  DefaultFloatingPoint() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatingPoint() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
};

class ThreadPool {
 public:
  void run(int workers, void (*work)(void*, int), void* context) {
    std::lock_guard<std::mutex> one_caller(callers_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      start(workers - 1);
      work_ = work;
      context_ = context;
      workers_ = std::min(workers, started_ + 1);
      running_ = workers_ - 1;
      ++generation_;
    }
    wake_.notify_all();
    call(0);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
  }

 private:
  // Starts threads until there are `threads`, or as many as the system allows.
  void start(int threads) {
    try {
      for (; started_ < threads; ++started_) std::thread(&ThreadPool::serve, this, started_ + 1, generation_).detach();
    } catch (const std::system_error&) {  // a limit on processes or on memory
    } catch (const std::bad_alloc&) {
    }
  }

  void serve(int worker, uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      if (worker >= workers_) continue;
      lock.unlock();
      call(worker);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  void call(int worker) {
    DefaultFloatingPoint environment;
    work_(context_, worker);
  }

  std::mutex callers_, mutex_;
  std::condition_variable wake_, done_;
  void (*work_)(void*, int) = nullptr;
  void* context_ = nullptr;
  int workers_ = 0, started_ = 0, running_ = 0;
  uint64_t generation_ = 0;
};

// The pool is never destroyed: its threads wait in it until the process ends. A forked child has no such threads and
// starts a new pool.
ThreadPool* pool = new ThreadPool;
const int registered = pthread_atfork(nullptr, nullptr, [] { pool = new ThreadPool; });

}  // namespace

void run_on_threads(int workers, void (*work)(void*, int), void* context) noexcept {
  pool->run(workers, work, context);
}

}  // namespace shardopt
