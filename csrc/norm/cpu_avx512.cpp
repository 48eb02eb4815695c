// Passes over gradients on the CPU for one instruction set; setup.py gives this file its flags.
#define SHARDOPT_TARGET avx512
#define SHARDOPT_LANES 16
#define SHARDOPT_PACK 4
#include "norm/cpu_kernel.h"
