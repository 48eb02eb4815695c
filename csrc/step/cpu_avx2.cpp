// The CPU kernels for one instruction set; setup.py gives this file its flags.
#define SHARDOPT_TARGET avx2
#define SHARDOPT_LANES 8
#include "step/cpu_kernel.h"
