// Uses the pool of threads as a process may: from several threads at once, with numbers of workers that change, from a
// forked child, and for copies. Prints "done".
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "threads/copies.h"
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

void copy(int rounds) {
  for (int round = 0; round < rounds; ++round) {
    std::vector<std::vector<char>> from, to;
    std::vector<uint64_t> sources, targets;
    std::vector<int64_t> sizes{0, 1, 63, 64, 200, 5000, (1 << 20) + round, 3 << 20};
    for (const int64_t size : sizes) {
      from.emplace_back(size, static_cast<char>(round + size));
      to.emplace_back(size);
      sources.push_back(reinterpret_cast<uint64_t>(from.back().data()));
      targets.push_back(reinterpret_cast<uint64_t>(to.back().data()));
    }
    copy_ranges(targets.data(), sources.data(), sizes.data(), static_cast<int64_t>(sizes.size()), 1 + round % 4);
    expect(from == to, "a copy");
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) callers.emplace_back(use, 500);
  callers.emplace_back(copy, 20);
  for (std::thread& caller : callers) caller.join();
  if (argc > 1 && std::strcmp(argv[1], "fork") == 0) {
    const pid_t child = fork();
    if (child == 0) {
      use(100);
      copy(5);
      _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child");
  }
  std::puts("done");
}
