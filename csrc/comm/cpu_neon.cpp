// The CPU kernels of messages for one instruction set, which every AArch64 processor has.
#define SHARDOPT_TARGET neon
#define SHARDOPT_NEON
#define SHARDOPT_LANES 4
#define SHARDOPT_PACK 4
#include "comm/cpu_kernel.h"
