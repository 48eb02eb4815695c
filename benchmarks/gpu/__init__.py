"""The sections of launch/gpu_first.sh, each in a process of its own."""
