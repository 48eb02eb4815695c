// Passes over gradients on the CPU for one instruction set; setup.py gives this file its flags.
#define SHARDOPT_TARGET portable
#define SHARDOPT_LANES 4
#define SHARDOPT_PACK 1
#include "norm/cpu_kernel.h"
