// A pool of threads that is started once and waits between steps.
#pragma once

namespace shardopt {

// Calls work(context, worker) for every worker in [0, n), the caller being worker 0, each with the default floating
// point environment (round to nearest, subnormals kept). n is `workers`, or less where the system refuses to start a
// thread: the workers that exist must do all the work. Returns when they are done. Safe after fork() and from several
// threads at once.
void run_on_threads(int workers, void (*work)(void* context, int worker), void* context) noexcept;

}  // namespace shardopt
