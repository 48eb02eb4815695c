// The CPU kernels of messages for one instruction set; setup.py gives this file its flags.
#define SHARDOPT_TARGET avx2
#define SHARDOPT_LANES 8
#define SHARDOPT_PACK 2
#include "comm/cpu_kernel.h"
