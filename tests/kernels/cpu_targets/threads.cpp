// Uses the pool of threads as a process may: from several threads at once, with numbers of workers that change, and
// from a forked child. Prints "done".
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "threads/pool.h"

using namespace shardopt;

namespace {

struct Tasks {
  std::vector<int64_t> done;  // not atomic: each task belongs to one worker
  std::atomic<size_t> next{0};
};

void take(void* context, int) {
  Tasks& tasks = *static_cast<Tasks*>(context);
  for (size_t i; (i = tasks.next.fetch_add(1)) < tasks.done.size();) tasks.done[i] += static_cast<int64_t>(i);
}

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::abort();
}

void use(int rounds) {
  for (int round = 0; round < rounds; ++round) {
    Tasks tasks{std::vector<int64_t>(1 + round % 50)};
    run_on_threads(1 + round % 5, take, &tasks);
    for (size_t i = 0; i < tasks.done.size(); ++i) expect(tasks.done[i] == static_cast<int64_t>(i), "a task");
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) callers.emplace_back(use, 500);
  for (std::thread& caller : callers) caller.join();
  if (argc > 1 && std::strcmp(argv[1], "fork") == 0) {
    const pid_t child = fork();
    if (child == 0) {
      use(100);
      _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child");
  }
  std::puts("done");
}
