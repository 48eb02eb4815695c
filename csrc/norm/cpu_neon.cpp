// Passes over gradients on the CPU for one instruction set; setup.py gives this file its flags.
#define SHARDOPT_TARGET neon
#define SHARDOPT_NEON
#define SHARDOPT_LANES 4
#define SHARDOPT_PACK 4
#include "norm/cpu_kernel.h"
