// The CPU kernels for one instruction set; setup.py gives this file its flags.
#define SHARDOPT_TARGET portable
#define SHARDOPT_LANES 4
#include "step/cpu_kernel.h"
