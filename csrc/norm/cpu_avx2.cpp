// Passes over gradients on the CPU for one instruction set; setup.py gives this file its flags.
#define SHARDOPT_TARGET avx2
#define SHARDOPT_LANES 8
#define SHARDOPT_PACK 2
#include "norm/cpu_kernel.h"
