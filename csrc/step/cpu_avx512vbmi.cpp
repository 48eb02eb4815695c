// The CPU kernels for one instruction set; setup.py gives this file its flags.
#define SHARDOPT_TARGET avx512vbmi
#define SHARDOPT_LANES 16
#define SHARDOPT_PACK 4
#include "step/cpu_kernel.h"
